"""A model of an encoder, and a decoder that reads what it made."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance import gguf_copy
from infercore.conformance.expect import equal, foreseen, raises, that
from infercore.conformance.gguf_copy import FLOAT32, UINT32, number
from infercore.conformance.law import law
from infercore.errors import (
    BackendUnavailableError,
    DecodeAbortedError,
    InvalidStateError,
    ModelLoadError,
    UnsupportedFeatureError,
)
from infercore.testing import engine_of
from infercore.weight_files.gguf import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infercore.conformance.rig import Rig

_N_VOCAB, _N_EMBD, _N_FF, _N_HEAD, _N_LAYER, _N_CTX = 128, 64, 96, 2, 2, 512
_TOLERANCE = 5e-3
_EPSILON = 1e-5


@law("DEC-32", since="1.2")
def check_an_encoder_and_a_decoder(rig: Rig) -> None:
    """A decoder that reads an encoder's output needs a text first, and gives the oracle's logits.

    Also after a warm-up, in one call or several, and of a second text once the first one's tokens
    are gone. Or such a model is refused.
    """
    weights = _weights(np.random.default_rng(rig.random.randrange(2**32)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "t5.gguf"
        file.write_bytes(_file(weights).to_bytes())
        try:
            opened = rig.open_at(str(file))
        except (ModelLoadError, UnsupportedFeatureError, BackendUnavailableError) as error:
            foreseen(error, "a model of an encoder and a decoder")
            rig.leave("the backend reads no such model")
        with opened as model:
            that(model.info.has_encoder, "the model's encoder is not told")
            with model.new_context(**rig.fields()) as context:
                _check_texts(rig, model, context, weights)


def _check_texts(rig: Rig, model: Any, context: Any, weights: dict[str, Any]) -> None:
    ids = [rig.random.randrange(_N_VOCAB) for _ in range(40)]
    start, more = ids[:5], ids[5:9]
    _check_needs_a_text(context, start)
    _warm_up(context)
    _check_needs_a_text(context, start)
    if context.capabilities.abort:
        engine = engine_of(context)
        engine.abort()
        raises(DecodeAbortedError, lambda: context.encode(ids), "a text whose encoding is aborted")
        engine.clear_abort()
        _check_needs_a_text(context, start)
    for text in (ids[9:], ids[9:10], ids[12:30]):
        context.encode(text)
        equal(context.n_past(), 0, "tokens of the decoder after a text was encoded")
        for warms in (False, True):
            if warms:
                _warm_up(context)
            context.decode(start)
            expected = _logits(weights, text, [*start, *more])
            _near(context, -1, expected[4], f"a text of {len(text)} tokens, warmed: {warms}")
            for i, token in enumerate(more):
                context.decode_one(token)
                _near(context, -1, expected[5 + i], f"token {i} after a text of {len(text)}")
            held = raises(InvalidStateError, lambda t=text: context.encode(t), "a second text")
            equal(held.operation, "encode", "the operation of the refusal")
            context.clear()
            context.decode([*start, *more], logits="all")
            for i, row in enumerate(expected):
                _near(context, i, row, f"row {i} after a text of {len(text)}")
            context.clear()
    context.encode(text)
    context.decode(start)
    with contextlib.suppress(UnsupportedFeatureError):
        data = context.save_state()
        with model.new_context(**rig.fields()) as other:
            other.load_state(data)
            _warm_up(other)
            equal(other.n_past(), len(start), "tokens restored, after a warm-up")


def _check_needs_a_text(context: Any, tokens: list[int]) -> None:
    calls: dict[str, Callable[[], object]] = {
        "decode": lambda: context.decode(tokens),
        "decode_one": lambda: context.decode_one(tokens[0]),
        "eval": lambda: context.eval(tokens, 0),
        "decode_batch": lambda: context.decode_batch([(t, (0,), True) for t in tokens]),
        "decode_spans": lambda: context.decode_spans([(0, tokens, "last")]),
    }
    for name, call in calls.items():
        error = raises(InvalidStateError, call, f"{name} before a text was encoded")
        that(error.operation and error.state, f"{name}: no operation or state in {error!r}")
        equal(context.n_past(), 0, f"tokens held after {name} was refused")


def _warm_up(context: Any) -> None:
    with contextlib.suppress(UnsupportedFeatureError):
        context.warmup()


def _near(context: Any, row: int, expected: Any, what: str) -> None:
    gap = float(np.abs(np.asarray(context.logits(row), np.float64) - expected).max())
    allowed = max(_TOLERANCE, context.tolerance)
    that(gap <= allowed, f"{what}: logits {gap:.3g} off the oracle's")


# -- the file --------------------------------------------------------------------------------------


def _weights(random: np.random.Generator) -> dict[str, Any]:
    """Return matrices [n_out, n_in] and vectors by name, as the engine calls them."""
    found: dict[str, Any] = {}

    def add(name: str, *shape: int, spread: float = 0.2) -> None:
        found[f"{name}.weight"] = (spread * random.standard_normal(shape)).astype(np.float32)

    def add_norm(name: str) -> None:
        found[f"{name}.weight"] = random.uniform(0.5, 1.5, _N_EMBD).astype(np.float32)

    add("token_embd", _N_VOCAB, _N_EMBD)
    add("output", _N_VOCAB, _N_EMBD)
    for side, parts in _PARTS.items():
        add_norm(f"{side}.output_norm")
        for i in range(_N_LAYER):
            for part in parts:
                add_norm(f"{side}.blk.{i}.{part}_norm")
                for letter in "qkvo":
                    # Scores that are not scaled stay so small that rounding shows little.
                    spread = 0.05 if letter in "qk" else 0.2
                    add(f"{side}.blk.{i}.{part}_{letter}", _N_EMBD, _N_EMBD, spread=spread)
            add_norm(f"{side}.blk.{i}.ffn_norm")
            add(f"{side}.blk.{i}.ffn_up", _N_FF, _N_EMBD)
            add(f"{side}.blk.{i}.ffn_down", _N_EMBD, _N_FF)
        # A bias by distance, which is the same for all here.
        found[f"{side}.blk.0.attn_rel_b.weight"] = np.zeros((_N_BUCKETS, _N_HEAD), np.float32)
    return found


_PARTS: dict[str, Sequence[str]] = {"enc": ("attn",), "dec": ("attn", "cross_attn")}
_N_BUCKETS = 32


def _file(weights: dict[str, Any]) -> gguf_copy.Gguf:
    numbers = {
        "vocab_size": _N_VOCAB, "context_length": _N_CTX, "embedding_length": _N_EMBD,
        "block_count": _N_LAYER, "feed_forward_length": _N_FF, "attention.head_count": _N_HEAD,
        "attention.relative_buckets_count": _N_BUCKETS, "decoder_start_token_id": 0,
    }  # fmt: skip
    entries = {
        "general.architecture": gguf_copy.text("t5"),
        "tokenizer.ggml.model": gguf_copy.text("none"),
        "t5.attention.layer_norm_epsilon": number(FLOAT32, _EPSILON),
        "t5.attention.layer_norm_rms_epsilon": number(FLOAT32, _EPSILON),
        **{f"t5.{key}": number(UINT32, value) for key, value in numbers.items()},
    }
    tensors = [
        (Tensor(name, array.shape[::-1], 0, 0), array.tobytes()) for name, array in weights.items()
    ]
    return gguf_copy.Gguf((3).to_bytes(4, "little"), entries, tensors)


# -- the oracle ------------------------------------------------------------------------------------


def _logits(weights: dict[str, Any], text: Sequence[int], tokens: Sequence[int]) -> Any:
    """Return the logits of each of ``tokens`` after ``text``, [n_tokens, n_vocab], in float64.

    Source: C. Raffel et al., Exploring the limits of transfer learning with a unified text-to-text
    transformer (2020), section 2.1: no scale of scores, norms without bias before each part.
    """
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    encoded = _side(w, "enc", w["token_embd.weight"][list(text)], None)
    return _side(w, "dec", w["token_embd.weight"][list(tokens)], encoded) @ w["output.weight"].T


def _side(w: dict[str, Any], side: str, x: Any, encoded: Any) -> Any:
    causal = np.tril(np.ones((len(x), len(x)), bool)) if side == "dec" else None
    for i in range(_N_LAYER):
        at = f"{side}.blk.{i}"
        for part in _PARTS[side]:
            normed = _norm(x, w[f"{at}.{part}_norm.weight"])
            crosses = part == "cross_attn"
            read = encoded if crosses else normed
            x = x + _attention(w, f"{at}.{part}", normed, read, None if crosses else causal)
        normed = _norm(x, w[f"{at}.ffn_norm.weight"])
        up = np.maximum(normed @ w[f"{at}.ffn_up.weight"].T, 0.0)
        x = x + up @ w[f"{at}.ffn_down.weight"].T
    return _norm(x, w[f"{side}.output_norm.weight"])


def _attention(w: dict[str, Any], name: str, x: Any, read: Any, mask: Any) -> Any:
    q, k, v = (
        (rows @ w[f"{name}_{letter}.weight"].T).reshape(len(rows), _N_HEAD, -1)
        for letter, rows in (("q", x), ("k", read), ("v", read))
    )
    scores = np.einsum("ihd,jhd->hij", q, k)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    mixed = np.einsum("hij,jhd->ihd", shares, v).reshape(len(x), -1)
    return mixed @ w[f"{name}_o.weight"].T


def _norm(x: Any, scale: Any) -> Any:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + _EPSILON) * scale
