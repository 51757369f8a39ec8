"""Which rows may be read when, and that none is stale."""

from __future__ import annotations

import numpy as np
import pytest

from infercore.errors import InvalidInputError, OutputNotAvailableError, UnsupportedFeatureError
from infercore.testing.toy import toy_logits

IDS = [5, 9, 200, 7, 66, 3, 8, 12, 40, 41]


def test_nothing_can_be_read_before_the_first_decode(either):
    with pytest.raises(OutputNotAvailableError) as caught:
        either.logits()
    assert caught.value.state == "0 output rows"
    with pytest.raises(OutputNotAvailableError):
        either.logits_all()


def test_the_last_row_is_made_by_default(either):
    either.decode(IDS)
    row = either.logits()
    assert (row.dtype, row.shape) == (np.float32, (either._n_vocab,))
    assert np.array_equal(row, either.logits(0))
    for i in (1, -2, 10, -11):
        with pytest.raises(OutputNotAvailableError):
            either.logits(i)
    with pytest.raises(OutputNotAvailableError):
        either.logits_all()


def test_all_rows_count_over_all_chunks(toy):
    assert len(IDS) > toy.n_batch
    toy.decode(IDS, logits="all")
    expected = [toy_logits(IDS[: i + 1]) for i in range(len(IDS))]
    assert np.array_equal(toy.logits_all(), expected)
    for i in (0, 3, 9, -1, -10):
        assert np.array_equal(toy.logits(i), expected[i])
    for i in (10, -11, 2**40):
        with pytest.raises(OutputNotAvailableError):
            toy.logits(i)


def test_the_largest_of_a_row_is_what_argmax_finds(toy):
    toy.decode(IDS, logits="all")
    for i in (0, 3, 9, -1, -10):
        best = int(toy.logits(i).argmax())
        assert toy.largest(i) == (best, toy.logits(i)[best], toy._n_vocab)
    for i in (10, -11, None, "0"):
        with pytest.raises((OutputNotAvailableError, InvalidInputError)):
            toy.largest(i)
    toy.clear()
    with pytest.raises(OutputNotAvailableError):
        toy.largest()


def test_rows_are_read_only_also_where_the_engine_s_own_are_not(toy):
    toy.decode(IDS)
    own = toy._inner.logits(0)
    own.flags.writeable = True
    row = toy.logits()
    assert np.shares_memory(row, own)
    assert not row.flags.writeable


@pytest.mark.parametrize("i", [None, "0", 0.0, True])
def test_a_row_is_named_by_an_integer(toy, i):
    toy.decode(IDS)
    with pytest.raises(InvalidInputError):
        toy.logits(i)
    for last in (np.int64(-1), np.array(-1), np.array(0)):
        assert np.array_equal(toy.logits(last), toy_logits(IDS))
    with pytest.raises(OutputNotAvailableError):
        toy.logits(np.uint64(2**64 - 1))


def test_no_rows_are_made_when_none_are_asked_for(either):
    either.decode(IDS)
    either.decode(IDS[:3], logits="none")
    with pytest.raises(OutputNotAvailableError):
        either.logits()


@pytest.mark.parametrize("logits", ["last", "all"])
def test_rows_cannot_be_written(either, logits):
    either.decode(IDS, logits=logits)
    views = [either.logits(), *([either.logits_all()] if logits == "all" else [])]
    for view in views:
        with pytest.raises(ValueError, match="read-only"):
            view[..., 0] = 1


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.seq_remove(0, 2, -1),
        lambda c: c.seq_remove(-1),
        lambda c: c.clear(),
        lambda c: c.decode([1], logits="none"),
    ],
)
def test_a_change_makes_the_rows_stale(either, change):
    either.decode(IDS, logits="all")
    serial = either.output_serial
    change(either)
    for read in (either.logits, either.logits_all):
        with pytest.raises(OutputNotAvailableError):
            read()
    assert either.output_serial != serial


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.seq_shift(0, 3, -1, 4),
        lambda c: c.seq_divide(0, 0, -1, 2),
        lambda c: c.load_sequence(0, c.save_sequence(1)),
        lambda c: c.set_embeddings(True),
        lambda c: c.set_causal_attention(False),
        lambda c: c.warmup(),
    ],
)
def test_a_move_makes_the_rows_stale(several, change):
    several.decode(IDS, logits="all")
    change(several)
    for read in (several.logits, several.logits_all):
        with pytest.raises(OutputNotAvailableError):
            read()


