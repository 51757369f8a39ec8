"""Further calls: handles, a fitted window, full windows, control vectors, tasks, gaps, ranks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

import infercore
from infercore.conformance.expect import equal, raises, that
from infercore.conformance.law import law
from infercore.conformance.laws.state import damaged
from infercore.conformance.oracle import Way
from infercore.conformance.rig import THREADS, greedy
from infercore.errors import (
    ContextOverflowError,
    InvalidInputError,
    SessionClosedError,
    SnapshotError,
    UnsupportedFeatureError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infercore.conformance.rig import Rig


# -- what a session holds --------------------------------------------------------------------------


@law("REUSE-21", tier="session", since="1.2")
def check_evict(rig: Rig) -> None:
    """Evicted tokens are gone, and the session continues as if it never had them.

    Where the context moves what stands behind them, as one in which it was moved.
    """
    session, tokens = rig.session(), rig.tokens(30)
    session.ensure_prefix(tokens[:12])
    session.prefill_suffix(tokens[12:])
    for wrong in ((-1, 2), (2, 2), (3, 2), (0, 31), (0, None)):
        raises(InvalidInputError, lambda w=wrong: session.evict(*w), f"evict{wrong}")
    equal(session.explain_context().resident_tokens, 30, "resident tokens after refusals")
    session.evict(14, 19)
    kept = [*tokens[:14], *tokens[19:]]
    report = session.explain_context()
    counts = (report.resident_tokens, report.prefix_tokens, report.suffix_tokens)
    equal(counts, (25, 12, 13), "resident, prefix and suffix tokens")
    equal(list(rig.inner(session).tokens()), kept, "the tokens held")
    found = greedy(session, 5)
    if report.cuts:
        equal(report.cuts, (14,), "the cuts")
        _goes_on_as_moved(rig, tokens, found)
    else:
        rig.follows(kept, found, "a session without what was evicted")
    session.prefill_suffix(tokens[20:26])
    rig.follows([*tokens[:12], *tokens[20:26]], greedy(session, 4), "a new suffix after it")


def _goes_on_as_moved(rig: Rig, tokens: list[int], found: list[int]) -> None:
    context = rig.context()
    context.decode(tokens[:-1])
    context.seq_remove(0, 14, 19)
    context.seq_shift(0, 19, -1, -5)
    context.decode_one(tokens[-1])
    for token in found:
        row = context.logits()
        gap = float(row.max() - row[token])  # the likeliest may be an end, which was ignored
        ends = rig.tokenizer.is_eog(int(row.argmax()))
        that(ends or gap <= 2 * rig.tolerance, f"{token} is {gap:.3g} below what moved tokens give")
        context.decode_one(token)


@law("STATE-27", tier="session", needs="sequence_state", since="1.2")
def check_a_snapshot_as_bytes(rig: Rig) -> None:
    """A snapshot survives the way to bytes and back; damaged ones raise SnapshotError."""
    session, tokens = rig.session(), rig.tokens(16)
    session.ensure_prefix(tokens[:12])
    session.prefill_suffix(tokens[12:])
    snapshot = session.snapshot()
    data = snapshot.to_bytes()
    that(isinstance(data, bytes), f"to_bytes gives {type(data).__name__}")
    again = infercore.Snapshot.from_bytes(data)
    same = attrs.evolve(again, elapsed_ms=snapshot.elapsed_ms)  # which is of taking it
    equal(same, snapshot, "what comes back")
    for wrong in damaged(data):
        raises(SnapshotError, lambda w=wrong: infercore.Snapshot.from_bytes(w), "damaged bytes")
    raises(InvalidInputError, lambda: infercore.Snapshot.from_bytes("text"), "text as bytes")  # type: ignore[arg-type]
    other = rig.session()
    other.restore(again)
    equal((other.state, list(rig.inner(other).tokens())), ("READY", tokens), "what is restored")
    rig.follows(tokens, greedy(other, 4), "the restored session")


@law("SEAM-12", tier="session", since="1.2")
def check_infill(rig: Rig) -> None:
    """Infill uses the model's own marks, with both sides as text; without them it is refused.

    What would be a mark in the text around a gap stays text.
    """
    session, marks = rig.session(), rig.tokenizer.fim
    before, after = rig.passage(6), " " + rig.passage(5)
    if marks is None:
        refused = raises(
            UnsupportedFeatureError, lambda: list(session.infill(before, after)), "a gap"
        )
        that("infill" in refused.feature, f"refused is {refused.feature!r}")
        equal(session.state, "EMPTY", "the state after a refusal")
        return

    def plain(text: str) -> list[int]:
        return list(rig.tokenizer.encode(text, add_special=False))

    name = rig.tokenizer.token_bytes(marks.middle).decode()
    for left, right in ((before, after), (before + name, name + after)):
        list(session.infill(left, right, max_tokens=1))
        wanted = [marks.prefix, *plain(left), marks.suffix, *plain(right), marks.middle]
        held = list(rig.inner(session).tokens())
        first = held.index(marks.prefix)
        equal(held[first : first + len(wanted)], wanted, "what stands around the gap")


# -- a context -------------------------------------------------------------------------------------


@law("CAP-31", model="any", since="1.2")
def check_native_handles(rig: Rig) -> None:
    """A model and a context return the engine's own handle or refuse; once closed, they do not."""
    model = rig.another_model()
    context = rig.encoder_context() if rig.is_encoder else rig.opened(model.new_context(n_ctx=32))
    for one in (context, model):
        handles = []
        for _ in range(2):
            try:
                handles.append(one.native_handle)
            except UnsupportedFeatureError as error:  # noqa: PERF203  (each time anew)
                equal(error.backend, rig.backend, "the backend that refuses its handle")
        that(len(handles) in (0, 2), "a handle is given once and not again")
        that(None not in handles and 0 not in handles, "the handle is none")
        that(not handles or handles[0] == handles[1], "two handles of one thing")
    for one in (context, model):
        one.close()
        raises(SessionClosedError, lambda one=one: one.native_handle, "a handle of what is closed")


