from __future__ import annotations

import numpy as np
import pytest

from infercore.errors import (
    ContextOverflowError,
    InvalidInputError,
    InvalidPositionError,
    InvalidSequenceError,
    InvalidTokenError,
    UnsupportedFeatureError,
)
from infercore.testing.toy import toy_logits

IDS = [(i * 37 + 11) % 250 for i in range(60)]


@pytest.mark.parametrize("n_batch", [1, 3, 7, 64])
def test_chunks_of_any_size_give_the_same(toy_model, n_batch):
    with toy_model.new_context(n_ctx=64, n_batch=n_batch) as context:
        context.decode(IDS, logits="all")
        assert np.array_equal(context.logits_all()[-1], toy_logits(IDS))
        assert context.tokens() == IDS


@pytest.mark.parametrize("n_batch", [1, 7, 64, 256])
def test_700_tokens_in_chunks(reference_model, n_batch):
    ids = np.random.default_rng(3).integers(4, 1024, 700)
    with (
        reference_model.new_context(n_batch=700) as whole,
        reference_model.new_context(n_batch=n_batch) as split,
    ):
        whole.decode(ids)
        split.decode(ids)
        assert np.abs(whole.logits() - split.logits()).max() < split.tolerance
        assert whole.tokens() == split.tokens() == ids.tolist()


def test_the_same_split_gives_the_same_bits(reference_model):
    rows = []
    for _ in range(2):
        with reference_model.new_context(n_ctx=64, n_batch=7) as context:
            context.decode(IDS)
            rows.append(context.logits().copy())
    assert np.array_equal(*rows)


def test_one_by_one_is_as_all_at_once(either):
    for token in IDS:
        either.decode_one(token)
    one_by_one = either.logits().copy()
    either.clear()
    either.decode(IDS)
    assert np.abs(either.logits() - one_by_one).max() <= either.tolerance


def test_positions_and_counts(either):
    assert (either.n_past(), either.n_resident(), either.n_free()) == (0, 0, 64)
    assert (either.seq_pos_min(), either.seq_pos_max()) == (-1, -1)
    either.decode(IDS[:5])
    either.decode_one(5)
    assert (either.n_past(), either.n_resident(), either.n_free()) == (6, 6, 58)
    assert (either.seq_pos_min(), either.seq_pos_max()) == (0, 5)
    assert either.tokens() == [*IDS[:5], 5]


def test_no_tokens_are_a_no_op(either, state_of):
    either.decode(IDS[:5])
    before = state_of(either)
    either.decode([])
    either.eval([], 5)
    assert state_of(either) == before


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c: c.decode([1, -1]), InvalidTokenError),
        (lambda c: c.decode([1, 1024]), InvalidTokenError),
        (lambda c: c.decode("text"), InvalidInputError),
        (lambda c: c.decode([[1]]), InvalidInputError),
        (lambda c: c.decode([1], seq_id=1), InvalidSequenceError),
        (lambda c: c.decode([1], seq_id=-1), InvalidSequenceError),
        (lambda c: c.decode([1], logits="some"), InvalidInputError),
        (lambda c: c.decode([], seq_id=9), InvalidSequenceError),
        (lambda c: c.decode([], logits=None), InvalidInputError),
        (lambda c: c.decode(IDS), ContextOverflowError),
        (lambda c: c.decode_one(-1), InvalidTokenError),
        (lambda c: c.decode_one(True), InvalidTokenError),
        (lambda c: c.decode_one(1.0), InvalidTokenError),
        (lambda c: c.decode_one(2**40), InvalidTokenError),
        (lambda c: c.decode_one(1, seq_id=True), InvalidSequenceError),
        (lambda c: c.decode_one(1, seq_id=4), InvalidSequenceError),
        (lambda c: c.eval([1], 6), InvalidPositionError),
        (lambda c: c.eval([1], -1), InvalidPositionError),
        (lambda c: c.eval([1], True), InvalidPositionError),
        (lambda c: c.eval([5000], 0), InvalidTokenError),
        (lambda c: c.eval(IDS * 2, 0), ContextOverflowError),
        (lambda c: c.encode([1]), UnsupportedFeatureError),
        (lambda c: c.logits("x"), InvalidInputError),
        (lambda c: c.n_past(7), InvalidSequenceError),
        (lambda c: c.tokens(-1), InvalidSequenceError),
        (lambda c: c.set_threads(0), InvalidInputError),
        (lambda c: c.set_embeddings(1), InvalidInputError),
        (lambda c: c.set_causal_attention(None), InvalidInputError),
        (lambda c: c.set_abort_callback(5), InvalidInputError),
    ],
)
def test_what_is_refused_changes_nothing(either, state_of, call, error):
    either.decode(IDS[:5])
    before = state_of(either)
    with pytest.raises(error) as caught:
        call(either)
    assert caught.value.state_after == "unchanged"
    assert state_of(either) == before
    either.decode_one(5)
    assert either.n_past() == 6


