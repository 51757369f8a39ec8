"""Models that encode texts and generate none."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import infercore
from infercore.conformance.expect import equal, foreseen, raises, that
from infercore.conformance.law import law
from infercore.conformance.laws.settings import copied, decides, write
from infercore.errors import (
    InvalidInputError,
    InvalidTokenError,
    ModelLoadError,
    OutputNotAvailableError,
    SessionClosedError,
    UnsupportedFeatureError,
)
from infercore.weight_files import gguf

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig

ALIKE = 1 - 1e-4
"""The cosine between two vectors of the same text."""

encoder_law: dict[str, Any] = {"needs": "encoder", "since": "1.1", "model": "encoder"}


def _ids(rig: Rig, number: int = 0, n_words: int = 9) -> list[int]:
    words = rig.story.split()
    start = 7 * number
    ids: list[int] = rig.encoder_model.tokenizer.encode(" ".join(words[start : start + n_words]))
    return ids


def _rows(rig: Rig, ids: list[int]) -> Any:
    context = rig.encoder_context(pooling_type="none")
    context.encode(ids)
    return np.array(context.embeddings())


def _vector(rig: Rig, ids: list[int], kind: str = "mean") -> Any:
    context = rig.encoder_context(pooling_type=kind)
    context.encode(ids)
    return np.array(context.embedding())


def alike(found: Any, expected: Any, what: str) -> None:
    equal(found.shape, expected.shape, f"{what}, shape")
    lengths = np.linalg.norm(found), np.linalg.norm(expected)
    cosine = float(found @ expected / (lengths[0] * lengths[1]))
    ratio = float(lengths[0] / lengths[1])
    that(cosine >= ALIKE, f"{what}: the cosine is {cosine:.6f}")
    that(abs(ratio - 1) <= 1 - ALIKE + 1e-3, f"{what}: the lengths are {lengths}")


@law("ENC-1", **encoder_law)
def check_an_encoder_says_so(rig: Rig) -> None:
    """An encoder says that it is one, that it makes embeddings, and that nothing is resident."""
    model = rig.encoder_model
    kinds = rig.encoder_context().capabilities
    equal((model.info.has_encoder, kinds.encoder, kinds.embeddings), (True, True, True), "told")
    equal(kinds, model.capabilities, "capabilities of model and context")
    told, none = (
        {n: getattr(k, n) for n in _OF_A_CACHE} for k in (kinds, infercore.Capabilities())
    )
    equal(told, none, "what is told of a cache")
    that({"none", "mean"} <= set(kinds.pooling), f"pooling {kinds.pooling}")
    said = _pooling_said(rig.encoder or rig.path)
    if said is not None:
        equal(rig.encoder_context().pooling_type, said, "the pooling that the files name")


_OF_A_CACHE = (
    "kv_remove", "max_rollback", "kv_copy", "kv_shift", "kv_divide", "scans_cells", "state",
    "sequence_state", "logits_all", "native_sampler",
)  # fmt: skip


def _pooling_said(path: str | None) -> str | None:
    """Return the pooling that a model's own files name, None where they name none."""
    if path is None:
        return None
    where = Path(path)
    if where.is_dir():
        file = where / "1_Pooling" / "config.json"
        said = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return next((kind for key, kind in _POOLINGS.items() if said.get(key) is True), None)
    with where.open("rb") as opened:
        if opened.read(len(gguf.MAGIC)) != gguf.MAGIC:
            return None
    number = gguf.read(path).own("pooling_type")
    return {1: "mean", 2: "cls", 3: "last"}.get(number)


_POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


@law("ENC-2", **encoder_law)
def check_one_vector_for_a_text(rig: Rig) -> None:
    """encode() gives the same text the same vector, and a different text a different one."""
    first, other = _ids(rig, 0), _ids(rig, 2)
    vector = _vector(rig, first)
    equal(vector.shape, (rig.encoder_model.info.n_embd,), "shape")
    that(np.isfinite(vector).all(), "some values are not finite")
    context = rig.encoder_context(pooling_type="mean")
    context.encode(other)
    that(not np.allclose(context.embedding(), vector, atol=1e-3), "two texts have one vector")
    context.encode(first)
    rig.same_bits(np.array(context.embedding()), vector, "the text after another one")


