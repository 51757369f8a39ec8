"""Opening, closing, and what lives as long as what."""

from __future__ import annotations

import contextlib
import gc
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance.expect import equal, raises, that
from infercore.conformance.law import law
from infercore.conformance.laws.encoders import alike
from infercore.conformance.rig import greedy
from infercore.errors import (
    InvalidInputError,
    InvalidStateError,
    SessionClosedError,
    UnsupportedFeatureError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from infercore.conformance.rig import Rig


@law("LIFE-1", model="any")
def check_model_closes_twice(rig: Rig) -> None:
    """A model can be closed twice, and says that it is closed."""
    model = rig.another_model()
    that(not model.closed, "an open model says that it is closed")
    model.close()
    model.close()
    that(model.closed, "a closed model says that it is open")


@law("LIFE-2")
def check_context_closes_twice(rig: Rig) -> None:
    """A context can be closed twice, and says that it is closed."""
    context = rig.context()
    context.decode(rig.tokens(4))
    that(not context.closed, "an open context says that it is closed")
    context.close()
    context.close()
    that(context.closed, "a closed context says that it is open")


@law("LIFE-3", tier="session")
def check_session_closes_twice(rig: Rig) -> None:
    """A session can be closed twice, and says that it is closed."""
    session = rig.session()
    session.ensure_prefix(rig.passage(5))
    session.close()
    session.close()
    that(session.closed, "a closed session says that it is open")


def _calls(context: Any, token: int) -> dict[str, Callable[[], object]]:
    return {
        "decode": lambda: context.decode([token]),
        "decode_one": lambda: context.decode_one(token),
        "eval": lambda: context.eval([token], 0),
        "logits": context.logits,
        "n_past": context.n_past,
        "tokens": context.tokens,
        "seq_remove": lambda: context.seq_remove(0),
        "clear": context.clear,
        "perf": context.perf,
    }


@law("LIFE-4")
def check_closed_context_refuses(rig: Rig) -> None:
    """Every use of a closed context raises SessionClosedError; a row that was read stays."""
    held = rig.context(n_ctx=64)
    held.decode(rig.tokens(5), logits="last")
    row = held.logits()
    copy = row.copy()
    held.close()
    del held
    gc.collect()
    with rig.model.new_context(**rig.fields(n_ctx=64)) as other:  # may be where that was
        other.decode(rig.tokens(9))
        rig.same_bits(row, copy, "a row of a context that was closed")
    context = rig.context()
    token = rig.tokens(1)[0]
    context.decode_one(token)
    context.close()
    for name, call in _calls(context, token).items():
        raises(SessionClosedError, call, f"{name} of a closed context")


@law("LIFE-5", tier="session")
def check_closed_session_refuses(rig: Rig) -> None:
    """Every use of a closed session raises SessionClosedError, but it can still be explained."""
    session = rig.session()
    session.ensure_prefix(rig.passage(5))
    session.close()
    for name, call in {
        "ensure_prefix": lambda: session.ensure_prefix("a"),
        "prefill_suffix": lambda: session.prefill_suffix("a"),
        "decode": lambda: list(session.decode(max_tokens=1)),
        "snapshot": session.snapshot,
    }.items():
        raises(SessionClosedError, call, f"{name} of a closed session")
    report = session.explain_context()
    equal((report.state, report.closed), ("CLOSED", True), "the report of a closed session")


@law("LIFE-6")
def check_context_keeps_its_model(rig: Rig) -> None:
    """A context keeps working after its model is closed."""
    model = rig.another_model()
    context = rig.opened(model.new_context(**rig.fields()))
    tokens = rig.tokens(6)
    context.decode(tokens[:3])
    model.close()
    context.decode(tokens[3:])
    rig.near(context.logits(), rig.cold(tokens), "after the model was closed")


@law("LIFE-7")
def check_closed_model_refuses(rig: Rig) -> None:
    """A closed model no longer opens anything."""
    model = rig.another_model()
    model.close()
    raises(SessionClosedError, lambda: model.new_context(n_ctx=64), "new_context")
    raises(SessionClosedError, lambda: model.new_session(n_ctx=64), "new_session")
    raises(SessionClosedError, model.new_sampler, "new_sampler")
    raises(SessionClosedError, lambda: model.tokenizer.encode("a"), "encode")


@law("LIFE-8")
def check_closed_sampler_refuses(rig: Rig) -> None:
    """A sampler can be closed twice, and then refuses to sample."""
    context = rig.context()
    context.decode(rig.tokens(3))
    sampler = rig.sampler()
    sampler.close()
    sampler.close()
    raises(SessionClosedError, lambda: sampler.sample(context), "sample")


@law("LIFE-9", tier="session")
def check_with_closes(rig: Rig) -> None:
    """The end of a with block closes model, context and session."""
    with rig.another_model() as model:
        with model.new_context(**rig.fields()) as context:
            context.decode(rig.tokens(2))
        with model.new_session(**rig.fields()) as session:
            session.ensure_prefix("a")
    for thing, name in ((model, "model"), (context, "context"), (session, "session")):
        that(thing.closed, f"the {name} is open after its with block")


@law("LIFE-10")
def check_contexts_are_apart(rig: Rig) -> None:
    """Two contexts of one model share no tokens."""
    first, second = rig.context(), rig.context()
    a, b = rig.tokens(5), rig.tokens(7)
    first.decode(a)
    row = first.logits().copy()
    second.decode(b)
    equal((first.tokens(), second.tokens()), (a, b), "tokens of two contexts")
    rig.same_bits(first.logits(), row, "logits of one context after a decode in another")
    second.clear()
    equal(first.n_past(), 5, "n_past of one context after another was cleared")


@law("LIFE-11")
def check_loading_again_gives_the_same(rig: Rig) -> None:
    """Loaded, closed and loaded again, a model gives the same bits and has the same digest."""
    tokens = rig.tokens(6)
    rows, digests = [], []
    for _ in range(2):
        with rig.another_model() as model, model.new_context(**rig.fields()) as context:
            context.decode(tokens)
            rows.append(context.logits().copy())
            digests.append(model.digest)
    equal(digests[1], digests[0], "the digest of the model loaded again")
    rig.same_bits(rows[1], rows[0], "logits of the model loaded again")


@law("LIFE-12", tier="session")
def check_states_of_a_session(rig: Rig) -> None:
    """A session goes from EMPTY via PREFIXED and READY to DECODED, and its report says so."""
    session = rig.session()
    found = [session.state]
    session.ensure_prefix(rig.passage(6))
    found.append(session.state)
    session.prefill_suffix(" " + rig.passage(4))
    found.append(session.explain_context().state)
    greedy(session, 2)
    found.append(session.state)
    session.ensure_prefix("a")
    found.append(session.state)
    equal(found, ["EMPTY", "PREFIXED", "READY", "DECODED", "PREFIXED"], "states")


@law("LIFE-13", tier="session")
def check_calls_out_of_order(rig: Rig) -> None:
    """A suffix or decode in an empty session raises InvalidStateError and changes nothing."""
    session = rig.session()
    for name, call in {
        "prefill_suffix": lambda: session.prefill_suffix("a"),
        "decode": lambda: list(session.decode(max_tokens=1)),
    }.items():
        error = raises(InvalidStateError, call, f"{name} on nothing")
        equal(error.state, "EMPTY", f"{name}: the error's state")
    report = session.explain_context()
    equal((report.state, report.resident_tokens), ("EMPTY", 0), "the report afterwards")


@law("LIFE-14", tier="session")
def check_closing_in_mid_decode(rig: Rig) -> None:
    """Closing a session during a decode ends the stream with SessionClosedError."""
    session = rig.session()
    session.ensure_prefix(rig.passage(5))
    stream = session.decode(max_tokens=50, temperature=0, ignore_eos=True)
    next(stream)
    session.close()
    raises(SessionClosedError, lambda: next(stream), "the stream of a closed session")


@law("LIFE-15", tier="session")
def check_a_fresh_report(rig: Rig) -> None:
    """A session that was given nothing reports nothing, and its whole window as free."""
    report = rig.session().explain_context()
    counts = (
        report.resident_tokens, report.prefix_tokens, report.suffix_tokens,
        report.generated_tokens, report.warm_tail_tokens,
    )  # fmt: skip
    equal(counts, (0, 0, 0, 0, 0), "counts of a fresh session")
    equal((report.n_ctx, report.available_tokens), (rig.n_ctx, rig.n_ctx), "its window")
    that(report.stable_byte_hash is None, "a fresh session has a stable text")


@law("LIFE-17", since="1.2")
def check_a_row_outlives_its_context(rig: Rig) -> None:
    """Rows of logits that are kept can be read after context and model are closed, unchanged.

    A view of an engine's own memory keeps that memory.
    """
    model = rig.another_model()
    kept = []
    for mode in ("last", "all") if model.capabilities.logits_all else ("last",):
        with model.new_context(**rig.fields()) as context:
            context.decode(rig.tokens(6), logits=mode)
            row = context.logits_all() if mode == "all" else context.logits()
            kept.append((mode, row, row.copy()))
    model.close()
    in_their_place = [np.full_like(row, 7.0) for _, row, _ in kept for _ in range(8)]
    rig.cold(rig.tokens(9))
    for mode, row, copy in kept:
        rig.same_bits(row, copy, f"rows of logits={mode!r}, once their context was closed")
    del in_their_place


@law("LIFE-18", model="any", since="1.2")
def check_a_twin_outlives_its_twin(rig: Rig) -> None:
    """Where one of two contexts with the same settings closes and others open, the other works."""
    if not rig.is_encoder:
        _check_twins(rig.context, partial(_row, rig.tokens(12)), rig.near)
    if rig.is_encoder or rig.encoder is not None:
        text = rig.encoder_model.tokenizer.encode(rig.passage(2))
        kinds = {"mean", "cls", "last"} & set(rig.encoder_model.capabilities.pooling)
        for kind in sorted(kinds)[:1]:
            opened = partial(rig.encoder_context, pooling_type=kind)
            _check_twins(opened, partial(_vector, text), alike)


def _vector(tokens: list[int], context: Any) -> Any:
    context.encode(tokens)
    return np.array(context.embedding())


def _row(tokens: list[int], context: Any) -> Any:
    context.clear()
    context.decode(tokens)
    return np.array(context.logits())


def _check_twins(
    opened: Callable[..., Any], found: Callable[[Any], Any], near: Callable[..., None]
) -> None:
    for n in (1, 2):
        fields: list[dict[str, int]] = [
            {"n_threads": count, "n_threads_batch": count} for count in (n, 3 - n)
        ]
        try:
            opened(**fields[1]).close()
        except (InvalidInputError, UnsupportedFeatureError):  # the threads are not to be chosen
            fields = [{}, {}]
        first, twin = (opened(**fields[0]) for _ in range(2))
        expected = found(first)
        first.close()
        other = opened(**fields[1])
        near(found(other), expected, "of a context opened after another was closed")
        with contextlib.suppress(UnsupportedFeatureError):
            twin.warmup()
        near(found(twin), expected, "of a context whose twin was closed")
