"""Tokens in, logits out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from infercore.conformance.expect import equal, raises, that
from infercore.conformance.law import law
from infercore.errors import (
    InvalidInputError,
    InvalidPositionError,
    OutputNotAvailableError,
    UnsupportedFeatureError,
)

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig


@law("DEC-1")
def check_any_split_gives_the_same(rig: Rig) -> None:
    """Tokens in any chunks give the same logits within the tolerance; 3 n_batch + 1 work."""
    tokens = rig.tokens(25)
    expected = rig.cold(tokens)
    small = rig.context(n_batch=8, n_ubatch=4)
    small.decode(tokens)
    rig.near(small.logits(), expected, "3 * n_batch + 1 tokens")
    for cuts in ((1,), (24,), (5, 6, 20)):
        context = rig.context()
        for start, end in zip((0, *cuts), (*cuts, 25), strict=True):
            context.decode(tokens[start:end])
        rig.near(context.logits(), expected, f"chunks cut at {cuts}")
        equal(context.n_past(), 25, f"n_past after chunks cut at {cuts}")


@law("DEC-2")
def check_no_tokens_change_nothing(rig: Rig) -> None:
    """Decoding no tokens changes nothing, and the last logits stay."""
    context = rig.context()
    context.decode(rig.tokens(5))
    with rig.unchanged(context):
        context.decode([])


@law("DEC-3")
def check_one_at_a_time(rig: Rig) -> None:
    """decode_one gives what decode gives, and counts as one token."""
    tokens = rig.tokens(10)
    context = rig.context()
    context.decode(tokens[:4])
    for i, token in enumerate(tokens[4:], start=5):
        context.decode_one(token)
        equal(context.n_past(), i, "n_past after decode_one")
    equal(context.tokens(), tokens, "the tokens held")
    rig.near(context.logits(), rig.cold(tokens), "logits after one token at a time")


@law("DEC-4", needs="logits_all")
def check_all_logits(rig: Rig) -> None:
    """logits="all" returns a row for each token, as if the text had ended there."""
    tokens = rig.tokens(7)
    context = rig.context()
    context.decode(tokens, logits="all")
    rows = context.logits_all()
    equal(rows.shape, (7, rig.tokenizer.n_vocab), "shape of all rows")
    for i in (0, 3, 6):
        rig.near(rows[i], rig.cold(tokens[: i + 1]), f"row {i} of all")
        rig.same_bits(context.logits(i), rows[i], f"logits({i})")


@law("DEC-5")
def check_none_makes_no_row(rig: Rig) -> None:
    """logits="none" makes no row and removes the old one."""
    context = rig.context()
    context.decode(rig.tokens(4))
    context.decode(rig.tokens(2), logits="none")
    raises(OutputNotAvailableError, context.logits, "logits after logits='none'")
    equal(context.n_past(), 6, "n_past")


@law("DEC-6")
def check_last_makes_one_row(rig: Rig) -> None:
    """logits="last" makes one row: 0 and -1 both name it, and no other index exists."""
    context = rig.context()
    context.decode(rig.tokens(5))
    rig.same_bits(context.logits(0), context.logits(-1).copy(), "logits(0) and logits(-1)")
    for i in (1, -2, 5):
        raises(OutputNotAvailableError, lambda at=i: context.logits(at), f"logits({i})")
    if context.capabilities.logits_all:
        raises(OutputNotAvailableError, context.logits_all, "logits_all after logits='last'")


@law("DEC-7")
def check_shape_of_logits(rig: Rig) -> None:
    """Logits are finite float32 [n_vocab], and read-only."""
    rig.need_all_logits()
    context = rig.context()
    context.decode(rig.tokens(5))
    row = context.logits()
    equal((row.dtype.name, row.shape), ("float32", (rig.tokenizer.n_vocab,)), "dtype and shape")
    that(np.isfinite(row).all(), "some logits are not finite")
    that(not row.flags.writeable, "logits can be written to")


@law("DEC-8")
def check_same_split_same_bits(rig: Rig) -> None:
    """The same tokens, split the same way, give the same bits in any context."""
    tokens = rig.tokens(12)
    rows = []
    for _ in range(2):
        context = rig.context()
        context.decode(tokens[:8])
        context.decode(tokens[8:11])
        context.decode_one(tokens[11])
        rows.append(context.logits().copy())
    rig.same_bits(rows[0], rows[1], "the same split, twice")


@law("DEC-9", needs="kv_remove")
def check_eval_goes_back(rig: Rig) -> None:
    """Eval drops what lies at n_past and beyond, then appends."""
    tokens, other = rig.tokens(12), rig.tokens(4)
    context = rig.context()
    context.decode(tokens)
    context.eval(other, 8)
    equal(context.tokens(), tokens[:8] + other, "the tokens held")
    rig.near(context.logits(), rig.cold(tokens[:8] + other), "logits after eval")


@law("DEC-10")
def check_eval_refuses_a_gap(rig: Rig) -> None:
    """Eval beyond the end raises InvalidPositionError and changes nothing."""
    context = rig.context()
    context.decode(rig.tokens(5))
    with rig.unchanged(context):
        error = raises(
            InvalidPositionError, lambda: context.eval(rig.tokens(2), 6), "eval with a gap"
        )
    equal(error.value, 6, "the error's value")


@law("DEC-11", needs="multi_sequence")
def check_batch_of_two_sequences(rig: Rig) -> None:
    """Two sequences in one batch give what each gives alone."""
    a, b = rig.tokens(6), rig.tokens(6)
    context = rig.two()
    entries = [
        (token, (s,), i == 5)  # noqa: PLR2004
        for i, pair in enumerate(zip(a, b, strict=True))
        for s, token in enumerate(pair)
    ]
    context.decode_batch(entries)
    equal((context.tokens(0), context.tokens(1)), (a, b), "tokens of the two sequences")
    rig.near(context.logits(0), rig.cold(a), "the first sequence")
    rig.near(context.logits(1), rig.cold(b), "the second sequence")


@law("DEC-12", needs="multi_sequence")
def check_batch_rows_are_those_wanted(rig: Rig) -> None:
    """A batch returns the requested rows, in order, and no others."""
    tokens = rig.tokens(5)
    context = rig.context()
    wanted = (False, True, False, True, False)
    context.decode_batch([(t, (0,), w) for t, w in zip(tokens, wanted, strict=True)])
    rig.near(context.logits(0), rig.cold(tokens[:2]), "the first row that was wanted")
    rig.near(context.logits(1), rig.cold(tokens[:4]), "the second row that was wanted")
    raises(OutputNotAvailableError, lambda: context.logits(2), "a row that was not wanted")


@law("DEC-13", needs="multi_sequence")
def check_batch_token_in_two_sequences(rig: Rig) -> None:
    """A token of several sequences is in each of them, whatever the steps and windows are.

    It has one row where one is wanted. In several steps, and where each sequence has a window of
    its own, it may be refused.
    """
    tokens = rig.tokens(6)
    for fields in ({}, {"n_batch": 8, "n_ubatch": 2}, {"kv_unified": False}):
        shared = [(t, (0, 1), i in (0, 3)) for i, t in enumerate(tokens[:5])]
        try:
            context = rig.two(**fields)
            context.decode_batch(shared)
        except UnsupportedFeatureError:
            equal(bool(fields), True, "whether only what may be refused is")
            continue
        equal(context.n_outputs, 2, "rows of two tokens of two sequences")
        for row, n in enumerate((1, 4)):
            rig.near(context.logits(row), rig.cold(tokens[:n]), f"row {row} of both sequences")
        context.decode_batch([(tokens[5], (1,), True)])
        equal((context.n_past(0), context.n_past(1)), (5, 6), "n_past of the two sequences")
        equal(context.tokens(1), tokens, "tokens of the second sequence")
        rig.near(context.logits(), rig.cold(tokens), "logits of the second sequence")
        context.decode_one(tokens[0], seq_id=0)
        rig.near(context.logits(), rig.cold([*tokens[:5], tokens[0]]), "logits of the first")


@law("DEC-14", needs="multi_sequence")
def check_sequences_do_not_touch(rig: Rig) -> None:
    """Decoding in one sequence leaves the other as it was."""
    a, b = rig.tokens(8), rig.tokens(9)
    context = rig.two()
    context.decode(a[:5], seq_id=0)
    context.decode(b, seq_id=1)
    equal((context.tokens(0), context.n_past(0)), (a[:5], 5), "the first sequence")
    context.decode(a[5:], seq_id=0)
    rig.near(context.logits(), rig.cold(a), "the first sequence, continued")


@law("DEC-15")
def check_no_logits_before_a_decode(rig: Rig) -> None:
    """A context that has decoded nothing has no logits."""
    context = rig.context()
    raises(OutputNotAvailableError, context.logits, "logits of an empty context")
    equal((context.n_past(), context.n_outputs), (0, 0), "n_past and n_outputs")


@law("DEC-16", needs="logits_all")
def check_negative_rows(rig: Rig) -> None:
    """Rows may be counted from the end."""
    context = rig.context()
    context.decode(rig.tokens(5), logits="all")
    rows = context.logits_all().copy()
    for i in (-1, -3, -5):
        rig.same_bits(context.logits(i), rows[i], f"logits({i})")
    raises(OutputNotAvailableError, lambda: context.logits(-6), "logits(-6) of 5 rows")


@law("DEC-17", needs="logits_all")
def check_all_logits_over_chunks(rig: Rig) -> None:
    """logits="all" holds the rows of every chunk of a long call."""
    tokens = rig.tokens(11)
    context = rig.context(n_batch=4, n_ubatch=4)
    context.decode(tokens, logits="all")
    rows = context.logits_all()
    equal(rows.shape[0], 11, "the number of rows")
    for i in (2, 5, 10):
        rig.near(rows[i], rig.cold(tokens[: i + 1]), f"row {i} over chunks")


@law("DEC-18")
def check_a_copy_keeps_its_values(rig: Rig) -> None:
    """A copy of the logits keeps its values when the context goes on, and a row until then."""
    tokens = rig.tokens(6)
    context = rig.context()
    context.decode(tokens[:5])
    kept = context.logits().copy()
    context.decode_one(tokens[5])
    rig.near(kept, rig.cold(tokens[:5]), "the copy")
    shown, beside = context.logits(), rig.context()
    that(not np.array_equal(kept, shown), "the logits did not change with a token")
    kept = shown.copy()
    beside.decode(tokens[:4])
    that(not np.array_equal(beside.logits(), kept), "two contexts have the same logits")
    rig.same_bits(shown, kept, "a row, once another context's was read")
    if context.capabilities.logits_all:
        context.clear()
        context.decode(tokens, logits="all")
        rows = [context.logits(i) for i in range(len(tokens))]
        rig.same_bits(np.array(rows), context.logits_all(), "rows, once the others were read")


@law("DEC-19")
def check_serial_follows_outputs(rig: Rig) -> None:
    """output_serial changes whenever the output rows do."""
    context = rig.context()
    serials = [context.output_serial]
    for token in rig.tokens(3):
        context.decode([token])
        serials.append(context.output_serial)
    context.clear()
    serials.append(context.output_serial)
    equal(len(set(serials)), 5, f"different serials among {serials}")


@law("DEC-20")
def check_golden_logits(rig: Rig) -> None:
    """Logits, ids and greedy tokens of the pack's model are those of the reference computation."""
    golden = _golden(rig)
    prompt = min(golden.prompts, key=lambda p: len(p.tokens))
    equal(rig.tokenizer.encode(prompt.text), list(prompt.tokens), "ids of a golden prompt")
    context = rig.context()
    context.decode(prompt.tokens)
    rig.near(context.logits(), prompt.logits[-1], "logits of a golden prompt")
    rig.follows(prompt.tokens, prompt.greedy[:20], "golden greedy tokens")


