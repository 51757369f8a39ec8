"""What a context holds after removing, copying and moving."""

from __future__ import annotations

import numpy as np
import pytest

import infercore as ic


def next_row(context, token=5, seq_id=0):
    context.decode_one(token, seq_id=seq_id)
    return context.logits(0).copy()


def fresh_row(open_context, model, tokens, **fields):
    context = open_context(model, **fields)
    context.decode(np.asarray(tokens, dtype=np.int32), seq_id=0, logits="none")
    return next_row(context)


def near(one, other, limit=1e-4):
    return np.abs(one - other).max() < limit


def test_positions_are_the_engines(context, prompt):
    assert (context.n_past(0), context.seq_pos_min(0), context.seq_pos_max(0)) == (0, -1, -1)
    context.decode(prompt[:50], seq_id=0, logits="none")
    assert (context.n_past(0), context.seq_pos_min(0), context.seq_pos_max(0)) == (50, 0, 49)
    assert context.seq_remove(0, 10, 20)
    assert context.n_past(0) == 50
    assert context.seq_remove(0, 30, -1)
    assert context.n_past(0) == 30
    context.clear()
    assert context.n_past(0) == 0


def test_going_back_equals_a_fresh_context(story, context, open_context, prompt):
    context.decode(prompt, seq_id=0, logits="none")
    assert context.seq_remove(0, 40, -1)
    assert near(next_row(context), fresh_row(open_context, story, prompt[:40]))


def test_a_hole_closed_by_a_shift_moves_positions(context, prompt):
    context.decode(prompt[:60], seq_id=0, logits="none")
    assert context.seq_remove(0, 10, 20)
    context.seq_shift(0, 20, 60, -10)
    assert (context.seq_pos_min(0), context.n_past(0)) == (0, 50)
    assert np.isfinite(next_row(context)).all()


def test_dividing_halves_positions(context, prompt):
    context.decode(prompt[:40], seq_id=0, logits="none")
    context.seq_divide(0, 0, 40, 2)
    assert context.n_past(0) == 20


@pytest.mark.parametrize("unified", [True, False])
def test_a_copy_continues_like_its_source(story, open_context, prompt, unified):
    context = open_context(story, n_seq_max=2, kv_unified=unified)
    assert context.capabilities.kv_copy == ("any" if unified else "full")
    assert context.shares_cells is unified
    context.decode(prompt, seq_id=0, logits="none")
    context.seq_copy(0, 1, -1, -1)
    assert context.n_past(1) == len(prompt)
    expected = fresh_row(open_context, story, prompt)
    assert near(next_row(context, seq_id=1), expected)
    assert near(next_row(context, seq_id=0), expected)
    assert context.seq_remove(1, -1, -1)
    assert (context.n_past(0), context.n_past(1)) == (len(prompt) + 1, 0)


def test_several_sequences_in_one_call(story, open_context, prompt):
    context = open_context(story, n_seq_max=3)
    assert context.effective["kv_unified"] is True
    first, second = prompt[:10], prompt[20:27]
    tokens = np.concatenate([first, second])
    positions = np.concatenate([np.arange(10), np.arange(7)]).astype(np.int32)
    seq_ids = [(0,)] * 10 + [(1,)] * 7
    wanted = np.zeros(17, dtype=bool)
    wanted[[9, 16]] = True
    context.decode_batch(tokens, positions, seq_ids, wanted)
    rows = [context.logits(i).copy() for i in range(2)]
    with pytest.raises(ic.OutputNotAvailableError):
        context.logits(2)
    for row, alone in zip(rows, (first, second), strict=True):
        other = open_context(story)
        other.decode(alone, seq_id=0, logits="last")
        assert near(row, other.logits(0))


def test_one_token_may_belong_to_several_sequences(story, open_context, prompt):
    context = open_context(story, n_seq_max=3)
    n = 8
    wanted = np.zeros(n, dtype=bool)
    context.decode_batch(prompt[:n], np.arange(n, dtype=np.int32), [(0, 2)] * n, wanted)
    assert [context.n_past(s) for s in range(3)] == [n, 0, n]


