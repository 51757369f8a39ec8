"""Spans of several sequences in one call."""

from __future__ import annotations

import numpy as np
import pytest

from infercore.errors import (
    ContextOverflowError,
    DecodeAbortedError,
    InvalidInputError,
    InvalidSequenceError,
    InvalidTokenError,
    OutOfMemoryError,
    OutputNotAvailableError,
    SessionFatalError,
    UnsupportedFeatureError,
)
from infercore.testing import load_reference_model
from infercore.testing.faults import Faults, no_room

A = [(i * 37 + 11) % 250 for i in range(40)]
B = [(i * 53 + 7) % 250 for i in range(40)]
C = [(i * 29 + 3) % 250 for i in range(40)]


def rows(context):
    return [np.array(context.logits(i)) for i in range(context.n_outputs)]


def near(several, fresh_logits, row, tokens):
    return np.abs(row - fresh_logits(tokens)).max() < several.tolerance


def test_each_span_goes_to_its_sequence_and_rows_follow_the_spans(several, fresh_logits):
    several.decode(A[:4], seq_id=2)
    several.decode_spans([(2, A[4:6], "last"), (0, B[:3], "all"), (1, C[:2], "none")])
    assert [several.tokens(s) for s in range(4)] == [B[:3], C[:2], A[:6], []]
    assert [several.n_past(s) for s in range(4)] == [3, 2, 6, 0]
    assert several.n_free() == 64 - 11
    expected = [A[:6], B[:1], B[:2], B[:3]]
    assert several.n_outputs == len(expected)
    for row, tokens in zip(rows(several), expected, strict=True):
        assert near(several, fresh_logits, row, tokens)
    with pytest.raises(OutputNotAvailableError):
        several.logits_all()
    several.decode_spans([(0, [5], "last"), (2, np.array([6]), "last")])
    first, second = rows(several)
    assert near(several, fresh_logits, first, [*B[:3], 5])
    assert near(several, fresh_logits, second, [*A[:6], 6])


def test_rows_of_all_tokens_are_logits_all(several):
    several.decode_spans([(0, A[:3], "all"), (1, B[:2], "all")])
    assert several.logits_all().shape == (5, 1024)


@pytest.mark.parametrize("mode", ["last", "all", "none"])
def test_longer_than_a_batch_is_split(reference_model, fresh_logits, mode):
    with reference_model.new_context(n_ctx=120, n_batch=16, n_seq_max=3) as context:
        context.decode_spans([(0, A[:25], mode), (2, B, "last"), (1, C[:5], mode)])
        assert [context.tokens(s) for s in range(3)] == [A[:25], C[:5], B]
        ends = {"all": [*range(1, 26)], "last": [25], "none": []}[mode]
        expected = [A[:n] for n in ends] + [B]
        expected += {"all": [C[:n] for n in range(1, 6)], "last": [C[:5]], "none": []}[mode]
        assert context.n_outputs == len(expected)
        for row, tokens in zip(rows(context), expected, strict=True):
            assert near(context, fresh_logits, row, tokens)


def test_one_span_is_a_decode_with_the_same_bits(reference_model):
    made = []
    for spans in (True, False):
        with reference_model.new_context(n_ctx=128, n_batch=7, n_seq_max=2) as context:
            if spans:
                context.decode_spans([(1, A, "last"), (0, [], "all")])
            else:
                context.decode(A, seq_id=1)
            assert context.n_engine_outputs == 1
            made.append(context.logits().copy())
    assert np.array_equal(*made)


def test_no_tokens_are_a_no_op(several, state_of):
    several.decode(A[:3])
    before = state_of(several)
    several.decode_spans([])
    several.decode_spans([(1, [], "last"), (3, np.empty(0, int), "all")])
    assert state_of(several) == before


@pytest.mark.parametrize(
    ("spans", "error"),
    [
        ([(0, [1], "last"), (0, [2], "last")], InvalidSequenceError),
        ([(0, [1], "last"), (0, [], "last")], InvalidSequenceError),
        ([(4, [1], "last")], InvalidSequenceError),
        ([(-1, [1], "last")], InvalidSequenceError),
        ([(True, [1], "last")], InvalidSequenceError),
        ([(0, [1], "last"), (1, [1024], "last")], InvalidTokenError),
        ([(0, [1], "last"), (1, [-1], "last")], InvalidTokenError),
        ([(0, [1, 2.5], "last")], InvalidTokenError),
        ([(0, [True], "last")], InvalidTokenError),
        ([(0, np.array([2**40]), "last")], InvalidTokenError),
        ([(0, [[1]], "last")], InvalidTokenError),
        ([(0, "text", "last")], InvalidInputError),
        ([(0, 5, "last")], InvalidInputError),
        ([(0, [1], "some")], InvalidInputError),
        ([(0, [1], True)], InvalidInputError),
        ([(0, [1])], InvalidInputError),
        ([5], InvalidInputError),
        (5, InvalidInputError),
        ("text", InvalidInputError),
        ([(0, A, "last"), (1, B, "last")], ContextOverflowError),
    ],
)
def test_what_is_refused_changes_nothing(several, state_of, spans, error):
    several.decode(A[:5])
    before = state_of(several)
    with pytest.raises(error) as caught:
        several.decode_spans(spans)
    assert caught.value.state_after == "unchanged"
    assert state_of(several) == before


