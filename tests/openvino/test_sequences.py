"""What the paged form adds: several sequences, forks, shifts, divisions."""

from __future__ import annotations

import json

import numpy as np
import pytest

import infercore as ic
from infercore_openvino import state

NEAR = 1e-3


def test_a_fork_goes_its_own_way(open_context, story, reference) -> None:
    context = open_context(n_seq_max=3, kv_unified=True)
    context.decode(story[:45])
    context.seq_copy(0, 1)
    context.seq_copy(0, 2)
    free = context._inner._tables.n_free
    for seq_id in range(3):
        context.decode(story[100 * seq_id : 100 * seq_id + 5], seq_id=seq_id)
        expected = reference(story[:45] + story[100 * seq_id : 100 * seq_id + 5])
        np.testing.assert_allclose(context.logits(), expected, atol=NEAR)
    assert free - context._inner._tables.n_free == 2
    context.decode_one(story[5], seq_id=0)
    np.testing.assert_allclose(context.logits(), reference(story[:45] + story[:6]), atol=NEAR)


def test_a_batch_of_sequences_gives_what_each_gives_alone(open_context, story, reference) -> None:
    context = open_context(n_seq_max=3, n_ubatch=16)
    starts = {0: story[:9], 1: story[20:61], 2: story[70:73]}
    for seq_id, tokens in starts.items():
        context.decode(tokens, seq_id=seq_id)
    entries = [(story[100 + i], (i % 3,), i >= 21) for i in range(24)]
    context.decode_batch(entries)
    for row, i in enumerate(range(21, 24)):
        seen = [story[100 + j] for j in range(24) if j % 3 == i % 3]
        np.testing.assert_allclose(context.logits(row), reference(starts[i % 3] + seen), atol=NEAR)


def test_spans_of_sequences_give_what_each_gives_alone(open_context, story, reference) -> None:
    context = open_context(n_seq_max=3, n_ubatch=16)
    context.decode(story[:9], seq_id=0)
    spans = [(1, story[20:61], "none"), (2, story[70:73], "all"), (0, story[9:14], "last")]
    context.decode_spans(spans)
    held = {0: story[:14], 1: story[20:61], 2: story[70:73]}
    assert {s: context.tokens(s) for s in held} == held
    expected = [held[2][:1], held[2][:2], held[2], held[0]]
    for row, seen in enumerate(expected):
        np.testing.assert_allclose(context.logits(row), reference(seen), atol=NEAR)
    context.seq_copy(0, 2)
    context.decode_spans([(s, [story[80 + s]], "last") for s in held])
    held[2] = held[0]
    for row, seen in held.items():
        expected_row = reference([*seen, story[80 + row]])
        np.testing.assert_allclose(context.logits(row), expected_row, atol=NEAR)


def test_embeddings_of_spans_go_to_their_sequences(open_context, story) -> None:
    batch = open_context(n_seq_max=2, embeddings=True, pooling_type="mean")
    batch.decode_spans([(1, story[5:12], "none"), (0, story[:5], "last")])
    alone = open_context(embeddings=True, pooling_type="mean")
    for seq_id, tokens in ((0, story[:5]), (1, story[5:12])):
        alone.clear()
        alone.decode(tokens)
        np.testing.assert_allclose(batch.embedding(seq_id), alone.embedding(), atol=1e-4)


def test_one_token_of_several_sequences(open_context, story, reference) -> None:
    context = open_context(n_seq_max=2)
    context.decode(story[:8], seq_id=0)
    context.seq_copy(0, 1)
    context.decode_batch([(story[8], (0, 1), True)])
    np.testing.assert_allclose(context.logits(), reference(story[:9]), atol=NEAR)
    context.decode_one(story[9], seq_id=1)
    np.testing.assert_allclose(context.logits(), reference(story[:10]), atol=NEAR)


def test_embeddings_of_a_batch_go_to_their_sequences(open_context, story) -> None:
    batch = open_context(n_seq_max=2, embeddings=True, pooling_type="mean")
    batch.decode_batch([(story[i], (i % 2,), False) for i in range(12)])
    alone = open_context(embeddings=True, pooling_type="mean")
    for seq_id in range(2):
        alone.clear()
        alone.decode(story[seq_id:12:2])
        np.testing.assert_allclose(batch.embedding(seq_id), alone.embedding(), atol=1e-4)


def test_token_embeddings_of_a_batch_keep_its_order(open_context, story) -> None:
    batch = open_context(n_seq_max=2, embeddings=True)
    batch.decode_batch([(story[i], (i % 2,), False) for i in range(10)])
    vectors = np.array(batch.embeddings())
    alone = open_context(embeddings=True)
    alone.decode(story[1:10:2])
    np.testing.assert_allclose(vectors[1::2], alone.embeddings(), atol=1e-4)


def test_a_part_is_copied_from_the_middle(open_context, story) -> None:
    context = open_context(n_seq_max=2)
    context.decode(story[:60])
    context.seq_copy(0, 1, 10, 50)
    assert (context.seq_pos_min(1), context.n_past(1), context.n_resident(1)) == (10, 50, 40)
    other = open_context()
    other.decode(story[:60])
    other.seq_remove(0, 50)
    other.seq_remove(0, 0, 10)
    for one, seq_id in ((context, 1), (other, 0)):
        one.decode(story[60:65], seq_id=seq_id)
    np.testing.assert_allclose(context.logits(), other.logits(), atol=NEAR)


def test_shared_cells_that_part_get_room(open_context, story, reference) -> None:
    """Sequences that share the whole window need several times its blocks when they part."""
    context = open_context(n_ctx=128, n_seq_max=4, kv_unified=True)
    context.decode(story[:120])
    for seq_id in (1, 2, 3):
        context.seq_copy(0, seq_id)
    for seq_id in (1, 2, 3):
        context.seq_remove(seq_id, 0, seq_id)
        assert context.n_resident(seq_id) == 120 - seq_id
    context.seq_remove(0, 100)
    context.decode_one(story[100])
    np.testing.assert_allclose(context.logits(), reference(story[:101]), atol=NEAR)


