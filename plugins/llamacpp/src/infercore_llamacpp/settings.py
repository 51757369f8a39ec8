"""From a `ContextConfig` to the engine's parameters: every field is honoured or refused.

A NULL context does not say whether its parameters were wrong or memory was short, so all rules
stand here, before the engine is asked.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from infercore import InvalidInputError, UnsupportedFeatureError
from infercore_llamacpp import rope
from infercore_llamacpp.library import api
from infercore_llamacpp.threads import default_threads
from infercore_llamacpp.traits import (
    KV_BLOCK,
    KV_TYPES,
    PLAIN_KV_TYPES,
    POOLING,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore import ContextConfig
    from infercore_llamacpp.traits import Traits

BACKEND = "llamacpp"
DEFAULT_N_CTX, DEFAULT_N_BATCH, DEFAULT_N_UBATCH = 4096, 2048, 512
FLASH = {
    "auto": api.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": api.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": api.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}


_FLASH_LINE = re.compile(r"flash attention (?:was auto, set to )?(enabled|disabled)", re.IGNORECASE)
_FLASH_REFUSED = re.compile(r"flash_attn.*(forcing off|not compatible)")


def refuse(feature: str, hint: str) -> UnsupportedFeatureError:
    """Return the error for what llama.cpp, or this model, cannot do."""
    return UnsupportedFeatureError(feature=feature, backend=BACKEND, hint=hint)


def resolve(config: ContextConfig, traits: Traits) -> dict[str, Any]:
    """Return a value for every field of ``config``, the unset ones chosen here.

    Raises `InvalidInputError` for values that contradict each other or the model, and
    `UnsupportedFeatureError` for what llama.cpp lacks.
    """
    chosen: dict[str, Any] = {}
    chosen.update(_attention(config, traits))
    chosen.update(_outputs(config, traits))
    chosen.update(_sizes(config, traits, chosen))
    chosen.update(_kv_types(config, traits))
    chosen.update(_offload(config, traits))
    chosen.update(rope.resolve(config, traits))
    chosen.update(_precision(config, traits))
    chosen["swa_full"] = config.swa_full is not False
    chosen["no_perf"] = config.no_perf is True
    chosen["adapters"] = config.adapters
    return chosen


def to_params(chosen: dict[str, Any], traits: Traits) -> Any:
    """Return ``chosen`` as the engine's parameter struct."""
    params = api.llama_context_default_params()
    for field in (
        "n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch",
        "embeddings", "offload_kqv", "op_offload", "swa_full", "kv_unified", "no_perf",
    ):  # fmt: skip
        setattr(params, field, chosen[field])
    # The engine's own bound is n_batch, and fewer rows than sequences are an assertion.
    params.n_outputs_max = max(chosen["n_batch"], chosen["n_seq_max"])
    rope.fill(params, chosen)
    params.type_k, params.type_v = KV_TYPES[chosen["type_k"]], KV_TYPES[chosen["type_v"]]
    params.flash_attn_type = FLASH[chosen["flash_attn"]]
    if chosen["pooling_type"] != traits.pooling:  # naming the model's own draws a warning
        params.pooling_type = POOLING.index(chosen["pooling_type"])
    params.attention_type = int(chosen["attention_type"] == "non-causal")
    return params


def _precision(config: ContextConfig, traits: Traits) -> dict[str, Any]:
    """The engine has one arithmetic for each type of weights: it is its highest and its lowest."""
    if config.precision == "fast":
        hint = f"llama.cpp always computes with activations in {traits.activations} here"
        raise refuse("precision='fast'", f"{hint}; leave it out")
    return {"precision": "accurate", "activations": traits.activations}


def _attention(config: ContextConfig, traits: Traits) -> dict[str, Any]:
    own = "causal" if traits.is_causal else "non-causal"
    return {"attention_type": config.attention_type or own}


def _outputs(config: ContextConfig, traits: Traits) -> dict[str, Any]:
    """Pooling and embeddings; a model without memory has no other output than embeddings."""
    pooling = config.pooling_type or traits.pooling
    if pooling not in traits.poolings:
        raise refuse(f"pooling_type={pooling!r}", "the model has no head that ranks")
    embeddings = config.embeddings
    if embeddings is None:
        embeddings = not traits.has_memory or config.pooling_type not in (None, "none")
    elif not embeddings and not traits.has_memory:
        raise refuse("embeddings=False", "this model only makes embeddings")
    return {"pooling_type": pooling, "embeddings": embeddings}


