"""Whatever an engine call does wrong: the state is the promised one, the books are the truth."""

from __future__ import annotations

import numpy as np
import pytest

from infercore.errors import (
    ContextOverflowError,
    DecodeAbortedError,
    OutOfMemoryError,
    OutputNotAvailableError,
    SessionFatalError,
    UnsupportedFeatureError,
)
from infercore.testing import Faults
from infercore.testing.faults import aborted, no_room

IDS = [(i * 37 + 11) % 250 for i in range(30)]


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def context(faults):
    from infercore.testing import load_reference_model

    model = load_reference_model(faults=faults)
    with (
        model,
        model.new_context(n_ctx=64, n_batch=8, n_seq_max=4, kv_unified=True) as opened,
    ):
        opened.decode(IDS[:5])
        opened.decode([1, 2], seq_id=1)
        faults.reset()
        yield opened


def check_truth(context):
    """The books hold what the engine holds, and no row is left."""
    engine = context._inner._inner
    for s in range(context.n_seq_max):
        assert context.tokens(s) == engine.sequences[s].tokens.tolist()
        assert list(context._cells.positions(s)) == engine.sequences[s].positions.tolist()
    with pytest.raises(OutputNotAvailableError):
        context.logits()


def check_goes_on(context, fresh_logits):
    held = context.tokens()
    context.decode([3, 4])
    assert np.abs(context.logits() - fresh_logits([*held, 3, 4])).max() < context.tolerance


CALLS = {
    "decode": lambda c: c.decode(IDS[5:29]),
    "decode_one": lambda c: c.decode_one(7),
    "decode_batch": lambda c: c.decode_batch([(t, [t % 2 * 2], True) for t in IDS[5:11]]),
}
WORKS = [
    ("decode", "nothing"), ("decode", "half"), ("decode", "all"),
    ("decode_one", "nothing"), ("decode_one", "all"),
    ("decode_batch", "nothing"), ("decode_batch", "half"), ("decode_batch", "all"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "work"), WORKS)
@pytest.mark.parametrize(
    "kinds",
    [
        (no_room, ContextOverflowError),
        (aborted, DecodeAbortedError),
        (MemoryError, OutOfMemoryError),
        (KeyboardInterrupt, KeyboardInterrupt),
        (SystemExit, SystemExit),
        (lambda: UnsupportedFeatureError(feature="x"), UnsupportedFeatureError),
    ],
)
def test_what_an_append_kept_is_known(context, faults, fresh_logits, call, work, kinds):
    fault, typed = kinds
    faults.plan(call, fault(), at=1 if call != "decode" else 2, work=work)
    with pytest.raises(typed) as caught:
        CALLS[call](context)
    assert caught.value.__cause__ is not caught.value
    check_truth(context)
    if typed in {ContextOverflowError, DecodeAbortedError}:
        held = [context.n_resident(s) for s in range(4)]
        expected = sum(held) if call == "decode_batch" else held[0]
        assert caught.value.resident_tokens == expected
        assert caught.value.state_after == "partial"
    if typed is ContextOverflowError:
        assert (caught.value.stage, caught.value.n_ctx) == ("engine", 64)
    check_goes_on(context, fresh_logits)


@pytest.mark.parametrize("call", ["decode", "decode_batch"])
def test_a_sequence_that_a_failure_empties_ends_the_context(context, monkeypatch, call):
    engine = context._inner

    def lose(*_, **__):
        engine.seq_remove(0, 0, -1)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, call, lose)
    with pytest.raises(KeyboardInterrupt):
        CALLS[call](context)
    with pytest.raises(SessionFatalError):
        context.n_past()