def _golden(rig: Rig):  # type: ignore[no-untyped-def]  # noqa: ANN202
    if rig.model_name is None:
        rig.leave("the model is none of the pack's; DEC-26 is about golden texts of the rig's own")
    try:
        import infercore_models  # noqa: PLC0415  (a distribution of its own)
    except ImportError:
        rig.leave("the model pack is not installed")
    return infercore_models.golden(rig.model_name)


@law("DEC-21")
def check_logits_depend_on_position_and_past(rig: Rig) -> None:
    """A sequence computes with what it holds: different earlier tokens give different logits."""
    tokens = rig.tokens(6)
    other = [*reversed(tokens[:5]), tokens[5]]
    if other == tokens:
        other[0] = next(t for t in rig.tokens(50) if t != tokens[0])
    differ = not np.array_equal(rig.cold(tokens), rig.cold(other))
    that(differ, "the logits are the same after other tokens")
    context = rig.context()
    context.decode(tokens)
    rig.near(context.logits(), rig.cold(tokens), "logits in a context of its own")


_FEW = (
    {"n_batch": 1, "n_ubatch": 1, "n_seq_max": 4},
    {"n_batch": 2, "n_ubatch": 1, "n_seq_max": 8, "kv_unified": False},
    {"n_ctx": 2, "n_seq_max": 4, "kv_unified": True},
    {"n_batch": 1, "n_seq_max": 256, "kv_unified": True},
)


@law("DEC-31", needs="multi_sequence", since="1.2")
def check_more_sequences_than_tokens(rig: Rig) -> None:
    """With more sequences than a call, a step or the window has tokens, each decodes as if alone.

    Or so many are refused.
    """
    tokens = rig.tokens(2)
    expected = rig.cold(tokens)
    for fields in _FEW:
        try:
            context = rig.context(**fields)
        except (UnsupportedFeatureError, InvalidInputError):
            continue
        for seq_id in (context.n_seq_max - 1, 0):
            context.clear()
            context.decode(tokens, seq_id=seq_id)
            equal(context.n_past(seq_id), len(tokens), f"n_past of sequence {seq_id}, {fields}")
            rig.near(context.logits(), expected, f"logits of sequence {seq_id}, {fields}")