def test_a_full_window_is_reported_by_the_engine_and_changes_nothing(story, open_context):
    context = open_context(story, n_ctx=256)
    context.decode(np.full(256, 7, dtype=np.int32), seq_id=0, logits="last")
    with pytest.raises(ic.ContextOverflowError) as caught:
        context.decode_one(5)
    assert (caught.value.stage, caught.value.additional_tokens) == ("engine", 1)
    assert "memory slot" in caught.value.__notes__[0]
    assert context.n_past(0) == 256
    with pytest.raises(ic.OutputNotAvailableError):
        context.logits(0)


def test_recurrent_sequences_are_removed_only_whole(tiny, open_context):
    context = open_context(tiny("recurrent"))
    assert context.capabilities.kv_remove == "none"
    assert not context.capabilities.kv_shift
    tokens = np.arange(30, dtype=np.int32)
    context.decode(tokens, seq_id=0, logits="none")
    assert not context.seq_remove(0, 10, -1)
    assert context.seq_remove(0, 40, -1)  # nothing is there
    assert context.n_past(0) == 30
    row = next_row(context)
    assert context.seq_remove(0, 0, -1)
    context.decode(tokens, seq_id=0, logits="none")
    assert near(next_row(context), row)


def test_recurrent_state_copies_to_another_sequence(tiny, open_context):
    context = open_context(tiny("recurrent"), n_seq_max=2)
    assert context.capabilities.kv_copy == "full"
    context.decode(np.arange(30, dtype=np.int32), seq_id=0, logits="none")
    context.seq_copy(0, 1, -1, -1)
    assert near(next_row(context, seq_id=1), next_row(context, seq_id=0))


def test_a_sliding_window_goes_back_as_far_as_declared_and_no_further(tiny, open_context):
    model = tiny("sliding")
    context = open_context(model, n_ctx=2048, n_batch=64, n_ubatch=32, swa_full=False)
    declared = context.capabilities
    assert (declared.kv_remove, declared.max_rollback) == ("rollback", 32)
    assert not declared.kv_shift
    tokens = np.random.default_rng(3).integers(0, 128, 1500).astype(np.int32)
    for start in range(0, 1500, 50):
        context.decode(tokens[start : start + 50], seq_id=0, logits="none")
    before = (context.seq_pos_min(0), context.n_past(0))
    assert before[0] > 0
    assert not context.seq_remove(0, 100, -1)
    assert (context.seq_pos_min(0), context.n_past(0)) == before
    assert context.seq_remove(0, 1500 - declared.max_rollback, -1)
    full = open_context(model, n_ctx=2048, n_batch=64, n_ubatch=32, swa_full=True)
    assert full.capabilities.kv_remove == "any"
    for start in range(0, 1468, 64):
        full.decode(tokens[start : min(start + 64, 1468)], seq_id=0, logits="none")
    assert near(next_row(context), next_row(full), 1e-3)
    assert context.seq_remove(0, 0, -1)
    assert context.n_past(0) == 0


def test_a_sliding_window_goes_back_to_the_last_place_whose_window_is_held(tiny, open_context):
    model = tiny("sliding")
    window = model.traits.info.sliding_window
    context = open_context(model, n_ctx=2048, n_batch=64, n_ubatch=32, swa_full=False)
    tokens = np.random.default_rng(5).integers(0, 128, 1500).astype(np.int32)
    for start in range(0, 1500, 50):
        context.decode(tokens[start : start + 50], seq_id=0, logits="none")
    # The token at p0 reads the window that ends with it, so that p0 + 1 - window must be held.
    last = context.seq_pos_min(0) + window - 1
    assert not context.seq_remove(0, last - 1, -1)
    assert context.seq_remove(0, last, -1)
    full = open_context(model, n_ctx=2048, n_batch=64, n_ubatch=32, swa_full=True)
    for start in range(0, last, 64):
        full.decode(tokens[start : min(start + 64, last)], seq_id=0, logits="none")
    assert near(next_row(context), next_row(full), 1e-3)