@law("CAP-32", since="1.2")
def check_warmup_of_a_full_window(rig: Rig) -> None:
    """Warming up a full context keeps all it holds, or is refused; it continues as before.

    The same holds where one of two sequences holds tokens.
    """
    tokens = rig.tokens(48)
    context = rig.context(n_ctx=48, n_batch=48)
    context.decode(tokens[:-1])
    for last in (tokens[-1:], []):
        with contextlib.suppress(UnsupportedFeatureError):
            context.warmup()
        equal(list(context.tokens()), tokens[: 48 - len(last)], "the tokens after a warm-up")
        if last:
            context.decode(last)
            rig.near(context.logits(), rig.cold(tokens), "logits behind it")
    raises(ContextOverflowError, lambda: context.decode_one(tokens[0]), "one token too many")
    if rig.observe is not None:
        resident = rig.observe(context, 0).resident
        that(resident in (None, 48), f"the engine holds {resident} tokens of 48")
    if context.capabilities.multi_sequence:
        _check_warmup_of_two(rig)


def _check_warmup_of_two(rig: Rig) -> None:
    tokens = rig.tokens(12)
    for held in (0, 1):
        context = rig.two()
        try:
            context.warmup()
        except UnsupportedFeatureError:
            return
        context.decode(tokens[:8], seq_id=held)
        with contextlib.suppress(UnsupportedFeatureError):
            context.warmup()
        found = [list(context.tokens(seq_id)) for seq_id in (held, 1 - held)]
        equal(found, [tokens[:8], []], "the tokens of two sequences after a warm-up")
        context.decode(tokens[8:], seq_id=held)
        rig.near(context.logits(), rig.cold(tokens), f"logits of sequence {held} after a warm-up")


@law("CAP-33", needs="plan_memory", since="1.2")
def check_a_fitted_window(rig: Rig) -> None:
    """With n_ctx="fit" the window is what the plan says, up to the trained one, and works."""
    trained = rig.model.info.n_ctx_train
    if not 0 < trained <= 2**14:
        rig.leave("the trained window is not known, or too long to be filled here")
    context = rig.context(n_ctx="fit")
    that(1 <= context.n_ctx <= trained, f"a window of {context.n_ctx}, trained are {trained}")
    equal(
        rig.model.plan_memory(**rig.fields(n_ctx="fit")).n_ctx, context.n_ctx, "the plan's window"
    )
    whole = rig.model.plan_memory(**rig.fields(n_ctx=trained))
    if whole.kv_bytes + whole.compute_bytes < 2**27:  # any machine has room for it
        equal(context.n_ctx, trained, "the window")
    tokens = rig.tokens(12)
    context.decode(tokens)
    rig.near(context.logits(), rig.cold(tokens), "logits in a fitted window")


