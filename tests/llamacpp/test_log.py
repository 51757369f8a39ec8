"""What a handler raises in the midst of a line of the engine's log comes out of the call."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading

import pytest

import infercore as ic

LOGGER = logging.getLogger("infercore.llamacpp")
pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="POSIX signals")


class Boom(Exception):  # noqa: N818  (any exception)
    pass


class Handler(logging.Handler):
    """Raises at line ``at``, by itself or through a signal's handler."""

    def __init__(self):
        super().__init__()
        self.n_lines, self.at, self.by_signal = 0, None, False

    def emit(self, _record):
        self.n_lines += 1
        if self.n_lines == self.at:
            if self.by_signal:
                signal.raise_signal(signal.SIGUSR1)
            raise Boom


def boom(*_):
    raise Boom


@pytest.fixture
def handler():
    found, level = Handler(), LOGGER.level
    LOGGER.addHandler(found)
    LOGGER.setLevel(logging.DEBUG)
    before = signal.signal(signal.SIGUSR1, boom)
    yield found
    signal.signal(signal.SIGUSR1, before)
    LOGGER.removeHandler(found)
    LOGGER.setLevel(level)


@pytest.fixture
def calls(story_path):
    with ic.load_model(story_path, check_in_child=False) as model, contextlib.ExitStack() as stack:
        context = stack.enter_context(model.new_context(n_ctx=64, n_seq_max=2))
        context.decode([5, 6, 7])
        state, sequence = context.save_state(), context.save_sequence(0)
        yield (
            {
                "load": lambda: ic.load_model(story_path, check_in_child=False).close(),
                "plan": lambda: ic.plan_memory(story_path, n_ctx=64, check_in_child=False),
                "context": lambda: model.new_context(n_ctx=64).close(),
                "session": lambda: model.new_session(n_ctx=64).close(),
                "save": context.save_state,
                "load_state": lambda: context.load_state(state),
                "load_sequence": lambda: context.load_sequence(1, sequence),
                "warmup": context.warmup,
                "set_threads": lambda: context.set_threads(1, 1),
            },
            context,
        )


NAMES = (
    "load", "plan", "context", "session", "save", "load_state", "load_sequence", "warmup",
    "set_threads",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_what_a_handler_raises_comes_out_as_itself(handler, calls, name):
    by_name, context = calls
    call = by_name[name]
    call()
    handler.n_lines = 0
    call()
    n_lines = handler.n_lines
    assert n_lines
    for by_signal in (True, False):
        for at in sorted({1, n_lines // 2 or 1, n_lines}):
            handler.n_lines, handler.at, handler.by_signal = 0, at, by_signal
            with pytest.raises(Boom):
                call()
            handler.at = None
            call()  # nothing of it comes later
    context.clear()
    context.decode([5, 6])
    assert context.n_past(0) == 2


def test_a_handler_that_raises_at_the_end_of_a_call_leaves_no_listener(handler, plugin_model):
    from infercore_llamacpp import log

    before = list(log.thread.listeners)  # a call that was interrupted elsewhere may have left its
    handler.at = 1
    with log.listening():
        log.receive(2, b"a line\n")
    with pytest.raises(Boom):
        log.raise_kept()
    assert log.thread.listeners == before
    with log.listening() as outer:
        with log.listening():
            pass
        log.receive(2, b"heard\n")
    assert outer == ["heard"]


def test_what_a_handler_raises_in_a_thread_comes_out_there(handler, calls):
    by_name, _ = calls
    handler.n_lines, handler.at = 0, 1
    found = []

    def work():
        try:
            by_name["warmup"]()
        except Boom as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(found) == 1
    handler.at = None
    by_name["warmup"]()  # nothing of it comes out here


@pytest.mark.parametrize("call", ["decode", "decode_one"])
def test_what_a_handler_raises_within_a_decode_is_raised_behind_it(handler, context, prompt, call):
    """No exception passes through the engine: it is kept for the end of the call."""
    from infercore_llamacpp import log

    own = context._decode

    def decode(*arguments):
        log.receive(3, b"in the midst\n")
        return own(*arguments)

    calls = {
        "decode": lambda: context.decode(prompt[:1], seq_id=0, logits="last"),
        "decode_one": lambda: context.decode_one(5, seq_id=0),
    }
    context._decode = decode
    handler.n_lines, handler.at = 0, 1
    with pytest.raises(Boom):
        calls[call]()
    context._decode = own
    assert context.n_past(0) == 1
    context.decode_one(5, seq_id=0)
