"""Saved state comes back, and damage is refused."""

from __future__ import annotations

import numpy as np
import pytest

import infercore as ic


def next_row(context, token=5, seq_id=0):
    context.decode_one(token, seq_id=seq_id)
    return context.logits(0).copy()


@pytest.mark.parametrize("kind", ["story", "recurrent", "sliding"])
def test_state_and_sequence_continue_as_before(story, tiny, open_context, kind):
    model = story if kind == "story" else tiny(kind)
    fields = {"swa_full": False} if kind == "sliding" else {}
    first = open_context(model, **fields)
    first.decode(np.arange(4, 104, dtype=np.int32), seq_id=0, logits="none")
    state, sequence = first.save_state(), first.save_sequence(0)
    expected = next_row(first)
    second = open_context(model, **fields)
    second.load_state(state)
    assert second.n_past(0) == 100
    row = next_row(second)
    # Sliding layers come back in other cells, so their sums are in another order.
    limit = second.tolerance if kind == "sliding" else 0.0
    assert np.abs(row - expected).max() <= limit
    third = open_context(model, n_seq_max=2, **fields)
    third.load_sequence(1, sequence)
    assert (third.n_past(0), third.n_past(1)) == (0, 100)
    assert np.abs(next_row(third, seq_id=1) - expected).max() < third.tolerance


def test_a_shift_is_carried_out_before_saving(story, open_context, prompt):
    first = open_context(story)
    first.decode(prompt, seq_id=0, logits="none")
    first.seq_remove(0, 10, 20)
    first.seq_shift(0, 20, len(prompt), -10)
    state = first.save_state()
    assert first.n_past(0) == len(prompt) - 10
    second = open_context(story)
    second.load_state(state)
    assert np.abs(next_row(second) - next_row(first)).max() < 1e-4


def test_a_copy_between_streams_is_carried_out_before_saving(story, open_context, prompt):
    first = open_context(story, n_seq_max=2, kv_unified=False)
    first.decode(prompt, seq_id=0, logits="none")
    first.seq_copy(0, 1, -1, -1)
    saved = first.save_sequence(1)
    second = open_context(story, n_seq_max=2, kv_unified=False)
    second.load_sequence(0, saved)
    assert np.abs(next_row(second) - next_row(first, seq_id=1)).max() < 1e-4


def test_a_shift_in_a_full_window_is_carried_out_too(story, open_context):
    context = open_context(story, n_ctx=256)
    context.decode(np.full(256, 7, dtype=np.int32), seq_id=0, logits="none")
    context.seq_remove(0, 0, 1)
    context.seq_shift(0, 1, 256, -1)
    context.save_state()
    assert context.n_past(0) == 255