@pytest.mark.parametrize(("call", "work"), WORKS)
def test_what_nobody_expects_ends_the_context(context, faults, call, work):
    first = RuntimeError("the engine is on fire")
    faults.plan(call, first, work=work)
    with pytest.raises(SessionFatalError) as caught:
        CALLS[call](context)
    assert caught.value.cause is first
    for later in (lambda: context.decode([1]), context.n_past, context.clear, context.logits):
        with pytest.raises(SessionFatalError, match="on fire") as again:
            later()
        assert again.value.cause is first
    context.close()
    assert context.closed


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("seq_remove", lambda c: c.seq_remove(0, 2, -1)),
        ("seq_remove", lambda c: c.eval([9], 2)),
        ("seq_remove", lambda c: c.seq_keep(0)),
        ("seq_copy", lambda c: c.seq_copy(0, 2)),
        ("seq_shift", lambda c: c.seq_shift(0, 0, -1, 2)),
        ("seq_divide", lambda c: c.seq_divide(0, 0, -1, 2)),
        ("clear", lambda c: c.clear()),
    ],
)
@pytest.mark.parametrize("work", ["nothing", "all"])
@pytest.mark.parametrize("fault", [RuntimeError("odd"), KeyboardInterrupt("now")])
def test_a_change_that_breaks_off_is_not_trusted(context, faults, name, call, work, fault):
    interrupted = isinstance(fault, KeyboardInterrupt)
    faults.plan(name, fault, work=work)
    with pytest.raises(KeyboardInterrupt if interrupted else SessionFatalError):
        call(context)
    if interrupted and name in {"seq_remove", "clear"}:
        return  # the engine tells how far it came; the next test is about that
    with pytest.raises(SessionFatalError) as caught:
        context.n_past()
    assert caught.value.cause is fault


@pytest.mark.parametrize("work", ["nothing", "all"])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("seq_remove", lambda c: c.seq_remove(0, 2, -1)),
        ("seq_remove", lambda c: c.seq_remove(0)),
        ("seq_remove", lambda c: c.eval([9], 2)),
        ("seq_remove", lambda c: c.seq_keep(0)),
        ("clear", lambda c: c.clear()),
    ],
)
def test_an_interrupted_removal_of_an_end_is_done_or_not(
    context, faults, fresh_logits, name, call, work
):
    faults.plan(name, KeyboardInterrupt(), work=work)
    with pytest.raises(KeyboardInterrupt):
        call(context)
    engine = context._inner._inner
    for s in range(context.n_seq_max):
        assert context.tokens(s) == engine.sequences[s].tokens.tolist()
    check_goes_on(context, fresh_logits)


def test_an_interrupted_removal_of_a_middle_is_not_trusted(context, faults):
    faults.plan("seq_remove", KeyboardInterrupt(), work="all")
    with pytest.raises(KeyboardInterrupt):
        context.seq_remove(0, 1, 3)
    with pytest.raises(SessionFatalError):
        context.n_past()


@pytest.mark.parametrize("name", ["save_state", "save_sequence"])
def test_a_save_without_memory_changes_nothing(context, faults, state_of, name):
    before = state_of(context)
    faults.plan(name, MemoryError("full"))
    with pytest.raises(OutOfMemoryError, match="full"):
        getattr(context, name)()
    assert state_of(context) == before
    getattr(context, name)()


def test_counts_after_a_failure_are_what_was_evaluated(context, faults):
    context.reset_perf()
    faults.plan("decode", aborted(), at=2, work="half")
    with pytest.raises(DecodeAbortedError):
        context.decode(IDS[:24])
    assert context.perf().prefill_tokens == 12


def test_a_row_that_cannot_be_read_in_mid_call(context, faults):
    """Rows are gathered between the chunks; what was appended until then is known."""
    faults.plan("logits", RuntimeError("no row"), at=3)
    with pytest.raises(RuntimeError):
        context.decode(IDS[5:29], logits="all")
    if context._gate.fatal is None:
        check_truth(context)


def test_an_engine_that_cannot_tell_its_position_is_not_trusted(context, faults):
    faults.plan("decode", aborted(), work="half")
    faults.plan("n_past", RuntimeError("lost"), at=2, times=5)
    with pytest.raises(SessionFatalError):
        context.decode(IDS[5:9])
    with pytest.raises(SessionFatalError):
        context.tokens()