@law("ENC-3", **encoder_law)
def check_rows_and_pooling(rig: Rig) -> None:
    """Token rows are one for each token; mean, cls and last pooling are made of them."""
    ids = _ids(rig)
    rows = _rows(rig, ids)
    equal(rows.shape, (len(ids), rig.encoder_model.info.n_embd), "shape")
    expected = {"mean": rows.mean(axis=0), "cls": rows[0], "last": rows[-1]}
    for kind in set(expected) & set(rig.encoder_context().capabilities.pooling):
        alike(_vector(rig, ids, kind), expected[kind], f"pooling {kind}")


@law("ENC-4", **encoder_law)
def check_texts_side_by_side(rig: Rig) -> None:
    """Several texts in one call have the vectors that each has alone, in whatever order."""
    if not rig.encoder_model.capabilities.multi_sequence:
        rig.leave("this encoder takes one text at a time")
    texts = [_ids(rig, i, n) for i, n in enumerate((4, 9, 6))]
    for kind in sorted({"mean", "cls", "last"} & set(rig.encoder_model.capabilities.pooling)):
        context = rig.encoder_context(pooling_type=kind, n_seq_max=3, n_ctx=96, kv_unified=True)
        one_by_one = [(t, (i,), False) for i, ids in enumerate(texts) for t in ids]
        turns = itertools.zip_longest(*([e for e in one_by_one if e[1] == (i,)] for i in range(3)))
        in_turns = [entry for turn in turns for entry in turn if entry is not None]
        backwards = [entry for i in (2, 1, 0) for entry in one_by_one if entry[1] == (i,)]
        for entries in (one_by_one, in_turns, backwards):
            context.decode_batch(entries)
            found = [np.array(context.embedding(i)) for i in range(3)]
            equal([context.n_resident(i) for i in range(3)], [0, 0, 0], "tokens that are kept")
            for i, ids in enumerate(texts):
                alike(found[i], _vector(rig, ids, kind), f"text {i} of three, pooling {kind}")


@law("ENC-5", **encoder_law)
def check_a_text_that_is_too_long(rig: Rig) -> None:
    """A text longer than one compute step is refused whole, and the context goes on working."""
    ids = _ids(rig)
    context = rig.encoder_context(pooling_type="mean", n_batch=len(ids), n_ubatch=len(ids))
    context.encode(ids)
    vector = np.array(context.embedding())
    longer = [*ids, ids[1]]
    raises(InvalidInputError, lambda: context.encode(longer), "one token more than a step takes")
    rig.same_bits(np.array(context.embedding()), vector, "the vector after a refusal")
    context.encode(ids)
    rig.same_bits(np.array(context.embedding()), vector, "the text again, after a refusal")


@law("ENC-6", **encoder_law)
def check_no_logits_of_an_encoder(rig: Rig) -> None:
    """An encoder makes no logits and keeps no tokens: decoding is refused, and changes nothing."""
    ids = _ids(rig)
    context = rig.encoder_context(pooling_type="mean")
    context.encode(ids)
    vector = np.array(context.embedding())
    calls = {
        "decode": lambda: context.decode(ids),
        "decode_one": lambda: context.decode_one(ids[1]),
        "eval": lambda: context.eval(ids, 0),
    }
    for name, call in calls.items():
        raises(UnsupportedFeatureError, call, f"{name} on an encoder")
        rig.same_bits(np.array(context.embedding()), vector, f"the vector after {name}")
    raises(OutputNotAvailableError, context.logits, "logits of an encoder")
    held = (context.n_past(), context.seq_pos_max(), context.n_resident(), context.n_free())
    equal(held, (0, -1, 0, context.n_ctx), "n_past, last position, n_resident and n_free")


@law("ENC-7", tier="session", **encoder_law)
def check_no_session_on_an_encoder(rig: Rig) -> None:
    """A session on an encoder is refused with UnsupportedFeatureError."""
    raises(UnsupportedFeatureError, rig.encoder_model.new_session, "a session")
    raises(UnsupportedFeatureError, lambda: infercore.open_session(rig.encoder_model), "a session")