def test_each_sequence_needs_room_in_its_own_window(reference_model):
    with reference_model.new_context(n_ctx=32, n_seq_max=2, kv_unified=False) as context:
        with pytest.raises(ContextOverflowError) as caught:
            context.decode_spans([(0, A[:3], "last"), (1, B[:17], "last")])
        assert (caught.value.additional_tokens, caught.value.n_ctx) == (17, 16)
        assert context.n_past(0) == 0
        context.decode_spans([(0, A[:16], "last"), (1, B[:16], "last")])
        assert (context.n_free(0), context.n_free(1)) == (0, 0)


def test_several_sequences_need_an_engine_that_has_them(toy):
    with pytest.raises(InvalidSequenceError):
        toy.decode_spans([(0, A[:3], "last"), (1, B[:3], "last")])
    toy.decode_spans([(0, A[:3], "all")])
    assert toy.n_outputs == 3


def test_undeclared_sequences_are_refused():
    with (
        load_reference_model(multi_sequence=False) as model,
        model.new_context(n_ctx=64, n_seq_max=2) as context,
        pytest.raises(UnsupportedFeatureError),
    ):
        context.decode_spans([(0, A[:3], "last"), (1, B[:3], "last")])


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def faulty(faults):
    with (
        load_reference_model(faults=faults) as model,
        model.new_context(n_ctx=128, n_batch=16, n_seq_max=3, kv_unified=True) as context,
    ):
        yield context


@pytest.mark.parametrize(
    "failure",
    [
        (no_room(), ContextOverflowError),
        (MemoryError("no"), OutOfMemoryError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
@pytest.mark.parametrize("work", ["nothing", "half", "all"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_failure_leaves_what_the_engine_kept(faults, faulty, fresh_logits, failure, work, at):
    error, typed = failure
    faulty.decode(A[:2])
    faults.plan("decode_batch", error, at=at, work=work)
    with pytest.raises(typed) as caught:
        faulty.decode_spans([(0, A[2:22], "last"), (2, B[:18], "all"), (1, C[:3], "last")])
    n = min(16 * (at - 1) + {"nothing": 0, "half": 8 if at < 3 else 4, "all": 16}[work], 41)
    held = [A[: 2 + min(n, 20)], C[: max(0, n - 38)], B[: max(0, min(n - 20, 18))]]
    assert [faulty.tokens(s) for s in range(3)] == held
    assert faulty.n_free() == 128 - sum(map(len, held))
    if typed is ContextOverflowError:
        assert (caught.value.stage, caught.value.resident_tokens) == ("engine", 2 + n)
    assert faulty.n_outputs == 0
    faulty.decode_spans([(0, [9], "last"), (1, [8], "last")])
    for row, tokens in zip(rows(faulty), ([*held[0], 9], [*held[1], 8]), strict=True):
        assert near(faulty, fresh_logits, row, tokens)


def test_an_unknown_failure_ends_the_context(faults, faulty):
    faults.plan("decode_batch", RuntimeError("no idea"))
    with pytest.raises(SessionFatalError):
        faulty.decode_spans([(0, A[:3], "last"), (2, B[:8], "all")])
    with pytest.raises(SessionFatalError):
        faulty.n_past()


def test_an_engine_that_counts_otherwise_is_trusted_no_more(several, monkeypatch):
    several.decode(A[:3])
    monkeypatch.setattr(several._inner, "decode_batch", lambda *_: None)
    with pytest.raises(SessionFatalError, match=r"n_past\(0\) returned 3 after .* ends at 5"):
        several.decode_spans([(0, A[3:5], "last"), (1, B[:2], "last")])
    with pytest.raises(SessionFatalError):
        several.n_past()


def test_an_abort_ends_the_call_between_two_pieces(several):
    asked = []
    several.set_abort_callback(lambda: len(asked) > 1 or asked.append(1))
    with pytest.raises(DecodeAbortedError) as caught:
        several.decode_spans([(0, A[:20], "last"), (1, B[:20], "last")])
    held = several.n_resident(0) + several.n_resident(1)
    assert caught.value.resident_tokens == held < 40
    several.set_abort_callback(None)
    several.decode_spans([(0, [1], "last"), (1, [2], "last")])
    assert several.n_outputs == 2


def test_a_token_of_each_is_spans_of_one_token(several, fresh_logits):
    several.decode(A[:4], seq_id=2)
    several.decode(B[:3], seq_id=0)
    found = several.decode_each([A[4], B[3]], [2, 0])
    assert [several.tokens(s) for s in range(3)] == [B[:4], [], A[:5]]
    for i, (row, tokens) in enumerate(zip(found, (A[:5], B[:4]), strict=True)):
        assert near(several, fresh_logits, row, tokens)
        assert np.array_equal(row, several.logits(i))
        assert not row.flags.writeable


@pytest.mark.parametrize(
    ("tokens", "seq_ids", "error"),
    [
        ([1, 2], [0, 0], InvalidSequenceError),
        ([1, 2], [0, 4], InvalidSequenceError),
        ([1, 1024], [0, 1], InvalidTokenError),
        ([1, True], [0, 1], InvalidTokenError),
    ],
)
def test_a_wrong_token_of_one_changes_nothing(several, state_of, tokens, seq_ids, error):
    several.decode(A[:5])
    before = state_of(several)
    with pytest.raises(error):
        several.decode_each(tokens, seq_ids)
    assert state_of(several) == before