@pytest.mark.parametrize("call", [lambda c: c.set_threads(2), lambda c: c.set_adapters([])])
def test_a_control_that_the_engine_lacks_is_refused(toy, state_of, call):
    toy.decode(IDS[:5])
    before = state_of(toy)
    with pytest.raises(UnsupportedFeatureError):
        call(toy)
    assert state_of(toy) == before


def test_the_window_is_enforced_before_any_change(either, state_of):
    either.decode(IDS)
    before = state_of(either)
    with pytest.raises(ContextOverflowError) as caught:
        either.decode(IDS[:5])
    error = caught.value
    assert (error.stage, error.resident_tokens, error.additional_tokens, error.n_ctx) == (
        "decode", 60, 5, 64,
    )  # fmt: skip
    assert state_of(either) == before
    either.decode(IDS[:4])
    with pytest.raises(ContextOverflowError):
        either.decode_one(1)
    assert either.n_past() == 64
    assert either.n_free() == 0


def test_a_window_of_one_token(either):
    with pytest.raises(ContextOverflowError):
        either.decode(IDS * 2)
    assert either.n_past() == 0


@pytest.mark.parametrize(("n_past", "added"), [(3, [9, 8]), (0, [7]), (5, [1]), (2, [])])
def test_eval_drops_what_lies_beyond(either, n_past, added):
    either.decode(IDS[:5])
    either.eval(added, n_past)
    expected = IDS[:n_past] + added
    assert either.tokens() == expected
    either.decode_one(3)
    row = either.logits().copy()
    either.clear()
    either.decode([*expected, 3])
    assert np.abs(either.logits() - row).max() <= either.tolerance


def test_eval_counts_the_room_of_what_it_drops(either):
    either.decode(IDS)
    either.eval(IDS[:54], 10)
    assert either.n_past() == 64


def test_eval_cannot_go_back_where_nothing_can_be_removed(state_of):
    from infercore.testing import load_toy_model

    model = load_toy_model(kv_remove="none")
    with model, model.new_context(n_ctx=32) as context:
        context.decode([1, 2, 3])
        before = state_of(context)
        with pytest.raises(UnsupportedFeatureError, match="cannot go back to position 2"):
            context.eval([4], 2)
        assert state_of(context) == before
        context.eval([4], 3)
        assert context.tokens() == [1, 2, 3, 4]
        context.eval([5], 0)
        assert context.tokens() == [5]


# -- several sequences ---------------------------------------------------------------------------


def test_sequences_in_one_batch_do_not_see_each_other(several, fresh_logits):
    several.decode(IDS[:4], seq_id=1)
    several.decode_batch(
        [(5, [0], False), (9, [1], True), (6, [0], True), (8, [2], False), (10, [1], True)]
    )
    assert [several.tokens(s) for s in range(4)] == [[5, 6], [*IDS[:4], 9, 10], [8], []]
    for i, tokens in enumerate(([*IDS[:4], 9], [5, 6], [*IDS[:4], 9, 10])):
        assert np.abs(several.logits(i) - fresh_logits(tokens)).max() < several.tolerance
    with pytest.raises(Exception, match="3 output rows"):
        several.logits(3)