@pytest.mark.parametrize("unified", [True, False])
def test_a_recurrent_sequence_is_saved_as_it_is_behind_a_copy(tiny, open_context, unified):
    context = open_context(tiny("recurrent"), n_seq_max=2, kv_unified=unified)
    context.decode(np.arange(30, dtype=np.int32), seq_id=0, logits="none")
    context.seq_copy(0, 1, -1, -1)
    context.save_sequence(0)  # no token is evaluated for it: none could be taken back
    assert [context.n_past(seq) for seq in (0, 1)] == [30, 30]


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("name", ["storyteller", "recurrent"])
def test_columns_are_entries(story, tiny, open_context, prompt, unified, name):
    model = story if name == "storyteller" else tiny(name)
    tokens = np.concatenate([prompt[:10], prompt[20:27], prompt[30:31]]) % model.traits.info.n_vocab
    positions = np.concatenate([np.arange(10), np.arange(7), [0]]).astype(np.int32)
    seq_ids = np.repeat([2, 0, 1], [10, 7, 1]).astype(np.int32)
    wanted = np.zeros(18, dtype=bool)
    wanted[[4, 9, 17]] = True
    made = []
    for by_columns in (True, False):
        context = open_context(model, n_seq_max=3, kv_unified=unified)
        for start in (0, 1):
            where = positions + start * np.repeat([10, 7, 1], [10, 7, 1]).astype(np.int32)
            if by_columns:
                context.decode_spans(tokens, where, seq_ids, wanted)
            else:
                context.decode_batch(tokens, where, [(int(s),) for s in seq_ids], wanted)
        assert [context.n_past(s) for s in range(3)] == [14, 2, 20]
        made.append([context.logits(i).copy() for i in range(3)])
        with pytest.raises(ic.OutputNotAvailableError):
            context.logits(3)
    assert np.array_equal(*made)


@pytest.mark.parametrize("type_k", ["f32", "f16", "bf16", "q8_0", "q5_1", "q4_0", "iq4_nl"])
def test_a_shift_that_is_declared_is_worth_its_name(story, open_context, type_k):
    """One token attends to itself alone, so moved keys must be those of another position."""
    context = open_context(story, type_k=type_k)
    assert context.capabilities.kv_divide == context.capabilities.kv_shift
    if not context.capabilities.kv_shift:
        assert type_k not in {"f32", "f16"}
        return
    context.decode(np.array([40], dtype=np.int32), seq_id=0, logits="none")
    context.seq_shift(0, 0, 1, 90)
    context.decode(np.array([41], dtype=np.int32), seq_id=0, logits="last")
    moved = context.logits(0).copy()
    context.clear()
    positions = np.array([90, 91], dtype=np.int32)
    wanted = np.array([False, True])
    context.decode_batch(np.array([40, 41], dtype=np.int32), positions, [(0,), (0,)], wanted)
    assert near(moved, context.logits(0), 1e-4 if type_k == "f32" else context.tolerance)


def test_a_session_that_cannot_shift_is_refused_when_it_is_opened(story_path):
    with ic.load_model(story_path) as model:
        assert model.capabilities.kv_shift
        with pytest.raises(ic.UnsupportedFeatureError):
            model.new_session(n_ctx=64, type_k="q8_0", overflow="shift")


@pytest.mark.parametrize("kind", ["mrope", "learned", "recurrent"])
def test_positions_that_cannot_move_are_told(tiny, open_context, kind):
    """The engine ends the process where it is asked for such a shift."""
    kinds = open_context(tiny(kind)).capabilities
    assert (kinds.kv_shift, kinds.kv_divide) == (False, False)


TURNED = {"llama": True, "sliding": True, "biased": True, "learned": False, "unturned": False}


@pytest.mark.parametrize("kind", TURNED)
def test_keys_are_moved_only_where_that_makes_those_of_the_new_place(tiny, open_context, kind):
    """Learned positions, and layers without any, make other keys than turned ones."""
    context = open_context(tiny(kind))
    assert context.capabilities.kv_shift == context.capabilities.kv_divide == TURNED[kind]
    tokens, wanted = np.array([40, 41], dtype=np.int32), np.array([False, True])
    context.decode(tokens[:1], seq_id=0, logits="none")
    context.memory.shift(0, 0, 1, 90)  # what the engine makes of it
    context.decode(tokens[1:], seq_id=0, logits="last")
    moved = context.logits(0).copy()
    context.clear()
    positions = np.array([90, 91], dtype=np.int32)
    context.decode_batch(tokens, positions, [(0,), (0,)], wanted)
    assert near(moved, context.logits(0), 1e-4) == TURNED[kind]
