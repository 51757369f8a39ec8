from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from infercore.errors import DecodeAbortedError, OutputNotAvailableError
from infercore.testing import engine_of

IDS = np.random.default_rng(1).integers(4, 1024, 640).tolist()


@pytest.fixture
def long(reference_model):
    with reference_model.new_context(n_batch=64, n_ubatch=8) as context:
        yield context


@pytest.fixture
def whole(reference_model):
    with reference_model.new_context(n_batch=64, n_ubatch=8) as context:
        context.decode(IDS)
        return context.logits().copy()


def aborting(context, n_tokens):
    """Abort from another thread once the engine holds ``n_tokens``; return what decode raised."""
    engine, at = context._inner, []

    def watch():
        until = time.monotonic() + 30
        while engine.n_past(0) < n_tokens and time.monotonic() < until:
            time.sleep(0.0005)
        at.append(time.monotonic())
        context.abort()

    watcher = threading.Thread(target=watch)
    watcher.start()
    with pytest.raises(DecodeAbortedError) as caught:
        context.decode(IDS)
    took = time.monotonic() - at[0]
    watcher.join(10)
    return caught.value, took


def test_another_thread_stops_a_long_prefill_that_can_be_resumed(long, whole):
    error, took = aborting(long, 80)
    resident = long.n_past()
    assert 80 <= resident < 640
    assert error.resident_tokens == resident == long.n_resident()
    assert error.state_after == "partial"
    assert long.tokens() == IDS[:resident]
    assert took < 1
    with pytest.raises(OutputNotAvailableError):
        long.logits()
    long.decode(IDS[resident:])
    assert np.abs(long.logits() - whole).max() < long.tolerance
    assert long.perf().prefill_tokens == 640


def test_without_an_abort_in_the_engine_it_is_asked_between_calls():
    from infercore.testing import load_reference_model

    model = load_reference_model(abort=False)
    with model, model.new_context(n_batch=32) as context:
        error, _ = aborting(context, 64)
        assert error.resident_tokens == context.n_past()
        assert context.n_past() % 32 == 0
        context.decode(IDS[context.n_past() :])
        assert context.tokens() == IDS


def test_an_abort_without_a_call_that_runs_does_nothing(long):
    long.abort()
    long.decode(IDS[:20])
    long.abort()
    long.decode_one(3)
    assert long.n_past() == 21


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.decode_one(9),
        lambda c: c.decode([9, 10]),
        lambda c: c.decode_batch([(9, (0,), True), (9, (1,), True)]),
        lambda c: c.seq_remove(-1, -1, -1) and c.warmup(),
    ],
    ids=["decode_one", "decode", "decode_batch", "warmup"],
)
def test_an_abort_that_comes_too_late_stops_no_later_call(reference_model, call):
    with reference_model.new_context(n_ctx=64, n_seq_max=2) as context:
        context.decode_one(8)
        context.decode_one(8, seq_id=1)
        # What a thread does that was held up in abort() until the call had ended.
        context._abort.asked = True
        context._inner.abort()
        call(context)
        context.decode_one(10)


def test_a_batch_of_several_sequences_is_stopped_too(reference_model):
    with reference_model.new_context(n_ctx=512, n_batch=256, n_ubatch=4, n_seq_max=2) as context:
        engine = context._inner
        watcher = threading.Thread(
            target=lambda: (wait_for(lambda: engine.n_past(0) >= 8), context.abort())
        )
        watcher.start()
        entries = [(token, [i % 2], False) for i, token in enumerate(IDS[:256])]
        with pytest.raises(DecodeAbortedError) as caught:
            context.decode_batch(entries)
        watcher.join(10)
        held = [context.n_past(s) for s in (0, 1)]
        assert sum(held) == caught.value.resident_tokens < 256
        assert context.tokens(0) == IDS[0:256:2][: held[0]]
        assert context.tokens(1) == IDS[1:256:2][: held[1]]


BATCH = [(token, [i % 2], True) for i, token in enumerate(IDS[:8])]


