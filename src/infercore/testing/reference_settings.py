"""From configs to what is in force: every field is honoured or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import attrs

from infercore.errors import InvalidInputError
from infercore.testing.kv_formats import KV_FORMATS
from infercore.values.config import refuse_unhonoured

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infercore.testing import bert
    from infercore.testing.llama import Shape
    from infercore.values.config import ContextConfig, ModelConfig

BACKEND = "reference"
POOLING = ("none", "mean", "cls", "last")
FLASH_ATTENTION = ("auto", "on", "off")
DEFAULT_N_BATCH = 512
DEFAULT_N_THREADS = 1

_MODEL_VALUES: dict[str, tuple[Any, ...]] = {
    "n_gpu_layers": (),
    "split_mode": (),
    "main_gpu": (),
    "tensor_split": (),
    "device": ("cpu",),
    "use_mmap": (False,),
    "use_mlock": (False,),
}
_CONTEXT_VALUES: dict[str, tuple[Any, ...]] = {
    "rope_scaling_type": ("none", "linear"),
    "yarn_ext_factor": (),
    "yarn_attn_factor": (),
    "yarn_beta_fast": (),
    "yarn_beta_slow": (),
    "yarn_orig_ctx": (),
    "pooling_type": POOLING,
    "type_k": (*KV_FORMATS,),
    "type_v": (*KV_FORMATS,),
    "offload_kqv": (),
    "op_offload": (),
    "swa_full": (True,),
    "precision": ("default", "accurate"),
}
_ENCODER_VALUES: dict[str, tuple[Any, ...]] = {
    **_CONTEXT_VALUES,
    "rope_scaling_type": (),
    "rope_freq_base": (),
    "rope_freq_scale": (),
    "attention_type": ("non-causal",),
    "flash_attn": ("auto", "off"),
    "type_k": ("f32",),
    "type_v": ("f32",),
    "embeddings": (True,),
}


def check_model(config: ModelConfig) -> None:
    """Raise `UnsupportedFeatureError` for what NumPy cannot do: GPUs, mapped or locked memory."""
    _check(config, _MODEL_VALUES)


def _check(config: ModelConfig | ContextConfig, values: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse other ``values`` of the fields that are named; the rest is honoured."""
    honoured = dict.fromkeys(attrs.fields_dict(type(config)))
    refuse_unhonoured(config, {**honoured, **values}, backend=BACKEND)


def resolve(config: ContextConfig, shape: Shape) -> dict[str, Any]:
    """Return the value in force of every field.

    Raises `UnsupportedFeatureError` for what cannot be, `InvalidInputError` for what does not fit.
    """
    _check(config, _CONTEXT_VALUES)
    pooling = config.pooling_type or "none"
    return {
        **_common(config),
        **_sizes(config),
        **_rope(config, shape),
        **_kv_types(config, shape),
        "pooling_type": pooling,
        "attention_type": config.attention_type or "causal",
        "embeddings": pooling != "none" if config.embeddings is None else config.embeddings,
    }


def resolve_encoder(config: ContextConfig, shape: bert.Shape, pooling: str) -> dict[str, Any]:
    """Return the value in force of every field, for an encoder with that pooling of its own.

    Raises as `resolve`; the window cannot exceed the positions that were learned.
    """
    _check(config, _ENCODER_VALUES)
    if _window(config) > shape.n_ctx_train:
        raise InvalidInputError(
            f"n_ctx={config.n_ctx} is beyond the {shape.n_ctx_train} positions that this encoder "
            f"has learned; give n_ctx={shape.n_ctx_train} or less",
            field="n_ctx",
            value=config.n_ctx,
            allowed=f"at most {shape.n_ctx_train}",
        )
    return {
        **_common(config),
        **_sizes(config),
        "pooling_type": config.pooling_type or pooling,
        "attention_type": "non-causal",
        "flash_attn": "off",
        "type_k": "f32",
        "type_v": "f32",
        "embeddings": True,
    }


def _common(config: ContextConfig) -> dict[str, Any]:
    """What is the same for all models."""
    n_threads = config.n_threads or DEFAULT_N_THREADS
    return {
        "n_ctx": config.n_ctx,
        "n_seq_max": config.n_seq_max or 1,
        "n_threads": n_threads,
        "n_threads_batch": config.n_threads_batch or n_threads,
        "swa_full": config.swa_full,
        "kv_unified": config.kv_unified is True,
        "no_perf": config.no_perf is True,
        "precision": "accurate",  # everything is computed in float32, whatever is asked
        "activations": "f32",
        "adapters": config.adapters,
    }


def _kv_types(config: ContextConfig, shape: Shape) -> dict[str, str]:
    """Number formats of the cache, and flash attention, which a quantised V needs."""
    type_k, type_v = config.type_k or "f32", config.type_v or "f32"
    for field, kind in (("type_k", type_k), ("type_v", type_v)):
        block = KV_FORMATS[kind].block
        if shape.head_dim % block:
            raise InvalidInputError(
                f"{field}={kind!r} stores blocks of {block}, which do not divide the model's head "
                f"size of {shape.head_dim}",
                field=field,
                value=kind,
                allowed=[name for name, known in KV_FORMATS.items() if known.block == 1],
            )
    on = config.flash_attn == "on" or KV_FORMATS[type_v].block != 1
    return {"flash_attn": "on" if on else "off", "type_k": type_k, "type_v": type_v}


def _window(config: ContextConfig) -> int:
    """The window asked for, which is a number by the time that it comes here."""
    n_ctx: Any = config.n_ctx
    return cast("int", n_ctx)


def _sizes(config: ContextConfig) -> dict[str, int]:
    n_batch = config.n_batch or config.n_ubatch or min(DEFAULT_N_BATCH, _window(config))
    return {"n_batch": n_batch, "n_ubatch": min(config.n_ubatch or n_batch, n_batch)}


def _rope(config: ContextConfig, shape: Shape) -> dict[str, Any]:
    """Base and scale; 0 is the model's own, as in llama.cpp."""
    scale = config.rope_freq_scale or 1.0
    if config.rope_scaling_type == "none" and scale != 1.0:
        raise InvalidInputError(
            f"rope_freq_scale={scale} needs rope_scaling_type='linear'",
            field="rope_freq_scale",
            value=scale,
            allowed=1.0,
        )
    return {
        "rope_scaling_type": config.rope_scaling_type,
        "rope_freq_base": config.rope_freq_base or shape.rope_theta,
        "rope_freq_scale": scale,
    }