def test_a_token_may_go_to_several_sequences(several, fresh_logits):
    several.decode_batch([(5, [0, 1, 2], False), (6, [0, 2], True), (7, [1], True)])
    assert [several.tokens(s) for s in range(4)] == [[5, 6], [5, 7], [5, 6], []]
    assert several.n_free() == 61
    several.decode_one(8, seq_id=2)
    assert np.abs(several.logits() - fresh_logits([5, 6, 8])).max() < several.tolerance


def test_rows_of_a_batch_are_all_there_only_if_all_were_wanted(several):
    several.decode_batch([(5, [0], True), (6, [1], True)])
    assert several.logits_all().shape == (2, 1024)
    several.decode_batch([(5, [0], True), (6, [1], False)])
    with pytest.raises(Exception, match="1 output rows"):
        several.logits_all()


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ([(1, [0])], InvalidInputError),
        ([1], InvalidInputError),
        ([(1, 0, True)], InvalidInputError),
        ([(1, [], True)], InvalidInputError),
        ([(1, [0, 0], True)], InvalidInputError),
        ([(1, [4], True)], InvalidSequenceError),
        ([(1, [-1], True)], InvalidSequenceError),
        ([(-1, [0], True)], InvalidTokenError),
        ([(1, [0], 1)], InvalidInputError),
        ([(1, [0, 1], True)], InvalidPositionError),
        ([(1, [0], False)] * 17, InvalidInputError),
        ([(1, [0], False), (9999, [0], False)], InvalidTokenError),
    ],
)
def test_a_wrong_batch_changes_nothing(several, state_of, entries, error):
    several.decode(IDS[:4])
    before = state_of(several)
    with pytest.raises(error):
        several.decode_batch(entries)
    assert state_of(several) == before
    several.decode_batch([])
    assert state_of(several) == before


def test_a_batch_beyond_the_window_changes_nothing(several, state_of):
    several.decode(IDS)
    before = state_of(several)
    with pytest.raises(ContextOverflowError):
        several.decode_batch([(1, [s], True) for s in (1, 2, 3, 1, 2)])
    assert state_of(several) == before


def test_without_a_common_window_each_sequence_has_its_part(reference_model):
    with reference_model.new_context(n_ctx=64, n_seq_max=3) as context:
        assert context.n_ctx_seq == 21
        context.decode(IDS[:21])
        context.decode(IDS[:20], seq_id=2)
        for call in (
            lambda: context.decode_one(1),
            lambda: context.decode([1, 2], seq_id=2),
            lambda: context.decode_batch([(1, [2], True), (1, [2], True)]),
        ):
            with pytest.raises(ContextOverflowError) as caught:
                call()
            assert caught.value.n_ctx == 21
        context.decode_batch([(1, [2], True), (1, [1], True)])


# -- counters ------------------------------------------------------------------------------------


def test_times_and_counts(either):
    either.decode(IDS[:10])
    either.decode_one(5)
    either.decode([6])
    counters = either.perf()
    assert (counters.prefill_tokens, counters.decode_tokens) == (10, 2)
    assert counters.prefill_ms > 0
    assert counters.decode_ms > 0
    either.reset_perf()
    assert either.perf().prefill_tokens == 0


def test_counters_are_refused_where_they_were_not_wanted(toy_model):
    with toy_model.new_context(n_ctx=32, no_perf=True) as context:
        context.decode([1, 2])
        with pytest.raises(UnsupportedFeatureError, match="no_perf"):
            context.perf()


def test_non_causal_attention_takes_one_call(reference_model):
    with reference_model.new_context(n_ctx=64, n_ubatch=8, n_batch=16) as context:
        context.set_causal_attention(False)
        with pytest.raises(InvalidInputError):
            context.decode(IDS[:9])
        context.decode(IDS[:8])
        changed = context.logits().copy()
        context.clear()
        context.set_causal_attention(True)
        context.decode(IDS[:8])
        assert np.abs(context.logits() - changed).max() > 0.1