def test_a_copy_keeps_the_rows(several):
    several.decode(IDS)
    before = several.logits().copy()
    several.seq_copy(0, 1)
    assert np.array_equal(several.logits(), before)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.decode([]),
        lambda c: c.seq_remove(0, 30, 40),
        lambda c: c.n_past(),
        lambda c: c.tokens(),
        lambda c: c.perf(),
        lambda c: c.synchronize(),
    ],
)
def test_what_changes_nothing_keeps_the_rows(either, call):
    either.decode(IDS)
    before, serial = either.logits().copy(), either.output_serial
    call(either)
    assert np.array_equal(either.logits(), before)
    assert either.output_serial == serial


def test_each_call_that_makes_rows_has_a_serial_of_its_own(either):
    serials = [either.output_serial]
    for _ in range(3):
        either.decode_one(5)
        serials.append(either.output_serial)
        either.decode(IDS[:3])
        serials.append(either.output_serial)
    assert len(set(serials)) == len(serials)


def test_all_rows_are_refused_where_they_are_not_declared():
    from infercore.testing import load_toy_model

    model = load_toy_model(logits_all=False)
    with model, model.new_context(n_ctx=32) as context:
        context.decode([1, 2])
        before = context.logits().copy()
        for call in (lambda: context.decode([3, 4], logits="all"), context.logits_all):
            with pytest.raises(UnsupportedFeatureError):
                call()
        assert context.tokens() == [1, 2]
        assert np.array_equal(context.logits(), before)


# -- embeddings ----------------------------------------------------------------------------------


@pytest.fixture
def hidden(reference_model):
    with reference_model.new_context(n_ctx=64, embeddings=True, n_batch=4) as context:
        context.decode(IDS)
        return context.embeddings().copy()


def test_token_embeddings_count_over_all_chunks(reference_model, hidden):
    assert hidden.shape == (len(IDS), reference_model.info.n_embd)
    with reference_model.new_context(n_ctx=64, embeddings=True) as context:
        context.decode(IDS)
        assert np.allclose(context.embeddings(), hidden, atol=1e-4)
        with pytest.raises(InvalidInputError, match="pooling"):
            context.embedding()
        context.decode_one(3)
        assert context.embeddings().shape == (1, reference_model.info.n_embd)


@pytest.mark.parametrize(
    ("pooling", "pooled"),
    [("mean", lambda h: h.mean(0)), ("cls", lambda h: h[0]), ("last", lambda h: h[-1])],
)
def test_pooled_embeddings(reference_model, hidden, pooling, pooled):
    with reference_model.new_context(n_ctx=64, n_seq_max=2, pooling_type=pooling) as context:
        context.decode(IDS, seq_id=1)
        assert np.allclose(context.embedding(1), pooled(hidden), atol=1e-4)
        with pytest.raises(OutputNotAvailableError):
            context.embedding(0)
        with pytest.raises(InvalidInputError):
            context.embeddings()


def test_pooling_does_not_split(reference_model):
    with reference_model.new_context(n_ctx=64, pooling_type="mean", n_ubatch=8) as context:
        with pytest.raises(InvalidInputError, match="n_ubatch"):
            context.decode(IDS)
        assert context.n_past() == 0
        context.decode(IDS[:8])