def _sizes(config: ContextConfig, traits: Traits, chosen: dict[str, Any]) -> dict[str, Any]:
    n_ctx = _n_ctx(config, traits)
    _check_positions(n_ctx, traits)
    n_batch = config.n_batch or max(DEFAULT_N_BATCH, config.n_ubatch or 0)
    in_one_step = chosen["attention_type"] == "non-causal" or chosen["pooling_type"] != "none"
    n_ubatch = config.n_ubatch or (n_batch if in_one_step else DEFAULT_N_UBATCH)
    n_seq_max = config.n_seq_max or 1
    n_ubatch = _even(min(n_ubatch, n_batch, n_ctx), n_seq_max, config, chosen)
    n_threads, n_threads_batch = default_threads()
    return {
        "n_ctx": n_ctx,
        "n_batch": min(n_batch, n_ctx),
        "n_ubatch": n_ubatch,
        "n_seq_max": n_seq_max,
        # One pool lets a part be copied and one long sequence use the room of the others.
        "kv_unified": n_seq_max > 1 if config.kv_unified is None else config.kv_unified,
        "n_threads": config.n_threads or n_threads,
        "n_threads_batch": config.n_threads_batch or config.n_threads or n_threads_batch,
    }


def _n_ctx(config: ContextConfig, traits: Traits) -> int:
    """Return the window, as the core resolves it."""
    trained = traits.info.n_ctx_train
    return min(DEFAULT_N_CTX, trained) if config.n_ctx is None else config.n_ctx or trained


def _even(n_ubatch: int, n_seq_max: int, config: ContextConfig, chosen: dict[str, Any]) -> int:
    """Return a compute step that the sequences divide, as the engine needs for a mean of each."""
    rest = n_ubatch % n_seq_max
    if chosen["pooling_type"] != "mean" or not rest:
        return n_ubatch
    if config.n_ubatch == n_ubatch or n_ubatch < n_seq_max:
        raise InvalidInputError(
            f"n_ubatch={n_ubatch} is not a multiple of n_seq_max={n_seq_max}, which mean pooling "
            f"needs; give {n_ubatch - rest or n_seq_max}",
            field="n_ubatch",
            value=n_ubatch,
            allowed=f"a multiple of {n_seq_max}",
        )
    return n_ubatch - rest


def _check_positions(n_ctx: int, traits: Traits) -> None:
    trained = traits.info.n_ctx_train
    if traits.has_learned_positions and n_ctx > trained:
        raise InvalidInputError(
            f"n_ctx={n_ctx} is beyond the {trained} positions that this model has learned; "
            f"give n_ctx={trained} or less",
            field="n_ctx",
            value=n_ctx,
            allowed=f"at most {trained}",
        )


def _kv_types(config: ContextConfig, traits: Traits) -> dict[str, Any]:
    usual = "f16" if traits.has_kv else "f32"
    types = {"type_k": config.type_k or usual, "type_v": config.type_v or usual}
    offered = KV_TYPES if traits.has_kv else ("f32",)
    for field, name in types.items():
        if name not in offered:
            raise refuse(f"{field}={name!r}", f"this model can have {', '.join(offered)}")
    flash = _flash(config.flash_attn, types["type_v"], traits)
    _check_block("type_k", types["type_k"], traits.head_k)
    _check_block("type_v", types["type_v"], traits.head_v)
    if traits.shares_kv_types and types["type_k"] != types["type_v"]:
        raise InvalidInputError(
            f"this model keeps K and V as one, so type_v={types['type_v']!r} must be "
            f"type_k={types['type_k']!r}",
            field="type_v",
            value=types["type_v"],
            allowed=types["type_k"],
        )
    return {**types, "flash_attn": flash}


def _flash(asked: str | None, type_v: str, traits: Traits) -> str:
    """A quantised V needs flash attention. Else it is off on a CPU: it slows short appends."""
    if not traits.has_attention:
        if asked == "on":
            raise refuse("flash_attn='on'", "this model has no attention")
        return "off"
    if asked == "off" or (asked is None and type_v in PLAIN_KV_TYPES and not traits.has_gpu):
        return "off"
    return "on" if type_v not in PLAIN_KV_TYPES else asked or "auto"


def _check_block(field: str, name: str, head: int) -> None:
    if name not in PLAIN_KV_TYPES and head % KV_BLOCK:
        raise InvalidInputError(
            f"{field}={name!r} stores blocks of {KV_BLOCK}, which do not divide the model's head "
            f"size of {head}; give one of {', '.join(PLAIN_KV_TYPES)}",
            field=field,
            value=name,
            allowed=PLAIN_KV_TYPES,
        )


def _offload(config: ContextConfig, traits: Traits) -> dict[str, Any]:
    """Without a GPU there is nothing to put there: True, llama.cpp's default, asks for no more."""
    chosen = {}
    for field in ("offload_kqv", "op_offload"):
        asked = getattr(config, field)
        chosen[field] = traits.has_gpu and asked is not False
    return chosen


def flash_in_force(asked: str, lines: Sequence[str]) -> str:
    """Return what the engine made of ``asked``, by its log ``lines`` alone.

    Raises `UnsupportedFeatureError` for "on" where the model cannot have it.
    """
    if any(_FLASH_REFUSED.search(line) for line in lines):
        if asked == "on":
            raise refuse("flash_attn='on'", "llama.cpp turned it off for this model")
        return "off"
    if asked != "auto":
        return asked
    found = [match[1].lower() for line in lines if (match := _FLASH_LINE.search(line))]
    return {"enabled": "on", "disabled": "off"}[found[-1]] if found else "auto"