ASK_FOR_THE_POSITION = {
    "n_past": lambda c, _: c.n_past(),
    "decode": lambda c, _: c.decode(IDS[5:9]),
    "eval": lambda c, _: c.eval([3], 2),
    "decode_batch": lambda c, _: c.decode_batch([(3, [0], True)]),
    "seq_divide": lambda c, _: c.seq_divide(0, 0, -1, 2),
    "load_state": lambda c, state: c.load_state(state),
}


@pytest.mark.parametrize("name", ASK_FOR_THE_POSITION)
@pytest.mark.parametrize(
    ("fault", "typed"),
    [(RuntimeError("lost"), SessionFatalError), (MemoryError(), OutOfMemoryError)],
)
def test_a_position_that_cannot_be_told_is_a_typed_error(context, faults, name, fault, typed):
    state = context.save_state()
    faults.plan("n_past", fault)
    with pytest.raises(typed) as caught:
        ASK_FOR_THE_POSITION[name](context, state)
    assert caught.value.__cause__ is fault
    assert (context._gate.fatal is None) == (typed is OutOfMemoryError)


@pytest.mark.parametrize("kind", ["suffix", "rollback"])
def test_removing_asks_for_the_position_too(faults, kind):
    from infercore.testing import load_reference_model

    model = load_reference_model(faults=faults, kv_remove=kind, max_rollback=8)
    with model, model.new_context(n_ctx=64) as context:
        context.decode(IDS[:5])
        faults.plan("n_past", RuntimeError("lost"))
        with pytest.raises(SessionFatalError, match="lost"):
            context.seq_remove(0, 3)


def test_a_batch_that_fails_with_an_engine_that_is_lost(context, faults):
    first = aborted()
    faults.plan("decode_batch", first, work="half")
    faults.plan("n_past", RuntimeError("lost"), at=5, times=5)
    with pytest.raises(SessionFatalError) as caught:
        context.decode_batch([(token, [0], False) for token in IDS[5:9]])
    assert caught.value.cause is first


@pytest.fixture
def sampler(faults, context):
    from infercore.testing import load_reference_model

    with load_reference_model(faults=faults) as model:
        made = model.new_sampler(implementation="native", temperature=0)
        yield made
        made.close()


USE_OF_A_SAMPLER = {
    "observe": lambda s: s.observe([1, 2]),
    "reset": lambda s: s.reset(),
    "clone": lambda s: s.clone(),
}


@pytest.mark.parametrize("name", USE_OF_A_SAMPLER)
def test_a_native_sampler_that_fails_is_not_trusted(context, sampler, faults, name):
    use, fault = USE_OF_A_SAMPLER[name], RuntimeError("bad dice")
    faults.plan(name, fault)
    with pytest.raises(SessionFatalError, match="this sampler") as caught:
        use(sampler)
    assert caught.value.cause is fault
    for later in (*USE_OF_A_SAMPLER.values(), lambda s: s.sample(context)):
        with pytest.raises(SessionFatalError, match="bad dice"):
            later(sampler)
    context.decode_one(3)


@pytest.mark.parametrize("name", USE_OF_A_SAMPLER)
def test_a_native_sampler_without_memory_goes_on(context, sampler, faults, name):
    faults.plan(name, MemoryError("full"))
    with pytest.raises(OutOfMemoryError, match="full"):
        USE_OF_A_SAMPLER[name](sampler)
    context.decode_one(3)
    assert sampler.sample(context) == context.logits().argmax()


def test_a_plan_can_be_changed_and_taken_back(context, faults):
    faults.plan("decode", aborted(), at=3)
    context.decode([1])
    context.decode([2])
    with pytest.raises(DecodeAbortedError):
        context.decode([3])
    context.decode([4])
    faults.plan("decode", aborted(), times=2)
    for _ in range(2):
        with pytest.raises(DecodeAbortedError):
            context.decode([5])
    context.decode([6])
    faults.plan("decode", aborted())
    faults.reset()
    context.decode([7])
    assert faults.calls["decode"] == 1
