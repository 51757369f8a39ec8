"""Removing, copying and moving, against a computation from nothing."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infercore.errors import (
    ContextOverflowError,
    InvalidInputError,
    InvalidPositionError,
    InvalidSequenceError,
    UnsupportedFeatureError,
)
from infercore.testing.toy import toy_logits

IDS = [(i * 37 + 11) % 250 for i in range(20)]


@pytest.mark.parametrize(
    ("p0", "p1", "kept"),
    [
        (5, -1, range(5)),
        (-1, 5, range(5, 20)),
        (4, 9, [*range(4), *range(9, 20)]),
        (-1, -1, []),
        (0, 400, []),
        (19, 20, range(19)),
        (7, 7, range(20)),
        (20, -1, range(20)),
        (300, 400, range(20)),
    ],
)
def test_a_half_open_range_is_removed(either, p0, p1, kept):
    either.decode(IDS)
    assert either.seq_remove(0, p0, p1) is True
    kept = list(kept)
    assert either.tokens() == [IDS[i] for i in kept]
    assert either.n_resident() == len(kept)
    assert either.n_past() == max(kept, default=-1) + 1
    assert (either.seq_pos_min(), either.seq_pos_max()) == (
        min(kept, default=-1),
        max(kept, default=-1),
    )
    assert either.n_free() == 64 - len(kept)


def test_decoding_on_after_a_removed_tail_is_as_if_it_had_never_been(reference, fresh_logits):
    reference.decode(IDS)
    reference.seq_remove(0, 7, -1)
    reference.decode([9, 8, 7])
    assert np.abs(reference.logits() - fresh_logits([*IDS[:7], 9, 8, 7])).max() < 1e-4


def test_a_hole_is_not_read(toy):
    toy.decode(IDS)
    toy.seq_remove(0, 3, 6)
    toy.decode_one(9)
    left = [i for i in range(20) if not 3 <= i < 6]
    expected = toy_logits([*(IDS[i] for i in left), 9], [*left, 20])
    assert np.array_equal(toy.logits(), expected)


def test_a_hole_can_be_closed_by_a_shift(reference):
    """The positions are contiguous again, and what is rotated anew reads as at its place."""
    reference.decode(IDS)
    reference.seq_remove(0, 3, 6)
    reference.seq_shift(0, 6, -1, -3)
    assert (reference.n_past(), reference.n_resident(), reference.seq_pos_max()) == (17, 17, 16)
    engine = reference._inner.sequences[0]
    assert engine.positions.tolist() == list(range(17))
    assert engine.tokens.tolist() == reference.tokens() == IDS[:3] + IDS[6:]


def test_a_shift_of_everything_changes_no_distance(reference, fresh_logits):
    reference.decode(IDS)
    reference.seq_shift(0, -1, -1, 5)
    assert (reference.seq_pos_min(), reference.n_past()) == (5, 25)
    reference.decode_one(9)
    assert np.abs(reference.logits() - fresh_logits([*IDS, 9])).max() < 1e-4
    reference.seq_shift(0, 0, -1, -5)
    assert (reference.seq_pos_min(), reference.n_past()) == (0, 21)


def test_a_divide_makes_positions_dense(reference):
    reference.decode(IDS)
    reference.seq_divide(0, 0, -1, 4)
    assert (reference.n_past(), reference.n_resident()) == (5, 20)
    assert reference._inner.sequences[0].positions.tolist() == [i // 4 for i in range(20)]
    reference.decode([1, 2, 3])
    assert (reference.n_past(), reference.n_resident()) == (8, 23)
    reference.seq_remove(0, 0, 1)
    assert reference.tokens() == [*IDS[4:], 1, 2, 3]


def test_a_divide_of_a_part(reference):
    reference.decode(IDS)
    reference.seq_divide(0, 10, 14, 2)
    at = reference._inner.sequences[0].positions.tolist()
    assert at == [*range(10), 5, 5, 6, 6, *range(14, 20)]
    assert reference._cells.positions(0) == sorted(at)
    by_position = sorted(range(20), key=lambda i: at[i])
    assert reference.tokens() == [IDS[i] for i in by_position]


def test_two_branches_go_on_as_two_fresh_contexts_do(several, fresh_logits):
    several.decode(IDS)
    several.seq_copy(0, 2)
    assert several.tokens(2) == IDS
    assert several.n_past(2) == 20
    several.decode([5, 6], seq_id=0)
    several.decode([7, 8, 9], seq_id=2)
    assert np.abs(several.logits() - fresh_logits([*IDS, 7, 8, 9])).max() < 1e-4
    several.decode_one(3, seq_id=0)
    assert np.abs(several.logits() - fresh_logits([*IDS, 5, 6, 3])).max() < 1e-4
    several.seq_remove(0)
    several.decode_one(4, seq_id=2)
    assert np.abs(several.logits() - fresh_logits([*IDS, 7, 8, 9, 4])).max() < 1e-4


def test_copied_cells_count_once_in_a_common_window(several):
    several.decode(IDS)
    for target in (1, 2, 3):
        several.seq_copy(0, target)
    assert several.n_free() == 44
    several.seq_remove(0)
    assert several.n_free() == 44
    several.decode(range(1, 45), seq_id=3)
    with pytest.raises(ContextOverflowError):
        several.decode_one(1, seq_id=1)


def test_dropping_a_shared_tail_gives_no_room(several, state_of):
    """eval drops the tail of one sequence; the other still holds those cells."""
    several.decode(IDS)
    several.seq_copy(0, 1)
    several.decode(range(1, 41), seq_id=2)
    before = state_of(several)
    with pytest.raises(ContextOverflowError):
        several.eval(range(1, 11), 10, seq_id=1)
    assert state_of(several) == before


def test_a_part_is_copied_in_place_of_what_was_there(several):
    several.decode(IDS, seq_id=0)
    several.decode([5] * 12, seq_id=1)
    several.seq_copy(0, 1, 4, 8)
    assert sorted(several._cells.positions(1)) == list(range(12))
    assert sorted(several.tokens(1)) == sorted([*IDS[4:8], *[5] * 8])
    several.seq_copy(0, 1)
    assert several.tokens(1) == IDS


@pytest.mark.parametrize("call", [(0, 0), (3, 2), (3, 1, 5, 9), (0, 1, 30, 40), (0, 1, 5, 5)])
def test_copies_of_nothing_change_nothing(several, state_of, call):
    several.decode(IDS)
    several.decode([1, 2], seq_id=1)
    before = state_of(several)
    several.seq_copy(*call)
    assert state_of(several) == before


@pytest.mark.parametrize(("call", "left"), [((3, 1), []), ((3, 1, 1, 2), [1, 3])])
def test_a_copy_of_nothing_takes_away_what_was_there(several, call, left):
    several.decode([1, 2, 3], seq_id=1)
    several.seq_copy(*call)
    assert several.tokens(1) == left


def test_tokens_are_told_by_position(several):
    several.decode([10, 11, 12, 13, 14, 15], seq_id=0)
    several.decode([21, 22, 23, 24, 25, 26], seq_id=1)
    several.seq_remove(1, 0, 3)
    several.seq_copy(0, 1, 0, 3)
    assert several.tokens(1) == [10, 11, 12, 24, 25, 26]
    several.load_sequence(2, several.save_sequence(1))
    assert several.tokens(2) == [10, 11, 12, 24, 25, 26]


@pytest.mark.parametrize(("hole", "at"), [((1, 3), 3), ((0, 2), 1), ((0, 4), 2)])
def test_an_explicit_position_behind_a_hole_is_refused(several, state_of, hole, at):
    several.decode([5, 6, 7, 8])
    several.seq_remove(0, *hole)
    before = state_of(several)
    with pytest.raises(InvalidPositionError):
        several.eval([9], at)
    assert state_of(several) == before


def test_keep_removes_all_others(several):
    for s in range(4):
        several.decode(IDS[: s + 1], seq_id=s)
    several.seq_keep(2)
    assert [several.n_resident(s) for s in range(4)] == [0, 0, 3, 0]
    assert several.n_free() == 61


def test_removing_from_all_sequences(several):
    for s in range(4):
        several.decode(IDS[: s + 3], seq_id=s)
    assert several.seq_remove(-1, 4, -1)
    assert [several.n_past(s) for s in range(4)] == [3, 4, 4, 4]
    several.clear()
    assert [several.n_past(s) for s in range(4)] == [0, 0, 0, 0]
    assert several.n_free() == 64


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c: c.seq_remove(4), InvalidSequenceError),
        (lambda c: c.seq_remove(-2), InvalidSequenceError),
        (lambda c: c.seq_remove(True), InvalidSequenceError),
        (lambda c: c.seq_remove(0, 5, 4), InvalidPositionError),
        (lambda c: c.seq_remove(0, -2), InvalidPositionError),
        (lambda c: c.seq_remove(0, 1.0), InvalidPositionError),
        (lambda c: c.seq_copy(0, 4), InvalidSequenceError),
        (lambda c: c.seq_copy(-1, 0), InvalidSequenceError),
        (lambda c: c.seq_copy(0, 1, 3, 2), InvalidPositionError),
        (lambda c: c.seq_keep(-1), InvalidSequenceError),
        (lambda c: c.seq_shift(0, 5, -1, -6), InvalidPositionError),
        (lambda c: c.seq_shift(0, 5, -1, -1), InvalidPositionError),
        (lambda c: c.seq_shift(0, 0, 5, 1), InvalidPositionError),
        (lambda c: c.seq_shift(0, 0, -1, -1), InvalidPositionError),
        (lambda c: c.seq_shift(0, 0, -1, 2**31), InvalidPositionError),
        (lambda c: c.seq_shift(0, 0, -1, 2**70), InvalidPositionError),
        (lambda c: c.seq_shift(0, 0, -1, 1.5), InvalidInputError),
        (lambda c: c.seq_shift(0, 0, -1, None), InvalidInputError),
        (lambda c: c.seq_divide(0, 0, -1, 0), InvalidInputError),
        (lambda c: c.seq_divide(0, 0, -1, -2), InvalidInputError),
        (lambda c: c.seq_divide(0, 0, -1, True), InvalidInputError),
        (lambda c: c.seq_divide(5, 0, -1, 2), InvalidSequenceError),
    ],
)
def test_what_is_refused_changes_nothing(several, state_of, call, error):
    several.decode(IDS)
    before = state_of(several)
    with pytest.raises(error):
        call(several)
    assert state_of(several) == before


UNDECLARED = {
    "kv_copy": lambda c: c.seq_copy(0, 1),
    "kv_shift": lambda c: c.seq_shift(0, 0, -1, 1),
    "kv_divide": lambda c: c.seq_divide(0, 0, -1, 2),
    "multi_sequence": lambda c: c.decode_batch([(1, [0], True)]),
    "state": lambda c: c.save_state(),
    "sequence_state": lambda c: c.save_sequence(0),
    "embeddings": lambda c: c.set_embeddings(True),
}


@pytest.mark.parametrize("name", sorted(UNDECLARED))
def test_what_is_not_declared_is_refused_and_changes_nothing(reference_model, state_of, name):
    from infercore.testing import load_reference_model

    off = "none" if name == "kv_copy" else False
    model = load_reference_model(**{name: off})
    with model, model.new_context(n_ctx=64, n_seq_max=2) as context:
        context.decode(IDS)
        before = state_of(context)
        with pytest.raises(UnsupportedFeatureError) as caught:
            UNDECLARED[name](context)
        assert caught.value.feature == name
        assert caught.value.backend == "reference"
        assert state_of(context) == before


REMOVALS = [(0, -1), (5, -1), (17, -1), (18, 40), (0, 20), (0, 19), (4, 9), (19, 19), (30, -1)]


@pytest.mark.parametrize(
    ("kind", "removed"),
    [
        ("any", REMOVALS),
        ("suffix", [r for r in REMOVALS if r not in {(0, 19), (4, 9)}]),
        ("rollback", [(0, -1), (17, -1), (18, 40), (0, 20), (19, 19), (30, -1)]),
        ("none", [(0, -1), (0, 20), (19, 19), (30, -1)]),
    ],
)
@pytest.mark.parametrize("part", REMOVALS)
def test_only_declared_parts_are_removed(state_of, kind, removed, part):
    from infercore.testing import load_toy_model

    model = load_toy_model(kv_remove=kind, max_rollback=3)
    with model, model.new_context(n_ctx=64) as context:
        context.decode(IDS)
        before = state_of(context)
        done = context.seq_remove(0, *part)
        assert done is (part in removed)
        if not done:
            assert state_of(context) == before


def test_removing_from_all_is_refused_as_a_whole(state_of):
    from infercore.testing import load_reference_model

    model = load_reference_model(kv_remove="none")
    with model, model.new_context(n_ctx=64, n_seq_max=3) as context:
        context.decode(IDS[:3], seq_id=0)
        context.decode(IDS[:6], seq_id=1)
        before = state_of(context)
        assert context.seq_remove(-1, 0, 4) is False
        assert state_of(context) == before
        assert context.seq_remove(-1) is True


def test_only_whole_sequences_are_copied_where_that_is_all(state_of):
    from infercore.testing import load_reference_model

    model = load_reference_model(kv_copy="full")
    with model, model.new_context(n_ctx=64, n_seq_max=2) as context:
        context.decode(IDS)
        before = state_of(context)
        with pytest.raises(UnsupportedFeatureError, match="whole sequences"):
            context.seq_copy(0, 1, 2, 5)
        assert state_of(context) == before
        context.seq_copy(0, 1, 0, 20)
        assert context.tokens(1) == IDS


# -- any order of calls --------------------------------------------------------------------------

cut = st.integers(0, 12)
plans = st.lists(
    st.one_of(
        st.tuples(st.just("decode"), st.lists(st.integers(0, 255), min_size=1, max_size=6)),
        st.tuples(st.just("remove"), cut, cut),
        st.tuples(st.just("eval"), cut, st.lists(st.integers(0, 255), max_size=3)),
        st.tuples(st.just("clear")),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(plans)
def test_the_books_agree_with_the_engine_after_any_calls(toy_model, plan):
    with toy_model.new_context(n_ctx=32, n_batch=4) as context:
        for kind, *args in plan:
            with contextlib.suppress(ContextOverflowError, InvalidPositionError):
                run(context, kind, args)
            cells = context._inner.cells
            assert context.tokens() == [token for _, token in cells]
            assert list(context._cells.positions(0)) == [position for position, _ in cells]
            assert context.n_past() == max((p for p, _ in cells), default=-1) + 1
            assert len(cells) <= 32


def run(context, kind, args):
    if kind == "decode":
        context.decode(args[0])
        cells = context._inner.cells
        positions, held = zip(*cells, strict=True)
        assert np.array_equal(context.logits(), toy_logits(held, positions))
    elif kind == "remove":
        context.seq_remove(0, *sorted(args))
    elif kind == "eval":
        context.eval(args[1], args[0])
    else:
        context.clear()


@pytest.mark.parametrize(
    "delta", [10**5000, -(10**5000), 2**70, -(2**31)], ids=["huge", "low", "wide", "int"]
)
def test_a_shift_beyond_all_positions_is_refused(reference, delta):
    reference.decode(IDS)
    with pytest.raises(InvalidPositionError, match="delta="):
        reference.seq_shift(0, 0, -1, delta)
    assert reference.tokens() == IDS