@law("CAP-34", since="1.2")
def check_control_vectors(rig: Rig) -> None:
    """A control vector changes the logits to the oracle's with it, and back; or it is refused.

    Layers that the engine cannot add to are refused each, and nothing is changed.
    """
    n_layer, n_embd = rig.model.info.n_layer, rig.model.info.n_embd
    vector = np.asarray([rig.random.gauss(0, 0.5) for _ in range(n_embd)], np.float32)
    vector[: n_embd // 2] *= vector[: n_embd // 2] > 0  # some are 0, and not all
    tokens, plain = rig.tokens(10), None
    context = rig.context()
    for wrong in ({n_layer: vector}, {0: vector[1:]}, {-1: vector}, 5):
        raises(InvalidInputError, lambda w=wrong: context.set_control_vector(w), "no directions")
    context.decode(tokens)
    plain = np.array(context.logits())
    taken: list[Any] = []
    told, refused = set(), []
    for layers in sorted(
        {(0,), (n_layer // 2,), (n_layer - 1,), tuple(range(n_layer))[1:] or (0,)}
    ):
        added = {layer: vector / (1 + layer) for layer in layers}
        try:
            context.set_control_vector(added)
        except UnsupportedFeatureError as error:
            that("control_vector" in error.feature, f"it is refused as {error.feature!r}")
            context.eval(tokens, 0)
            rig.same_bits(context.logits(), plain, f"logits after layer {layers} was refused")
            refused.append(added)
            continue
        taken.append(added)
        told.add(context.effective.get("control_vector"))
        context.clear()
        context.decode(tokens[:6])
        for token in tokens[6:]:
            context.decode_one(token)
        if rig.live_oracle() is not None:
            expected = rig.need_oracle().rows(tokens, Way(added=added))[-1]
            rig.near(context.logits(), expected, f"logits with a vector added to layers {layers}")
            with contextlib.suppress(UnsupportedFeatureError):
                context.clear()
                context.decode_spans([(0, rig.need_oracle().looked_up(tokens), "last")])
                what = f"logits of rows with a vector added to layers {layers}"
                rig.near(context.logits(), expected, what)
        else:
            that(not np.array_equal(context.logits(), plain), f"layers {layers} change nothing")
        context.set_control_vector(None)
        context.eval(tokens, 0)
        rig.same_bits(context.logits(), plain, "logits once it is taken away")
    that(None not in told, "effective['control_vector'] is not set")
    equal(len(told), len(taken), "different values of effective['control_vector']")
    equal(context.effective.get("control_vector"), None, "effective once it is taken away")
    _check_told_vectors(rig, context, vector, taken, refused)


def _check_told_vectors(
    rig: Rig, context: Any, vector: Any, taken: list[Any], refused: list[Any]
) -> None:
    """A vector is told with its layers, and one that is refused leaves what is in force."""
    tokens = rig.tokens(10)
    digests = set()
    for added in taken:  # the same numbers, each time in another layer
        context.set_control_vector(dict.fromkeys(added, vector))
        digests.add(context.effective.get("control_vector"))
    equal(len(digests), len(taken), "different values of effective, of a vector in other layers")
    context.set_control_vector(None)
    if not taken:
        return
    context.set_control_vector(taken[0])
    context.eval(tokens, 0)
    row, in_force = np.array(context.logits()), context.effective.get("control_vector")
    for other in refused:
        what = "a vector that was refused before"
        raises(UnsupportedFeatureError, lambda o=other: context.set_control_vector(o), what)
    what = "directions that are no mapping"
    raises(InvalidInputError, lambda: context.set_control_vector(5), what)
    context.eval(tokens, 0)
    rig.same_bits(context.logits(), row, "logits after another vector was refused")
    digest_now = context.effective.get("control_vector")
    equal(digest_now, in_force, "effective after another vector was refused")


@law("THREAD-10", tier="process", since="1.2")
def check_a_context_in_tasks(rig: Rig) -> None:
    """A context opened for asyncio gives what any context gives, call by call, in order."""
    tokens = rig.tokens(20)
    plain = rig.context()
    plain.decode(tokens)
    expected = np.array(plain.logits())

    async def main() -> None:
        fields = rig.fields(n_batch=4, n_ubatch=4)
        async with infercore.aopen_context(rig.model, **fields) as context:
            with_order = (context.decode_one(token) for token in tokens)
            await asyncio.gather(*with_order)
            equal(await context.tokens(), tokens, "the tokens of calls made at once")
            given = await context.logits()
            rig.near(given, expected, "logits of an awaited context")
            kept = np.array(given)
            await context.decode_one(tokens[0])
            rig.same_bits(given, kept, "rows that were given before another call")
            await context.clear()
            task = asyncio.ensure_future(context.decode(tokens * 5))
            await asyncio.sleep(0)
            task.cancel()
            done = await asyncio.gather(task, return_exceptions=True)
            held = await context.tokens()
            equal(held, (tokens * 5)[: len(held)], f"what is held after {done[0]!r}")
            await context.clear()
            await context.decode(tokens)
            rig.near(await context.logits(), expected, "logits after a cancelled call")
        that(context.closed, "the context is open after its block")
        try:
            await context.decode(tokens)
        except SessionClosedError:
            return
        that(condition=False, text="a closed context took tokens")

    asyncio.run(main())


@law("EMB-12", tier="session", model="any", since="1.2")
def check_rerank(rig: Rig) -> None:
    """Documents are ordered by the ranking head's score; a model without one does not rank.

    Scores are those of the rig's own computation (`Rig.ranker`).
    """
    model = rig.model if rig.encoder is None else rig.encoder_model
    query, documents = rig.passage(4), [rig.passage(n) for n in (3, 9, 5, 7)]
    if rig.ranker is not None and not rig.in_pool:
        _check_ranker(rig, rig.ranker, query, documents)
    if "rank" not in model.capabilities.pooling:
        error = raises(
            UnsupportedFeatureError, lambda: infercore.rerank(model, query, documents), "ranking"
        )
        equal(error.backend, rig.backend, "the backend that refuses to rank")
        raises(InvalidInputError, lambda: infercore.rerank(model, query, "text"), "a str")
        return
    found = infercore.rerank(model, query, documents)
    equal(sorted(place for place, _ in found), [0, 1, 2, 3], "the places")
    equal([s for _, s in found], sorted((s for _, s in found), reverse=True), "their order")
    equal(infercore.rerank(model, query, documents, top_n=2), found[:2], "the best two")
    for place, score in found:
        ((_, alone),) = infercore.rerank(model, query, [documents[place]])
        that(abs(alone - score) <= rig.tolerance, f"{score} beside others, {alone} alone")


def _check_ranker(
    rig: Rig,
    write: Callable[[str], Callable[[Sequence[int], Sequence[int]], float]],
    query: str,
    documents: list[str],
) -> None:
    exact = {name: rig.exact[name] for name in ("precision",) if name in rig.exact}
    with tempfile.TemporaryDirectory() as folder:
        score_of = write(folder)
        files = list(Path(folder).iterdir())
        with rig.open_at(str(files[0]) if len(files) == 1 else folder) as model:
            kinds = model.capabilities.pooling
            that("rank" in kinds, f"a model that ranks pools {kinds}")
            first, expected = model.tokenizer.encode(query), []
            for document in documents:
                (ids,) = model.tokenizer.encode_many([(query, document)])
                types = [0] * len(first) + [1] * (len(ids) - len(first))
                expected.append(score_of(ids, types))
            found = infercore.rerank(model, query, documents, **exact)
            places = [place for place, _ in found]
            equal(sorted(places), list(range(len(documents))), "the places of documents")
            for better, other in itertools.pairwise(places):
                is_so = expected[better] >= expected[other] - 2 * _OF_SCORES
                that(is_so, f"document {better} comes before {other}; the scores are {expected}")
            (alone,) = infercore.embed(model, [query], **exact)
            scores = [*(score for _, score in sorted(found)), float(alone[0])]
            expected.append(score_of(first, [0] * len(first)))
            for score, right in zip(scores, expected, strict=True):
                that(abs(score - right) <= _OF_SCORES, f"scores {scores}, not {expected}")
            for kind in {"mean", "none"} - set(kinds):
                error = raises(
                    UnsupportedFeatureError,
                    lambda kind=kind: model.new_context(n_ctx=64, pooling_type=kind),
                    f"pooling {kind!r} of a model that ranks",
                )
                that(error.feature, "the refusal names no feature")
                equal(error.backend, rig.backend, "the backend that refuses it")
            if rig.encoder is not None:
                _check_vectors_of_ranker(rig, model, first)


def _check_vectors_of_ranker(rig: Rig, model: Any, ids: list[int]) -> None:
    """A model that ranks gives the vectors of the encoder that it was made of, where it can."""
    threads = {name: rig.exact[name] for name in THREADS if name in rig.exact}
    for kind in set(model.capabilities.pooling) & {"mean", "cls", "last"}:
        with model.new_context(n_ctx=64, pooling_type=kind, **threads) as context:
            context.encode(ids)
            found = np.array(context.embedding())
        plain = rig.encoder_context(n_ctx=64, pooling_type=kind)
        plain.encode(ids)
        what = f"the vector of a model that ranks, pooled by {kind!r}"
        equal(found.shape, plain.embedding().shape, f"the shape of {what}")
        gap = float(np.abs(found - plain.embedding()).max())
        that(gap <= _OF_SCORES, f"{what} is off by {gap:.2g}")


_OF_SCORES = 5e-3