def test_embeddings_are_switched_on_and_off(several):
    several.decode(IDS)
    with pytest.raises(OutputNotAvailableError):
        several.embeddings()
    several.set_embeddings(True)
    several.decode([1, 2])
    assert len(several.embeddings()) == 2
    several.seq_remove(0, 3, -1)
    with pytest.raises(OutputNotAvailableError):
        several.embeddings()
    several.set_embeddings(False)
    several.decode([1, 2])
    with pytest.raises(OutputNotAvailableError):
        several.embeddings()


# -- rows of several sequences -------------------------------------------------------------------


@pytest.fixture
def three(several):
    """Return a context whose last call made rows of the sequences 0 (two of them), 1 and 2."""
    several.decode_spans([(0, IDS[:2], "all"), (1, IDS[2:5], "last"), (2, IDS[5:], "last")])
    return several


CHANGES = {
    "remove": lambda c: c.seq_remove(1),
    "remove a part": lambda c: c.seq_remove(1, 2, -1),
    "shift": lambda c: c.seq_shift(1, 0, -1, 3),
    "divide": lambda c: c.seq_divide(1, 0, -1, 2),
    "copy to it": lambda c: c.seq_copy(3, 1),
    "restore": lambda c: c.load_sequence(1, c.save_sequence(3)),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_sequence_that_changes_loses_its_own_rows_only(three, name):
    before, serial = [three.logits(i).copy() for i in range(4)], three.output_serial
    CHANGES[name](three)
    assert three.n_outputs == 3
    assert three.output_serial != serial
    for i in (0, 1, 3, -1, -4):
        assert np.array_equal(three.logits(i), before[i])
    for i in (2, -2, 4):
        with pytest.raises(OutputNotAvailableError):
            three.logits(i)
    assert [three.row_of(s) for s in range(4)] == [1, None, 3, None]


def test_all_rows_are_gone_once_one_of_them_is(several):
    several.decode_spans([(0, IDS[:2], "all"), (1, IDS[2:5], "all")])
    assert several.logits_all().shape == (5, 1024)
    several.seq_remove(1)
    with pytest.raises(OutputNotAvailableError):
        several.logits_all()
    assert several.n_outputs == 2


def test_rows_go_with_the_last_of_their_sequences(several):
    several.decode_batch([(5, (0, 1), False), (6, (0, 1), True)])
    row = several.logits().copy()
    several.seq_remove(0)
    assert np.array_equal(several.logits(), row)
    several.seq_remove(1)
    assert several.n_outputs == 0
    with pytest.raises(OutputNotAvailableError):
        several.logits()


def test_a_copy_of_a_whole_sequence_has_its_row_too(three):
    row = three.logits(2).copy()
    three.seq_copy(1, 3)
    assert [three.row_of(s) for s in (1, 3)] == [2, 2]
    three.seq_remove(1)
    assert np.array_equal(three.logits(2), row)
    three.seq_copy(3, 1, 0, 2)
    assert three.row_of(1) is None


def test_a_restored_row_joins_those_that_are_there(three):
    row, others = three.logits(2).copy(), [three.logits(i).copy() for i in (0, 1, 3)]
    saved = three.save_sequence(1)
    three.seq_remove(1)
    three.load_sequence(3, saved)
    three.load_sequence(1, saved)
    assert three.n_outputs == 5
    for seq_id in (1, 3):
        assert np.array_equal(three.logits(three.row_of(seq_id)), row)
    assert np.array_equal(three.logits(), row)
    for i, other in zip((0, 1, 3), others, strict=True):
        assert np.array_equal(three.logits(i), other)
    assert three.n_engine_outputs == 3
    three.seq_remove(3)
    assert np.array_equal(three.logits(), row)


def test_a_row_stays_while_other_sequences_are_kept(three):
    row = three.logits(3).copy()
    three.seq_keep(2)
    assert np.array_equal(three.logits(3), row)
    assert three.n_outputs == 1