# -- shifting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("types", ["f32", "f16"])
def test_a_shifted_sequence_is_the_one_made_there(open_context, story, types) -> None:
    context = open_context(type_k=types, type_v=types)
    context.decode(story[:50])
    expected = np.array(context.logits())
    context.seq_shift(0, 0, -1, 37)
    assert (context.seq_pos_min(), context.n_past()) == (37, 87)
    context.seq_remove(0, 86)
    context.decode_one(story[49])
    tolerance = NEAR if types == "f32" else context.tolerance
    np.testing.assert_allclose(context.logits(), expected, atol=tolerance)
    context.seq_shift(0, 0, -1, -37)
    context.seq_remove(0, 49)
    context.decode_one(story[49])
    np.testing.assert_allclose(context.logits(), expected, atol=tolerance)


def test_the_window_slides_as_with_holes(open_context, story) -> None:
    """Removing a part and closing the gap changes relative positions only across it."""
    context = open_context()
    context.decode(story[:70])
    context.seq_remove(0, 0, 30)
    holes = open_context()
    holes.decode(story[:70])
    holes.seq_remove(0, 0, 30)
    context.seq_shift(0, 30, -1, -30)
    assert (context.n_past(), holes.n_past()) == (40, 70)
    for one in (context, holes):
        one.decode(story[70:75])
    np.testing.assert_allclose(context.logits(), holes.logits(), atol=NEAR)


def test_a_shift_leaves_a_fork_alone(open_context, story, reference) -> None:
    context = open_context(n_seq_max=2)
    context.decode(story[:40])
    context.seq_copy(0, 1)
    context.seq_shift(1, 0, -1, 5)
    assert (context.n_past(0), context.n_past(1)) == (40, 45)
    for seq_id in (0, 1):
        context.decode_one(story[40], seq_id=seq_id)
        np.testing.assert_allclose(context.logits(), reference(story[:41]), atol=NEAR)


def test_dividing_is_rotating_by_differing_angles(open_context, story) -> None:
    context = open_context()
    context.decode(story[:40])
    context.seq_divide(0, 0, 40, 2)
    assert (context.n_past(), context.n_resident()) == (20, 40)
    cache = context._inner._cache
    keys = next(a for a in cache.arrays if a.is_key)
    fresh = open_context()
    fresh.decode(story[:40])
    first = next(a for a in fresh._inner._cache.arrays if a.is_key)
    block = context._inner._sequences[0].blocks[0]
    other = fresh._inner._sequences[0].blocks[0]
    # position 8 has become 4: turning it back by hand gives the original key
    from infercore_openvino.rope import rotate

    inv_freq = context._inner._compiled.graph.inv_freq
    back = rotate(keys.data[block, :, 8], np.array(4), inv_freq)
    np.testing.assert_allclose(back, first.data[other, :, 8], atol=1e-4)


def test_keys_that_do_not_turn_are_not_offered(open_context) -> None:
    from infercore_openvino.probe import keys_rotate

    inner = open_context()._inner
    right = inner._compiled.graph.inv_freq
    assert keys_rotate(inner._cache, inner._paged, right)
    assert not keys_rotate(inner._cache, inner._paged, right * 1.01)
    assert not keys_rotate(inner._cache, inner._paged, None)


# -- state of several sequences ----------------------------------------------------------------


def test_all_sequences_come_back_and_share_again(open_context, story) -> None:
    context = open_context(n_seq_max=3)
    context.decode(story[:50])
    context.seq_copy(0, 2)
    context.decode(story[60:70], seq_id=2)
    data = context.save_state()
    used = len(context._inner._tables.extent(context._inner._sequences))
    other = open_context(n_seq_max=3)
    other.decode(story[:5], seq_id=1)
    other.load_state(data)
    assert [other.n_past(s) for s in range(3)] == [50, 0, 60]
    assert len(other._inner._tables.extent(other._inner._sequences)) == used
    for seq_id in (0, 2):
        for one in (context, other):
            one.decode_one(story[80], seq_id=seq_id)
        np.testing.assert_array_equal(context.logits(), other.logits())


def test_the_stateful_form_refuses_what_it_lacks(open_context) -> None:
    with pytest.raises(ic.UnsupportedFeatureError) as caught:
        open_context(form="stateful", n_seq_max=2)
    assert caught.value.feature == "n_seq_max"
    context = open_context(form="stateful")
    with pytest.raises(ic.UnsupportedFeatureError):
        context.seq_shift(0, 0, -1, 1)


@pytest.mark.parametrize("n", [-1, 33, 10**9])
def test_a_saved_sequence_of_more_than_its_blocks_hold_is_refused(open_context, story, n) -> None:
    """The engine would read beyond the cache."""
    context = open_context()
    context.decode(story[:20])
    data = bytes(context._inner.save_sequence(0))
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    assert len(header["sequences"][0]["blocks"]) == 1
    header["sequences"][0]["n"] = n
    with pytest.raises(ic.SnapshotError, match="more tokens"):
        context._inner.load_sequence(0, state.pack(header, [data[start:]]))


def test_a_sequence_that_holds_nothing_is_saved_too(open_context, story) -> None:
    context = open_context(n_seq_max=2)
    nothing, empty = context.save_state(), context.save_sequence(1)
    context.decode(story[:20])
    context.load_sequence(0, empty)
    assert context.n_past() == 0
    context.decode(story[:20])
    context.load_state(nothing)
    assert context.n_past() == 0
