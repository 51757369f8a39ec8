"""A Ctrl-C at any point of a call: nothing stays locked, the books stay true, it can be closed."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.interrupts import interrupt
from infercore.engine import gate
from infercore.testing import engine_of

IDS = [5, 6, 7, 8]
GUARD = os.path.dirname(gate.__file__)
MOST = 2000
SAVED: dict[str, bytes] = {}
CALLS = {
    "decode_one": lambda c: c.decode_one(9),
    "decode_one in the other sequence": lambda c: c.decode_one(9, seq_id=1),
    "decode": lambda c: c.decode([9, 10]),
    "decode in the other sequence": lambda c: c.decode([9, 10], seq_id=1),
    "decode_batch": lambda c: c.decode_batch([(9, (0, 1), False), (10, (1,), True)]),
    "decode_batch that ends in the first": lambda c: c.decode_batch(
        [(9, (1,), False), (10, (0,), True)]
    ),
    "eval": lambda c: c.eval([9], 2),
    "seq_keep": lambda c: c.seq_keep(0),
    "load_state": lambda c: c.load_state(SAVED["state"]),
    "load_sequence": lambda c: c.load_sequence(0, SAVED["sequence"]),
    "logits": lambda c: c.logits(),
    "n_past": lambda c: c.n_past(),
    "seq_remove": lambda c: c.seq_remove(0, 2, -1),
    "seq_copy": lambda c: c.seq_copy(0, 1, 0, 2) if not c.tokens(1) else c.seq_copy(1, 0, 0, 0),
    "clear": lambda c: c.clear(),
    "save_sequence": lambda c: c.save_sequence(0),
}


@pytest.fixture
def elsewhere():
    with ThreadPoolExecutor(1) as pool:
        yield lambda work: pool.submit(work).result(60)


def fill(context, how):
    context.clear()
    if how == "one after the other":
        context.decode(IDS)
        context.decode(IDS, seq_id=1)
    else:  # the cells of the sequences lie between each other
        for token in IDS:
            context.decode_batch([(token, (0,), False), (token, (1,), token == IDS[-1])])


def check(context):
    """The books say what the engine holds, and what is saved is restored with its own logits."""
    engine = engine_of(context)
    for seq_id in range(2):
        held = context.tokens(seq_id)
        assert held == engine.sequences[seq_id].tokens.tolist()
        assert context.n_past(seq_id) == len(held) == context.n_resident(seq_id)
    ledger = context._ledger
    counted = (list(ledger._lengths), ledger.n_cells)
    ledger.recount()
    assert counted == (ledger._lengths, ledger.n_cells)
    for seq_id in range(2):
        context.load_sequence(seq_id, context.save_sequence(seq_id))
        if context.n_outputs and context.tokens(seq_id):
            restored = context.logits().copy()
            token = context.tokens(seq_id)[-1]
            context.seq_remove(seq_id, context.n_past(seq_id) - 1, -1)
            context.decode_one(token, seq_id=seq_id)
            assert abs(restored - context.logits()).max() < context.tolerance
    context.decode_one(3)
    assert context.logits().shape == (context._n_vocab,)


# An interruption of a generator that is dropped can reach nobody.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["one after the other", "in turns"])
@pytest.mark.parametrize("name", list(CALLS))
def test_an_interruption_anywhere_leaves_the_context_usable(reference_model, elsewhere, name, how):
    with reference_model.new_context(n_ctx=64, n_seq_max=2, kv_unified=True) as context:
        context.decode([11, 12, 13, 14])
        SAVED.update(state=context.save_state(), sequence=context.save_sequence(0))
        for n in range(1, MOST):
            fill(context, how)
            interrupted = interrupt(n, lambda: CALLS[name](context), GUARD)
            elsewhere(lambda: check(context))
            if not interrupted:
                return
    pytest.fail("there are more places than were tried")


@pytest.mark.parametrize("before", [True, False], ids=["before it", "behind it"])
def test_an_interrupted_clear_is_done(reference_model, monkeypatch, before):
    with reference_model.new_context(n_ctx=64, n_seq_max=2, kv_unified=True) as context:
        fill(context, "in turns")
        own = engine_of(context).clear

        interruptions = [KeyboardInterrupt()]

        def interrupted():
            if not before or not interruptions:
                own()
            if interruptions:
                raise interruptions.pop()

        monkeypatch.setattr(engine_of(context), "clear", interrupted)
        with pytest.raises(KeyboardInterrupt):
            context.clear()
        assert context.tokens() == context.tokens(1) == []
        context.decode(IDS)
        context.decode(IDS, seq_id=1)
        check(context)


def test_an_interrupted_close_leaves_it_closed_or_to_be_closed(reference_model, elsewhere):
    for n in range(1, MOST):
        context = reference_model.new_context(n_ctx=64)
        context.decode(IDS)
        interrupted = interrupt(n, context.close, GUARD)
        elsewhere(context.close)
        assert context.closed
        assert not context._finalizer.alive
        elsewhere(context.close)
        if not interrupted:
            return
    pytest.fail("there are more places than were tried")
