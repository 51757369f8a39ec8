"""Vectors of tokens and of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import infercore
from infercore.conformance.expect import equal, raises, that
from infercore.conformance.law import law
from infercore.errors import InvalidInputError, OutputNotAvailableError, UnsupportedFeatureError

if TYPE_CHECKING:
    from infercore.conformance.oracle import Oracle
    from infercore.conformance.rig import Rig


def _rows(rig: Rig, tokens: list[int], **fields: Any) -> Any:
    context = rig.context(embeddings=True, pooling_type="none", **fields)
    context.decode(tokens)
    return np.array(context.embeddings())


def _pooled(rig: Rig, tokens: list[int], kind: str) -> Any:
    context = rig.context(embeddings=True, pooling_type=kind)
    context.decode(tokens)
    return np.array(context.embedding())


def _close(found: Any, expected: Any, what: str) -> None:
    scale = max(1.0, float(np.abs(expected).max()))
    gap = float(np.abs(found - expected).max()) / scale
    that(gap <= 1e-3, f"{what}: vectors differ by {gap:.3g} of their size")  # noqa: PLR2004


def _kind(rig: Rig, kind: str) -> None:
    if kind not in rig.context().capabilities.pooling:
        rig.leave(f"pooling {kind!r} is not declared")


@law("EMB-1", needs="embeddings")
def check_rows_of_tokens(rig: Rig) -> None:
    """embeddings() has a finite row for each token."""
    rows = _rows(rig, rig.tokens(7))
    equal(rows.shape, (7, rig.model.info.n_embd), "shape")
    that(np.isfinite(rows).all(), "some values are not finite")
    that(len(np.unique(rows.round(4), axis=0)) > 1, "all rows are alike")


@law("EMB-2", needs="embeddings")
def check_mean_pooling(rig: Rig) -> None:
    """Mean pooling is the mean of the token rows."""
    _kind(rig, "mean")
    tokens = rig.tokens(8)
    _close(_pooled(rig, tokens, "mean"), _rows(rig, tokens).mean(axis=0), "mean pooling")


@law("EMB-3", needs="embeddings")
def check_cls_and_last_pooling(rig: Rig) -> None:
    """Pooling "cls" is the first row, "last" the last."""
    tokens = rig.tokens(8)
    rows = _rows(rig, tokens)
    for kind, row in (("cls", rows[0]), ("last", rows[-1])):
        _kind(rig, kind)
        _close(_pooled(rig, tokens, kind), row, f"pooling {kind}")


@law("EMB-4", needs="embeddings")
def check_pooling_needs_one_step(rig: Rig) -> None:
    """With pooling, a text longer than one compute step is refused and changes nothing.

    The vector of a long text that one step holds is the mean of all its rows.
    """
    _kind(rig, "mean")
    context = rig.context(embeddings=True, pooling_type="mean", n_batch=8, n_ubatch=8)
    with rig.unchanged(context):
        raises(InvalidInputError, lambda: context.decode(rig.tokens(9)), "9 tokens in steps of 8")
    context.decode(rig.tokens(8))
    equal(context.embedding().shape, (rig.model.info.n_embd,), "shape")
    _check_long_text(rig)
    if context.capabilities.multi_sequence:
        _check_uneven_steps(rig)


def _check_long_text(rig: Rig) -> None:
    """The vector of a text longer than a usual step is of all its rows, if it is not refused."""
    tokens = rig.story_at(0, min(_LONG_TEXT, rig.model.info.n_ctx_train or _LONG_TEXT))
    fields = {"n_ctx": len(tokens), "embeddings": True}
    pooled = rig.context(pooling_type="mean", **fields)
    if len(tokens) > pooled.n_ubatch:
        return
    pooled.decode(tokens)
    rows = _rows(rig, tokens, n_ctx=len(tokens))
    _close(np.array(pooled.embedding()), rows.mean(axis=0), "the mean of a long text")


_LONG_TEXT = 700


def _check_uneven_steps(rig: Rig) -> None:
    """A step that the sequences do not divide is used as it is, or what is allowed can be."""
    asked = {"n_seq_max": 3, "n_ctx": 3 * rig.n_ctx, "pooling_type": "mean"}
    for n_batch, n_ubatch in ((16, 16), (16, 2), (2, None)):
        n = n_ubatch or n_batch
        try:
            context = rig.context(**asked, n_batch=n_batch, n_ubatch=n_ubatch)
        except InvalidInputError as error:
            equal((error.field, error.value), ("n_ubatch", n), "field and value of the refusal")
            that(error.allowed, f"the refusal of steps of {n} says not what is allowed")
            that(str(3 if n < 3 else n - n % 3) in str(error), f"it names no step: {error}")  # noqa: PLR2004
        else:
            equal(context.effective["n_ubatch"], n, "effective n_ubatch")


@law("EMB-5", needs="embeddings")
def check_no_embeddings_unasked(rig: Rig) -> None:
    """Only pooling makes embeddings unasked; those not made raise OutputNotAvailableError."""
    tokens = rig.tokens(5)
    for kind in sorted({"mean", "cls", "last"} & set(rig.context().capabilities.pooling)):
        pooled = rig.context(pooling_type=kind)
        equal(pooled.effective.get("embeddings"), True, f"effective embeddings, pooling {kind}")
        pooled.decode(tokens)
        _close(np.array(pooled.embedding()), _pooled(rig, tokens, kind), f"pooling {kind} unasked")
        try:
            bare = rig.context(pooling_type=kind, embeddings=False)
        except (UnsupportedFeatureError, InvalidInputError):
            continue
        equal(bare.effective.get("embeddings"), False, f"pooling {kind}, and no embeddings")
        bare.decode(tokens)
        raises(OutputNotAvailableError, bare.embedding, f"pooling {kind}, and no embeddings")
    context = rig.context()
    equal(context.effective.get("embeddings"), False, "effective embeddings without pooling")
    context.decode(rig.tokens(4))
    raises(OutputNotAvailableError, context.embeddings, "embeddings() without embeddings=True")
    fresh = rig.context(embeddings=True, pooling_type="none")
    raises(OutputNotAvailableError, fresh.embeddings, "embeddings() before a decode")


@law("EMB-6", needs="embeddings")
def check_the_wrong_kind_of_embedding(rig: Rig) -> None:
    """Pooled vectors need pooling, and token vectors need none."""
    _kind(rig, "mean")
    bare = rig.context(embeddings=True, pooling_type="none")
    bare.decode(rig.tokens(3))
    raises(InvalidInputError, bare.embedding, "embedding() without pooling")
    pooled = rig.context(embeddings=True, pooling_type="mean")
    pooled.decode(rig.tokens(3))
    raises(InvalidInputError, pooled.embeddings, "embeddings() with pooling")


@law("EMB-7", needs="embeddings")
def check_rows_over_chunks(rig: Rig) -> None:
    """Token rows of a long call are those of every chunk."""
    tokens = rig.tokens(11)
    whole = _rows(rig, tokens)
    for n_batch, n_ubatch in ((4, 4), (8, 3)):
        rows = _rows(rig, tokens, n_batch=n_batch, n_ubatch=n_ubatch)
        equal(rows.shape[0], 11, "the number of rows")
        _close(rows, whole, f"rows over calls of {n_batch} and steps of {n_ubatch}")


@law("EMB-8", needs="embeddings")
def check_embeddings_switched_on(rig: Rig) -> None:
    """set_embeddings switches token rows on and off.

    Rows that were switched on are those of a context opened with embeddings; switched off, there
    are none, and the logits are the same. A sequence that was shifted is saved and restored, too.
    """
    context = rig.context(pooling_type="none")
    tokens = rig.tokens(5)
    context.set_embeddings(True)
    equal(context.effective.get("embeddings"), True, "effective embeddings")
    context.decode(tokens)
    _close(np.array(context.embeddings()), _rows(rig, tokens), "rows that were switched on")
    context.set_embeddings(False)
    context.clear()
    context.decode(tokens)
    raises(OutputNotAvailableError, context.embeddings, "rows that were switched off")
    rig.near(context.logits(), rig.cold(tokens), "logits after switching")
    context.set_embeddings(True)
    kinds = context.capabilities
    if kinds.kv_shift and kinds.sequence_state:  # to save it, an engine may compute
        context.seq_shift(0, 0, -1, 3)
        data = context.save_sequence(0)
        context.set_embeddings(False)
        context.load_sequence(0, data)
        equal(context.n_past(), len(tokens) + 3, "n_past, moved and restored")
    many, live = rig.tokens(40), rig.context(pooling_type="none", n_batch=64, n_ubatch=8)
    live.set_embeddings(True)
    live.decode(many)
    _close(np.array(live.embeddings()), _rows(rig, many), "rows of several steps, switched on")


@law("EMB-9", needs="embeddings")
def check_other_texts_have_other_vectors(rig: Rig) -> None:
    """The same text has the same vector, a different text a different one."""
    _kind(rig, "mean")
    a, b = rig.tokens(6), rig.tokens(9)
    first = _pooled(rig, a, "mean")
    rig.same_bits(_pooled(rig, a, "mean"), first, "the same text again")
    that(not np.allclose(first, _pooled(rig, b, "mean")), "two texts have one vector")


@law("EMB-10", tier="session", needs="embeddings")
def check_embed(rig: Rig) -> None:
    """embed() gives each text a vector of length 1, the same alone as among others."""
    _kind(rig, "mean")
    texts = [rig.passage(6), rig.passage(12), rig.passage(3)]
    rows = infercore.embed(rig.model, texts, pooling="mean")
    equal(rows.shape, (3, rig.model.info.n_embd), "shape")
    lengths = np.linalg.norm(rows, axis=1)
    that(np.allclose(lengths, 1.0, atol=1e-3), f"lengths {lengths}")
    for i, text in enumerate(texts):
        alone = infercore.embed(rig.model, [text], pooling="mean")[0]
        gap = float(np.abs(alone - rows[i]).max())
        that(gap <= 1e-2, f"text {i} has another vector alone: {gap:.3g} off")  # noqa: PLR2004


@law("EMB-11", needs="embeddings", since="1.2")
def check_vectors_beside_the_oracle(rig: Rig) -> None:
    """Vectors of tokens and of texts, at many lengths, are the hidden states that the oracle has.

    Three texts of one call keep to themselves.
    """
    oracle = rig.need_oracle()
    kinds = rig.context().capabilities.pooling
    for n in (1, 2, 15, 16, 17, 33, 60, min(131, rig.n_ctx)):
        tokens = rig.tokens(n)
        hidden = oracle.append(oracle.nothing(), tokens)[1]
        _close(_rows(rig, tokens, n_batch=16, n_ubatch=16), hidden, f"rows of {n} tokens")
        pooled = {"mean": hidden.mean(axis=0), "cls": hidden[0], "last": hidden[-1]}
        for kind in set(pooled) & set(kinds):
            _close(_pooled(rig, tokens, kind), pooled[kind], f"{n} tokens, pooling {kind}")
    _check_single_token(rig, oracle)
    if not rig.context().capabilities.multi_sequence:
        return
    texts = [rig.tokens(n) for n in (9, 4, 6)]
    for kind in sorted({"mean", "cls", "last"} & set(kinds)):
        both = rig.context(
            n_seq_max=3, n_ctx=3 * rig.n_ctx, n_batch=64, embeddings=True, pooling_type=kind
        )
        both.decode_batch([(t, (i,), False) for i, text in enumerate(texts) for t in text])
        for i, text in enumerate(texts):
            hidden = oracle.append(oracle.nothing(), text)[1]
            pooled = {"mean": hidden.mean(axis=0), "cls": hidden[0], "last": hidden[-1]}[kind]
            _close(np.array(both.embedding(i)), pooled, f"text {i} of three, pooling {kind}")


def _check_single_token(rig: Rig, oracle: Oracle) -> None:
    """A single token has the one row of its own call, not those of the call before."""
    tokens = rig.tokens(6)
    context = rig.context(embeddings=True, pooling_type="none")
    context.decode(tokens[:5])
    context.decode_one(tokens[5])
    hidden = oracle.append(oracle.nothing(), tokens)[1]
    _close(np.array(context.embeddings()), hidden[-1:], "the row of a single token")