@law("ENC-8", **encoder_law)
def check_golden_vectors(rig: Rig) -> None:
    """Ids and vectors of the pack's encoder are those of the reference computation."""
    if rig.encoder_name is None:
        rig.leave("the encoder is none of the pack's")
    import infercore_models  # noqa: PLC0415  (a distribution of its own; the rig has found it)

    for golden in infercore_models.golden_texts(rig.encoder_name):
        ids = rig.encoder_model.tokenizer.encode(golden.text)
        equal(ids, list(golden.tokens), f"ids of {golden.text!r}")
        alike(_vector(rig, ids), golden.rows.mean(axis=0), f"the vector of {golden.text!r}")


@law("ENC-9", tier="session", **encoder_law)
def check_embed_with_an_encoder(rig: Rig) -> None:
    """embed() gives each text a vector of length 1, the same alone as among others."""
    words = rig.story.split()
    texts = [" ".join(words[i : i + n]) for i, n in ((0, 5), (20, 12), (40, 3))]
    rows = infercore.embed(rig.encoder_model, texts, pooling="mean")
    that(np.allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-3), "lengths other than 1")
    for i, text in enumerate(texts):
        alone = infercore.embed(rig.encoder_model, [text], pooling="mean")[0]
        alike(rows[i], alone, f"text {i} among others")
    limit = rig.encoder_model.info.n_ctx_train
    beyond = [texts[0], "word " * limit]
    raises(InvalidInputError, lambda: infercore.embed(rig.encoder_model, beyond), "a long text")


@law("ENC-10", **encoder_law)
def check_bad_input_to_an_encoder(rig: Rig) -> None:
    """An unknown id, rows of logits and a closed context are refused."""
    context = rig.encoder_context(pooling_type="mean")
    fresh = rig.encoder_context(pooling_type="mean")
    raises(OutputNotAvailableError, fresh.embedding, "a vector before any text")
    context.encode(_ids(rig))
    vector = np.array(context.embedding())
    for bad in (-1, rig.encoder_model.info.n_vocab):
        raises(InvalidTokenError, lambda b=bad: context.encode([b]), f"token {bad}")
    context.encode([])
    entries = [(token, [0], True) for token in _ids(rig)]
    raises(UnsupportedFeatureError, lambda: context.decode_batch(entries), "rows of a batch")
    if context.capabilities.multi_sequence:
        two = rig.encoder_context(pooling_type="mean", n_seq_max=2, n_ctx=96, kv_unified=True)
        spans = [(s, _ids(rig), "last") for s in (0, 1)]
        error = raises(UnsupportedFeatureError, lambda: two.decode_spans(spans), "rows of spans")
        equal(error.feature, "decode", "the refused feature")
    rig.same_bits(np.array(context.embedding()), vector, "the vector afterwards")
    context.close()
    raises(SessionClosedError, lambda: context.encode(_ids(rig)), "encode after close")


@law("ENC-17", **{**encoder_law, "since": "1.2"})
def check_positions_behind_padding(rig: Rig) -> None:
    """The window of an encoder whose positions start after the padding id excludes those positions.

    As RoBERTa's do; such a model that cannot be read is refused. A backend over compiled graphs may
    take the window from the graph, whatever config.json says.
    """
    path = Path(rig.encoder or rig.path or "")
    if not (path / "config.json").is_file():
        rig.leave("the encoder has no config.json")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    n_positions = config.get("max_position_embeddings")
    if config.get("model_type") != "bert" or not isinstance(n_positions, int):
        rig.leave("the encoder is no BERT whose positions are counted")
    windows: dict[int | None, tuple[int, int]] = {}
    with copied(path) as copy:
        for padding in (0, 1, 5, None):
            other = {**config, "model_type": "roberta", "pad_token_id": padding}
            write(copy / "config.json", {k: v for k, v in other.items() if v is not None})
            try:
                opened = rig.open_at(str(copy))
            except ModelLoadError as error:
                foreseen(error, "an encoder as RoBERTa")
                continue
            with opened as model:
                left = n_positions - 1 - (1 if padding is None else padding)
                usual = rig.encoder_model.info.n_ctx_train  # its tokenizer may allow fewer
                windows[padding] = model.info.n_ctx_train, min(left, usual)
    usual = rig.encoder_model.info.n_ctx_train
    if not decides(path) and {found for found, _ in windows.values()} == {usual}:
        rig.leave("the window is the graph's")
    for padding, (found, expected) in windows.items():
        equal(found, expected, f"n_ctx_train with padding {padding}")