@pytest.mark.parametrize("declared", [True, False])
def test_a_callback_is_asked_before_a_batch_of_several_sequences(declared):
    """Also where the engine itself asks nobody."""
    from infercore.testing import load_reference_model

    model = load_reference_model(abort=declared)
    with model, model.new_context(n_ctx=64, n_seq_max=2, kv_unified=True) as context:
        context.decode(IDS[:3])
        if not declared:
            engine_of(context).set_abort_callback = None  # it takes none
        context.set_abort_callback(lambda: True)
        with pytest.raises(DecodeAbortedError) as caught:
            context.decode_batch(BATCH)
        assert caught.value.resident_tokens == 3
        assert caught.value.state_after == "partial"
        assert [context.n_past(s) for s in (0, 1)] == [3, 0]
        with pytest.raises(OutputNotAvailableError):
            context.logits()
        context.set_abort_callback(None)
        context.decode_batch(BATCH)
        assert [context.n_past(s) for s in (0, 1)] == [7, 4]


def test_what_a_callback_raises_before_a_batch_is_raised(several):
    mine = ValueError("mine")

    def callback():
        raise mine

    several.set_abort_callback(callback)
    with pytest.raises(ValueError, match="mine") as caught:
        several.decode_batch(BATCH)
    assert caught.value is mine
    assert several.n_past() == 0
    several.set_abort_callback(None)
    several.decode_batch(BATCH)


def wait_for(condition):
    until = time.monotonic() + 30
    while not condition() and time.monotonic() < until:
        time.sleep(0.0005)


def test_a_callback_is_asked_and_obeyed(long, whole):
    asked = []
    long.set_abort_callback(lambda: len(asked) > 40 or asked.append(long.closed))
    with pytest.raises(DecodeAbortedError) as caught:
        long.decode(IDS)
    resident = long.n_past()
    assert 0 < caught.value.resident_tokens == resident < 640
    long.set_abort_callback(None)
    long.decode(IDS[resident:])
    assert np.abs(long.logits() - whole).max() < long.tolerance


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("declared", [True, False])
def test_what_a_callback_raises_is_raised_and_the_context_goes_on(error, declared):
    from infercore.testing import load_reference_model

    model = load_reference_model(abort=declared)
    with model, model.new_context(n_batch=16, n_ubatch=16) as context:
        asked = []

        def callback():
            asked.append(1)
            if len(asked) == 12:
                raise error
            return False

        context.set_abort_callback(callback)
        with pytest.raises(type(error)) as caught:
            context.decode(IDS)
        assert caught.value is error
        resident = context.n_past()
        assert resident % 16 == 0
        assert 0 < resident < 640
        assert context.tokens() == IDS[:resident]
        context.decode(IDS[resident : resident + 5])
        context.set_abort_callback(None)
        context.decode(IDS[resident + 5 :])
        assert context.tokens() == IDS


def refusal(call):
    """Return the name of what ``call`` raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  (its kind is asked for)
        return type(error).__name__
    return None


def test_a_callback_may_not_enter_the_context(long):
    found = []

    def callback():
        found.extend(map(refusal, (long.n_past, long.close, lambda: long.decode([1]))))
        return True

    long.set_abort_callback(callback)
    with pytest.raises(DecodeAbortedError):
        long.decode(IDS)
    assert found == ["SessionBusyError"] * 3
    assert not long.closed
    long.set_abort_callback(None)
    long.decode(IDS[:5])


def test_a_callback_stops_single_tokens(long):
    long.decode(IDS[:4])
    long.set_abort_callback(lambda: True)
    with pytest.raises(DecodeAbortedError) as caught:
        long.decode_one(5)
    assert caught.value.resident_tokens == 4
    assert long.tokens() == IDS[:4]


def test_closing_stops_a_call_that_runs(reference_model):
    context = reference_model.new_context(n_batch=64, n_ubatch=4)
    engine, found = context._inner, []

    def work():
        try:
            context.decode(IDS)
        except Exception as error:  # noqa: BLE001  (handed to the test)
            found.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    wait_for(lambda: engine.sequences and engine.n_past(0) >= 8)
    context.close()
    worker.join(10)
    assert isinstance(found[0], DecodeAbortedError)
    assert context.closed
    assert engine.sequences == []


def test_a_second_thread_is_refused_while_a_call_runs(long):
    engine, found = long._inner, []

    def enter():
        wait_for(lambda: engine.n_past(0) >= 8)
        calls = (long.n_past, lambda: long.decode([1]), long.logits, long.clear)
        found.extend(map(refusal, calls))
        long.abort()

    other = threading.Thread(target=enter)
    other.start()
    with pytest.raises(DecodeAbortedError):
        long.decode(IDS)
    other.join(10)
    assert found == ["SessionBusyError"] * 4
    assert long.tokens() == IDS[: long.n_past()]
