"""What was made stays as it was, whatever is saved, copied or computed beside it."""

from __future__ import annotations

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance.expect import equal, that
from infercore.conformance.law import law
from infercore.conformance.laws import sampling
from infercore.conformance.requirements import REQUIREMENTS
from infercore.errors import (
    InvalidInputError,
    OutputNotAvailableError,
    UnsupportedFeatureError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from infercore.conformance.rig import Rig

REFUSED = (UnsupportedFeatureError, InvalidInputError)


# -- vectors and rows beside saved state -----------------------------------------------------------


@law("EMB-14", needs="embeddings", since="1.2")
def check_vectors_stay_beside_saved_state(rig: Rig) -> None:
    """Vectors and rows that the last call made stay while sequences are copied, moved and saved.

    Or they are not available any more. An engine may put copies and moves off, and compute
    something of its own when they are saved.
    """
    can = rig.context().capabilities
    if not can.multi_sequence or not can.sequence_state:
        rig.leave("there is one sequence only, or none is saved")
    kinds = ("none", *sorted({"mean", "cls", "last"} & set(can.pooling)))
    n_forms = 0
    for kind, unified, n_seq_max in itertools.product(kinds, (None, True, False), (2, 3)):
        fields: dict[str, Any] = {} if unified is None else {"kv_unified": unified}
        fields |= {"n_seq_max": n_seq_max, "n_ctx": 3 * rig.n_ctx}
        fields |= {"embeddings": True, "pooling_type": kind}
        try:
            rig.context(**fields).close()
        except REFUSED:
            continue
        _check_vectors(rig, fields)
        n_forms += 1
    that(n_forms, "no context that makes vectors of several sequences can be opened")


def _check_vectors(rig: Rig, fields: dict[str, Any]) -> None:
    ids, last = rig.tokens(9), fields["n_seq_max"] - 1
    changes: dict[str, Callable[[Any], object]] = {
        "copied": lambda context: context.seq_copy(0, last),
        "moved": lambda context: context.seq_shift(1, 0, -1, 2),
    }
    for (what, change), bare in itertools.product(changes.items(), (False, True)):
        context = rig.context(**fields)
        context.decode(ids[:4], seq_id=1)
        has_all = what == "moved" and context.capabilities.logits_all
        context.decode(ids, logits="none" if bare else "all" if has_all else "last")
        before = dict(_made(context, fields["pooling_type"]))
        that(any("vector" in name for name in before), f"no vectors are made, with {fields}")
        try:
            change(context)
        except UnsupportedFeatureError:
            continue
        data = context.save_sequence(last)
        if context.capabilities.state:
            context.save_state()
        after = dict(_made(context, fields["pooling_type"]))
        for name, values in after.items():
            that(name in before, f"{name} was made by saving, with {fields}")
            rig.same_bits(values, before[name], f"{name}, after one was {what}, with {fields}")
        context.load_sequence(last, data)


def _made(context: Any, pooling: str) -> Iterator[tuple[str, Any]]:
    """Yield by name what can be read of the last call."""
    reads: dict[str, Callable[[], Any]] = {
        "the logits of each row": lambda: [context.logits(i) for i in range(context.n_outputs)],
        "token vectors": context.embeddings,
        "the vector of sequence 0": lambda: context.embedding(0),
    }
    del reads["token vectors" if pooling != "none" else "the vector of sequence 0"]
    for name, read in reads.items():
        with contextlib.suppress(OutputNotAvailableError):
            yield name, np.array(read())


# -- the engine's own sampler, and which row it takes ----------------------------------------------


@law("SAMP-29", needs="native_sampler", since="1.2")
def check_native_takes_the_row_that_it_is_given(rig: Rig) -> None:
    """The engine's own sampler takes each row of each kind of call, or says that it is not there.

    With and without embeddings, and after state was saved beside them.
    """
    many, n_rows = rig.context().capabilities.multi_sequence, 0
    for fields in ({}, {"embeddings": True, "pooling_type": "none"}):
        try:
            context = rig.context(n_ctx=2 * rig.n_ctx, n_seq_max=2 if many else 1, **fields)
        except REFUSED:
            continue
        for what, call in _calls(rig, context).items():
            context.clear()
            call()
            n_rows += _check_rows(rig, context, f"{what}, with {fields}")
    that(n_rows, "the engine's own sampler takes no row")
    can = context.capabilities
    if not can.sequence_state or can.kv_copy == "none" or not many:
        return
    with contextlib.suppress(*REFUSED):
        context = rig.two(kv_unified=False)
    context.clear()
    context.decode(rig.tokens(9), logits="all" if can.logits_all else "last")
    context.seq_copy(0, 1)
    context.save_sequence(1)
    _check_rows(rig, context, "a copy was saved")


def _calls(rig: Rig, context: Any) -> dict[str, Callable[[], object]]:
    ids, can = rig.tokens(9), context.capabilities
    calls: dict[str, Callable[[], object]] = {
        "decode, the last row": lambda: context.decode(ids),
        "decode_one": lambda: (context.decode(ids), context.decode_one(ids[0])),
    }
    if can.logits_all:
        calls["decode, all rows"] = lambda: context.decode(ids, logits="all")
    if not can.multi_sequence:
        return calls

    def spans(*modes: str) -> Callable[[], object]:
        texts = (ids, ids[:4])
        return lambda: context.decode_spans([(i, texts[i], mode) for i, mode in enumerate(modes)])

    kinds = [("last", "none"), ("none", "last"), ("last", "last")]
    if can.logits_all:
        kinds += [("all", "last"), ("last", "all")]
    calls.update({f"spans of {modes}": spans(*modes) for modes in kinds})
    wanted = (False, True, False, True, True)
    entries = [(ids[i], (i % 2,), flag) for i, flag in enumerate(wanted)]
    calls["a batch"] = lambda: context.decode_batch(entries)
    return calls


def _check_rows(rig: Rig, context: Any, what: str) -> int:
    """Return how many rows were taken."""
    n_rows = 0
    for i in range(context.n_outputs):
        sampler = rig.sampler(implementation="native", temperature=0)
        with contextlib.suppress(OutputNotAvailableError):
            expected = int(context.logits(i).argmax())
            equal(sampler.sample(context, i), expected, f"{what}: the token of row {i}")
            n_rows += 1
    return n_rows


@law("SAMP-30", since="1.2")
def check_seeds_at_the_edges(rig: Rig) -> None:
    """Each seed gives its tokens again, the first and the last there is too."""
    kinds = ("portable", *(("native",) if rig.context().capabilities.native_sampler else ()))
    context = rig.context()
    context.decode(rig.tokens(5))
    for kind in kinds:
        told = []
        for seed in (0, 1, 2**32 - 2):
            made = []
            for _ in range(2):
                sampler = rig.sampler(**sampling.OPEN, implementation=kind, seed=seed)
                made.append([int(sampler.sample(context)) for _ in range(12)])
            equal(made[1], made[0], f"tokens of the {kind} sampler with seed {seed} again")
            told.append(tuple(made[0]))
        that(len(set(told)) > 1, f"each seed gives the same tokens of the {kind} sampler")


# -- tokens of two sequences, in several steps -----------------------------------------------------


@law("DEC-34", needs="multi_sequence", since="1.2")
def check_rows_of_numbers_in_sequences(rig: Rig) -> None:
    """Vectors in place of tokens extend the sequence they are given for, whichever ran last.

    In calls of their own and beside rows of another sequence; or they are refused.
    """
    n_embd, texts = rig.model.info.n_embd, [rig.tokens(5), rig.tokens(8)]
    numbers = np.random.default_rng(rig.random.randrange(1000))
    given = [numbers.standard_normal((n, n_embd)).astype(np.float32) for n in (3, 2)]
    try:
        alone = [_behind(rig, text, rows) for text, rows in zip(texts, given, strict=True)]
    except UnsupportedFeatureError:
        rig.leave("the backend takes no rows in place of tokens")
    for first in (0, 1):
        order = (first, 1 - first)
        context = rig.two()
        for seq_id in order:
            context.decode(texts[seq_id], seq_id=seq_id)
        for seq_id in order:
            context.decode_spans([(seq_id, given[seq_id], "last")])
            rig.near(context.logits(), alone[seq_id], f"rows in {seq_id}, {order[1]} begun last")
        both = rig.two()
        for seq_id in order:
            both.decode(texts[seq_id], seq_id=seq_id)
        both.decode_spans([(seq_id, given[seq_id], "last") for seq_id in order])
        for i, seq_id in enumerate(order):
            rig.near(both.logits(i), alone[seq_id], f"rows in {seq_id}, in one call of both")


def _behind(rig: Rig, tokens: Sequence[int], rows: Any) -> Any:
    context = rig.context()
    context.decode(tokens)
    context.decode_spans([(0, rows, "last")])
    return np.array(context.logits())


@law("DEC-33", needs="multi_sequence", since="1.2")
def check_shared_tokens_in_several_steps(rig: Rig) -> None:
    """Rows of a call of many steps are right: of shared tokens, and of those that others follow."""
    texts = [rig.tokens(7), rig.tokens(7)]
    for order in ((0, 1), (0, 1, 0, 0, 0, 0, 0), (1, 0, 1, 1, 1, 1, 1), (0, 1, 0, 0, 0, 0, 1, 0)):
        _check_rows_on_the_way(rig, texts, order)
    _check_full_calls_of_shared_tokens(rig)
    ids = rig.tokens(6)
    entries: list[Any] = [(ids[0], (0, 1), True)]
    entries += [(token, (1,), False) for token in ids[1:-1]]
    try:
        context = rig.two(kv_unified=True, n_batch=16, n_ubatch=4)
        context.decode_batch([*entries, (ids[-1], (1,), True)])
    except REFUSED:  # no token belongs to two sequences here
        return
    rig.near(context.logits(0), rig.cold(ids[:1]), "the row of the token that two share")
    rig.near(context.logits(1), rig.cold(ids), "the row of the last token")


def _check_full_calls_of_shared_tokens(rig: Rig) -> None:
    """Where one token of two sequences is taken, so are half as many as a call holds.

    Each of them may count for both sequences.
    """
    ids = rig.tokens(4)
    for unified in (True, False):
        fields = {"kv_unified": unified, "n_batch": 8, "n_ubatch": 8}
        if _takes(rig, ids[:1], fields):
            that(_takes(rig, ids, fields), f"4 tokens of two sequences are refused, with {fields}")


def _takes(rig: Rig, ids: list[int], fields: dict[str, Any]) -> bool:
    """Whether tokens that belong to two sequences each are taken; their last row is right."""
    try:
        context = rig.two(**fields)
        context.decode_batch([(token, (0, 1), True) for token in ids])
    except REFUSED:
        return False
    rig.near(context.logits(len(ids) - 1), rig.cold(ids), "the last token of two sequences")
    return True


_N_WANTED = 2
"""Rows that are wanted: those of the first tokens of a call."""


def _check_rows_on_the_way(rig: Rig, texts: Sequence[list[int]], order: tuple[int, ...]) -> None:
    """Rows that are wanted before a sequence's last token are right, too, in several steps."""
    said: list[list[int]] = [[], []]
    entries: list[Any] = []
    for i, seq_id in enumerate(order):
        token = texts[seq_id][len(said[seq_id])]
        said[seq_id].append(token)
        entries.append((token, (seq_id,), i < _N_WANTED))
    context, after = rig.two(n_batch=16, n_ubatch=4), texts[0][-1]
    context.decode_batch(entries)
    for row, seq_id in enumerate(order[:_N_WANTED]):
        rig.near(context.logits(row), rig.cold(said[seq_id][:1]), f"row {row} of {order}")
    for seq_id, tokens in enumerate(said):
        context.decode_one(after, seq_id=seq_id)
        rig.near(context.logits(), rig.cold([*tokens, after]), f"sequence {seq_id} of {order}")


# -- contexts in threads ---------------------------------------------------------------------------

_N_SAVED, _N_PLANS, _N_DECODED = 100, 30, 60


@law("THREAD-12", tier="process", since="1.2")
def check_contexts_in_threads(rig: Rig) -> None:
    """Contexts of one model that save, plan and decode in two threads each do as alone."""
    can, texts = rig.context().capabilities, [rig.tokens(10), rig.tokens(10)]
    contexts = [rig.context() for _ in texts]
    expected = [np.array(rig.cold(text)) for text in texts]

    def decoded(i: int) -> None:
        for _ in range(_N_DECODED):
            contexts[i].clear()
            contexts[i].decode(texts[i])
            rig.near(contexts[i].logits(), expected[i], "a text beside another thread's")

    def saved(i: int) -> None:
        first = contexts[i].save_sequence(0)
        for _ in range(_N_SAVED):
            that(contexts[i].save_sequence(0) == first, "saved beside another thread: other bytes")

    def planned(i: int) -> None:
        fields = rig.fields(n_ctx=256 * (i + 1))
        found = {rig.model.plan_memory(**fields).peak_bytes for _ in range(_N_PLANS)}
        equal(found, {plans[i]}, "bytes planned beside another thread")

    works: list[Callable[[int], None]] = [decoded]
    if can.sequence_state:
        works.append(saved)
    if REQUIREMENTS["plan_memory"].declared(rig):
        plans = [rig.model.plan_memory(**rig.fields(n_ctx=256 * n)).peak_bytes for n in (1, 2)]
        works.append(planned)
    with ThreadPoolExecutor(2) as pool:
        for work in works:
            list(pool.map(work, range(2)))
