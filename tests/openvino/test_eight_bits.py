"""A KV cache in 8 bits: a scale for each token, so that what is removed leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest

import infercore as ic

U8 = {"type_k": "u8", "type_v": "u8"}


@pytest.fixture
def open_u8(ov_model):
    """Open contexts with a cache in 8 bits; they are closed after the test."""
    opened = []

    def open_one(**fields):
        opened.append(ov_model.new_context(**{"n_ctx": 256, "n_seq_max": 3, **U8, **fields}))
        return opened[-1]

    yield open_one
    for context in opened:
        context.close()


def row(context) -> np.ndarray:
    return np.array(context.logits())


def test_it_is_in_force_and_declared(open_u8) -> None:
    context = open_u8()
    assert (context.effective["type_k"], context.effective["type_v"]) == ("u8", "u8")
    assert "u8" in context.capabilities.kv_types
    assert not context.capabilities.kv_shift


@pytest.mark.parametrize("kept", [1, 31, 32, 33, 45, 64])
def test_what_is_removed_leaves_the_bits_of_the_rest(open_u8, story, kept) -> None:
    """Junk in the same blocks, removed again: the rest goes on as if it had never been there."""
    clean, dirty = open_u8(), open_u8()
    for context in (clean, dirty):
        context.decode(story[:kept])
    dirty.decode(story[100:150])
    assert dirty.seq_remove(0, kept, -1)
    for context in (clean, dirty):
        context.decode(story[kept : kept + 9])
        context.decode_one(story[kept + 9])
    assert np.array_equal(row(clean), row(dirty))


def test_a_copy_goes_its_own_way(open_u8, story) -> None:
    context, alone = open_u8(), open_u8()
    context.decode(story[:40])
    context.seq_copy(0, 1)
    context.decode(story[120:140], seq_id=1)
    context.decode(story[40:50])
    for part in (story[:40], story[40:50]):
        alone.decode(part)
    assert np.array_equal(row(context), row(alone))


def test_a_saved_sequence_comes_back_to_the_bit(open_u8, story) -> None:
    first, second = open_u8(), open_u8()
    first.decode(story[:45])
    second.load_sequence(2, first.save_sequence(0))
    first.decode(story[45:50])
    second.decode(story[45:50], seq_id=2)
    assert np.array_equal(row(first), row(second))


def test_warm_is_cold_within_the_tolerance(open_u8, story) -> None:
    cold, warm = open_u8(), open_u8()
    cold.decode(story[:150])
    warm.decode(story[:90])
    warm.decode(story[90:130])
    warm.seq_remove(0, 90, -1)
    for token in story[90:150]:
        warm.decode_one(token)
    assert np.abs(row(cold) - row(warm)).max() <= cold.tolerance


def test_logits_are_near_those_of_float32(ov_model, open_u8, story) -> None:
    rounded = open_u8()
    with ov_model.new_context(n_ctx=256, type_k="f32", type_v="f32") as exact:
        for context in (rounded, exact):
            context.decode(story[:100])
            context.decode(story[100:103])  # reads the cache
        gap = np.abs(row(rounded) - row(exact)).max()
    assert 1e-4 < gap <= rounded.tolerance


def test_the_plan_shows_what_it_saves(ov_model) -> None:
    plans = {
        kind: ov_model.plan_memory(n_ctx=4096, type_k=kind, type_v=kind).kv_bytes
        for kind in ("f16", "u8")
    }
    head = ov_model.info.n_embd // ov_model.info.n_head
    assert plans["u8"] / plans["f16"] == pytest.approx((head + 8) / (2 * head), rel=0.01)
    with ov_model.new_context(n_ctx=4096, **U8) as context:
        held = context._inner._cache.n_bytes
    assert plans["u8"] == pytest.approx(held, rel=0.01)


def test_four_bits_are_refused(ov_model) -> None:
    with pytest.raises(ic.UnsupportedFeatureError) as caught:
        ov_model.new_context(n_ctx=64, type_k=ic.KVType("u4"), type_v=ic.KVType("u4"))
    assert "type_k" in caught.value.feature
