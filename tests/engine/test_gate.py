from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
import threading

import pytest

from engine.interrupts import interrupt
from infercore.engine import gate as gate_module
from infercore.engine.gate import Gate
from infercore.errors import SessionBusyError, SessionClosedError, SessionFatalError


def enter(gate):
    with gate:
        return "inside"


def in_thread(work):
    found = []

    def run():
        try:
            found.append(work())
        except Exception as error:  # noqa: BLE001  (handed to the test)
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    return found[0]


def test_it_lets_one_call_in_after_another():
    gate = Gate("thing")
    assert [enter(gate), enter(gate)] == ["inside", "inside"]


def test_a_second_thread_is_refused_and_comes_in_later():
    gate = Gate("thing")
    with gate:
        assert isinstance(in_thread(lambda: enter(gate)), SessionBusyError)
    assert in_thread(lambda: enter(gate)) == "inside"


def test_the_same_thread_is_refused_inside():
    gate = Gate("thing")
    with gate, pytest.raises(SessionBusyError):
        enter(gate)
    assert enter(gate) == "inside"


def test_a_raise_inside_frees_it():
    gate = Gate("thing")
    with pytest.raises(ZeroDivisionError), gate:
        raise ZeroDivisionError
    assert enter(gate) == "inside"


def test_it_is_shut_once():
    gate = Gate("thing")
    assert gate.shut()
    assert gate.shut()
    assert gate.closed
    with pytest.raises(SessionClosedError, match="this thing is closed"):
        enter(gate)


def test_shutting_from_inside_is_refused():
    gate = Gate("thing")
    with gate, pytest.raises(SessionBusyError):
        gate.shut()
    assert not gate.closed


def test_shutting_waits_for_the_call_inside():
    gate = Gate("thing")
    entered, leave = threading.Event(), threading.Event()

    def work():
        with gate:
            entered.set()
            leave.wait(10)

    worker = threading.Thread(target=work)
    worker.start()
    assert entered.wait(10)
    closer = threading.Thread(target=gate.shut)
    closer.start()
    assert not gate.closed
    leave.set()
    closer.join(10)
    worker.join(10)
    assert gate.closed


def test_the_first_failure_is_repeated():
    gate = Gate("thing")
    first = ValueError("first")
    error = gate.fail(first)
    assert gate.fail(KeyError("second")) is error
    for _ in range(2):
        with pytest.raises(SessionFatalError, match="first") as caught:
            enter(gate)
        assert caught.value.cause is first
    assert gate.shut()
    with pytest.raises(SessionClosedError):
        enter(gate)


FORK = """
    import gc, os, sys, warnings
    warnings.simplefilter("ignore")
    from infercore.errors import InvalidStateError
    from infercore.testing import load_toy_model

    model = load_toy_model()
    context = model.new_context(n_ctx=16)
    context.decode([1, 2, 3])
    engine = context._inner
    child = os.fork()
    if not child:
        refused = 0
        for call in (
            lambda: context.decode([4]),
            lambda: context.n_past(),
            lambda: model.new_context(),
        ):
            try:
                call()
            except InvalidStateError as error:
                refused += error.state == "forked"
        context.close()
        model.close()
        del context
        gc.collect()
        untouched = len(engine.cells) == 3
        fresh = load_toy_model().new_context(n_ctx=16)
        fresh.decode([1, 2, 3])
        os._exit(0 if refused == 3 and untouched and fresh.n_past() == 3 else 1)
    _, status = os.waitpid(child, 0)
    context.decode([4])
    assert context.n_past() == 4
    sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="there is no fork here")
def test_an_inherited_context_is_refused_in_a_forked_child():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORK)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


HERE = (gate_module.__file__,)


def use(gate):
    with gate:
        pass


def use_inside(gate):
    with gate, contextlib.suppress(SessionBusyError):
        use(gate)


def use_shut(gate):
    gate.shut()
    with contextlib.suppress(SessionClosedError):
        use(gate)


def is_here(gate):
    assert not gate.entered_here()


@pytest.mark.parametrize("call", [use, use_inside, use_shut, is_here, Gate.shut])
def test_an_interruption_anywhere_leaves_the_lock_to_all(call):
    for n in range(1, 100):
        gate = Gate("thing")
        interrupted = interrupt(n, lambda g=gate: call(g), (*HERE, __file__))
        assert not gate.entered_here()
        assert in_thread(gate.shut) is True
        if not interrupted:
            return
    pytest.fail("there are more places than were tried")


@pytest.mark.parametrize("call", [use, use_inside])
def test_an_interruption_leaves_the_lock_to_the_thread_inside(call):
    for n in range(1, 100):
        gate = Gate("thing")
        with gate:
            interrupted = in_thread(
                lambda n=n, g=gate: interrupt(n, lambda: busy(call, g), (*HERE, __file__))
            )
            assert gate.entered_here()
            assert isinstance(in_thread(lambda g=gate: enter(g)), SessionBusyError)
        assert enter(gate) == "inside"
        if not interrupted:
            return
    pytest.fail("there are more places than were tried")


def busy(call, gate):
    with contextlib.suppress(SessionBusyError):
        call(gate)


def test_who_comes_beside_a_close_is_told_of_it():
    """Also while the closing thread has the lock and has not barred the way yet."""
    told = []

    class Watched(Gate):
        def acquire(self, *args, **fields):
            taken = super().acquire(*args, **fields)
            if taken and not args and not told:
                told.append(None)
                told[0] = in_thread(lambda: enter(self))
            return taken

    gate = Watched("thing")
    gate.shut()
    assert isinstance(told[0], SessionClosedError)


def test_who_comes_while_a_close_waits_for_the_call_inside_is_told_of_it():
    gate = Gate("thing")
    with gate:
        closer = threading.Thread(target=gate.shut)
        closer.start()
        while not gate._is_shutting:
            closer.join(0.001)
        assert isinstance(in_thread(lambda: enter(gate)), SessionClosedError)
    closer.join(10)
    assert gate.closed