@pytest.mark.parametrize("damage", [lambda d: d[: len(d) // 2], lambda d: b"", lambda d: d + b"x"])
def test_damage_is_refused_and_leaves_nothing(story, open_context, prompt, damage):
    context = open_context(story)
    context.decode(prompt, seq_id=0, logits="none")
    state, sequence = bytes(context.save_state()), bytes(context.save_sequence(0))
    with pytest.raises(ic.SnapshotError):
        context.load_state(damage(state))
    context.clear()  # as the core does
    context.decode(prompt[:5], seq_id=0, logits="none")
    with pytest.raises(ic.SnapshotError):
        context.load_sequence(0, damage(sequence))
    assert context.seq_remove(0, 0, -1)
    context.decode(prompt, seq_id=0, logits="last")
    assert np.isfinite(context.logits(0)).all()


def test_random_damage_never_ends_the_process(story, open_context, prompt):
    context = open_context(story)
    context.decode(prompt[:20], seq_id=0, logits="none")
    state = context.save_state()
    random = np.random.default_rng(5)
    for _ in range(60):
        damaged = bytearray(state)
        damaged[int(random.integers(0, min(len(state), 800)))] ^= int(random.integers(1, 256))
        try:
            context.load_state(bytes(damaged))
        except ic.SnapshotError:
            context.clear()  # as the core does


def test_another_shape_is_refused(story, open_context, prompt):
    context = open_context(story)
    context.decode(prompt, seq_id=0, logits="none")
    state = context.save_state()
    for fields in ({"type_k": "f16"}, {"flash_attn": "on"}, {"n_ctx": 64, "n_seq_max": 1}):
        other = open_context(story, **fields)
        if fields.get("n_ctx"):  # padded to 256, so it fits
            other.load_state(state)
            continue
        with pytest.raises(ic.SnapshotError) as caught:
            other.load_state(state)
        assert "llama.cpp said" in caught.value.__notes__[0]


def test_a_restored_window_does_not_go_back_to_what_was_not_saved(tiny, open_context):
    model = tiny("sliding")
    tokens = np.random.default_rng(3).integers(0, 128, 100).astype(np.int32)
    first = open_context(model)
    first.decode(tokens, seq_id=0, logits="none")
    assert first.seq_remove(0, 95, -1)
    second = open_context(model, n_seq_max=2)
    second.load_sequence(0, first.save_sequence(0))
    second.seq_copy(0, 1, -1, -1)
    for seq_id in (0, 1):
        before = second.seq_pos_min(seq_id)
        assert before > 0  # the sliding layers came back with their window only
        assert not second.seq_remove(seq_id, 50, -1)
        assert (second.seq_pos_min(seq_id), second.n_past(seq_id)) == (before, 95)
    assert second.seq_remove(0, 0, -1)
    second.decode(tokens, seq_id=0, logits="none")
    assert second.seq_remove(0, 50, -1)
    assert first.seq_remove(0, 0, 10)
    assert not first.seq_remove(0, 20, -1)  # removed or lost looks alike: both are refused


CONTEXTS = {
    "alone": {},
    "together": {"n_seq_max": 3, "kv_unified": True},
    "apart": {"n_seq_max": 3, "kv_unified": False},
    "apart, more": {"n_seq_max": 5, "kv_unified": False, "n_ctx": 2560},
}
MEMORIES = {
    "f16": ("story", {"type_k": "f16", "type_v": "f16"}),
    "f32, turned": ("story", {"type_k": "f32", "type_v": "f32", "flash_attn": "off"}),
    "bf16": ("story", {"type_k": "bf16", "type_v": "bf16", "flash_attn": "on"}),
    "q8_0": ("story", {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}),
    "iq4_nl": ("story", {"type_k": "iq4_nl", "type_v": "q5_1", "flash_attn": "on"}),
    "recurrent": ("recurrent", {}),
    "sliding": ("sliding", {}),
    "sliding, narrow": ("sliding", {"swa_full": False}),
    "places": ("mrope", {}),
    "hybrid": ("hybrid", {}),
    "hybrid, sliding": ("hybrid_sliding", {}),
    "hybrid, narrow": ("hybrid_sliding", {"swa_full": False}),
}


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_sequence_goes_into_any_context(story, tiny, open_context, memory):
    kind, fields = MEMORIES[memory]
    model = story if kind == "story" else tiny(kind)
    tokens = np.random.default_rng(9).integers(3, 120, 90).astype(np.int32)
    for own in CONTEXTS.values():
        source = open_context(model, **{"n_ctx": 1536, **fields, **own})
        last = own.get("n_seq_max", 1) - 1
        if last:
            source.decode(tokens[:7], seq_id=0, logits="none")
        source.decode(tokens, seq_id=last, logits="none")
        saved, expected = source.save_sequence(last), next_row(source, seq_id=last)
        for other in CONTEXTS.values():
            target = open_context(model, **{"n_ctx": 1536, **fields, **other})
            place = min(1, other.get("n_seq_max", 1) - 1)
            target.load_sequence(place, saved)
            assert target.n_past(place) == 90
            row = next_row(target, seq_id=place)
            assert np.abs(row - expected).max() < target.tolerance, (own, other)


def test_a_sequence_that_lies_in_more_streams_than_there_are_is_refused(story, open_context):
    context = open_context(story)
    context.decode(np.arange(4, 14, dtype=np.int32), seq_id=0, logits="none")
    saved = bytes(context.save_sequence(0))
    twice = saved[:8] + (2).to_bytes(4, "little") + 2 * saved[12:]
    with pytest.raises(ic.SnapshotError):
        context.load_sequence(0, twice)
