"""Copies and shifts that the engine puts off come before anything else that touches the cells."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import infercore as ic
from infercore_llamacpp import memory as memories

ONE, OTHER = list(range(20, 50)), list(range(60, 75))
STREAMS = {"n_seq_max": 3, "kv_unified": False}


def ids(tokens):
    return np.array(tokens, dtype=np.int32)


def filled(open_context, model, tokens, **fields):
    context = open_context(model, **{**STREAMS, **fields})
    context.decode(ids(tokens), seq_id=0, logits="none")
    return context


def next_row(context, seq_id):
    context.decode_one(5, seq_id=seq_id)
    return context.logits(0).copy()


@pytest.fixture
def expected(story, open_context):
    """The row behind each text, in a context of its own."""
    return {len(text): next_row(filled(open_context, story, text), 0) for text in (ONE, OTHER)}


@pytest.fixture
def saved(story, open_context):
    context = filled(open_context, story, OTHER)
    context.decode(ids(ONE), seq_id=1, logits="none")
    return context.save_sequence(0), context.save_state()


READS = {
    "sequence over the source": (lambda c, seq, _: c.load_sequence(0, seq), {0: OTHER, 1: ONE}),
    "sequence over the copy": (lambda c, seq, _: c.load_sequence(1, seq), {0: ONE, 1: OTHER}),
    "sequence beside": (lambda c, seq, _: c.load_sequence(2, seq), {0: ONE, 1: ONE, 2: OTHER}),
    "state": (lambda c, _, state: c.load_state(state), {0: OTHER, 1: ONE}),
    "cleared, then loaded": (
        lambda c, seq, _: (c.clear(), c.load_sequence(1, seq)),
        {1: OTHER},
    ),
    "removed, then loaded": (
        lambda c, seq, _: (c.seq_remove(1, -1, -1), c.load_sequence(1, seq)),
        {0: ONE, 1: OTHER},
    ),
    "copied on, then loaded": (
        lambda c, seq, _: (c.seq_copy(1, 2, -1, -1), c.load_sequence(1, seq)),
        {0: ONE, 1: OTHER, 2: ONE},
    ),
    "saved": (lambda c, *_: (c.save_state(), c.save_sequence(1)), {0: ONE, 1: ONE}),
}


@pytest.mark.parametrize("case", READS)
def test_a_copy_is_carried_out_before_cells_are_read_or_written(
    story, open_context, expected, saved, case
):
    work, holds = READS[case]
    context = filled(open_context, story, ONE)
    context.seq_copy(0, 1, -1, -1)
    work(context, *saved)
    assert [context.n_past(s) for s in range(3)] == [len(holds.get(s, ())) for s in range(3)]
    for seq_id, text in holds.items():
        assert np.abs(next_row(context, seq_id) - expected[len(text)]).max() < 1e-4


def test_what_is_copied_is_saved_as_it_is(story, open_context, expected):
    """The copy reads its cells and leaves them: to carry it out first would evaluate a token."""
    context = filled(open_context, story, OTHER)
    context.seq_copy(0, 1, -1, -1)
    data = context.save_sequence(0)
    assert context.memory.pending
    context.seq_remove(0, -1, -1)
    context.seq_copy(1, 0, -1, -1)
    context.load_sequence(2, data)
    for seq_id in (0, 1, 2):
        assert np.abs(next_row(context, seq_id) - expected[len(OTHER)]).max() < 1e-4


def test_a_sequence_beside_a_copy_waits_for_none(story, open_context, expected, saved):
    """To carry a copy out evaluates a token: a pool that moves others out would for each."""
    context = filled(open_context, story, ONE)
    context.decode(ids(OTHER), seq_id=2, logits="last")
    context.seq_copy(0, 1, -1, -1)
    row = context.logits(0)
    assert len(context.save_sequence(2)) == len(saved[0])
    context.load_sequence(2, saved[0])
    assert context.memory.pending
    assert np.array_equal(context.logits(0), row)
    for seq_id, text in {0: ONE, 1: ONE, 2: OTHER}.items():
        assert np.abs(next_row(context, seq_id) - expected[len(text)]).max() < 1e-4
    context.seq_shift(0, 0, -1, 3)
    assert context.memory.pending
    context.save_sequence(2)
    assert not context.memory.pending


@pytest.mark.parametrize("change", ["copy", "shift", "divide"])
@pytest.mark.parametrize("empty", ["remove", "clear"])
def test_an_empty_context_can_be_saved(story, open_context, change, empty):
    context = filled(open_context, story, ONE)
    if change == "copy":
        context.seq_copy(0, 1, -1, -1)
    else:
        getattr(context, f"seq_{change}")(0, 0, len(ONE), 2)
    if empty == "clear":
        context.clear()
    else:
        assert context.seq_remove(-1, -1, -1)
    assert len(context.save_state())
    assert context.memory.is_empty


def native_calls():
    """Each of the engine's calls that a save with work put off makes, by its number."""
    return range(12)


@pytest.mark.parametrize("number", native_calls())
@pytest.mark.parametrize("when", ["before", "behind"])
def test_an_interrupted_save_leaves_no_token(
    story, open_context, expected, monkeypatch, number, when
):
    context = filled(open_context, story, ONE)
    context.seq_copy(0, 1, -1, -1)
    counted = itertools.count()

    def interrupted(call):
        def work(*arguments):
            hit = next(counted) == number
            if hit and when == "before":
                raise KeyboardInterrupt
            result = call(*arguments)
            if hit:
                raise KeyboardInterrupt
            return result

        return work

    with monkeypatch.context() as patch:
        patch.setattr(context, "_decode", interrupted(context._decode))
        for name in ("llama_memory_seq_rm", "llama_set_abort_callback", "llama_state_get_size"):
            patch.setattr(memories.api, name, interrupted(getattr(memories.api, name)))
        try:
            context.save_state()
        except KeyboardInterrupt:
            pass
        else:
            assert number >= next(counted) - 1  # there are not so many calls
    assert [context.n_past(s) for s in range(3)] == [len(ONE), len(ONE), 0]
    for seq_id in (0, 1):
        assert np.abs(next_row(context, seq_id) - expected[len(ONE)]).max() < 1e-4


def test_no_abort_falls_into_a_shift(story, open_context):
    """Stopped there, some layers would be turned, and turned again by the next call."""
    text = ids(ONE)

    def shifted(context):
        context.decode(text, seq_id=0, logits="none")
        context.seq_remove(0, 0, 10)
        context.seq_shift(0, 10, len(ONE), -10)

    context, other = open_context(story), open_context(story)
    shifted(context)
    shifted(other)
    asked = itertools.count()
    context.set_abort_callback(lambda: next(asked) < 3)
    with pytest.raises(ic.DecodeAbortedError):
        context.decode_one(5, seq_id=0)
    context.set_abort_callback(None)
    assert np.abs(next_row(context, 0) - next_row(other, 0)).max() < 1e-4


def test_what_was_put_off_is_asked_for_no_abort(story, open_context):
    context = filled(open_context, story, ONE)
    context.seq_copy(0, 1, -1, -1)
    context.set_abort_callback(lambda: True)
    assert len(context.save_state())
    with pytest.raises(ic.DecodeAbortedError):
        context.decode_one(5, seq_id=0)


def test_a_clear_leaves_nothing_that_was_put_off(story, open_context):
    context = filled(open_context, story, ONE)
    context.seq_shift(0, 10, -1, 5)
    context.clear()
    assert not context.memory.pending & memories.SHIFTS
