"""From configs to what is in force: every field is honoured or refused."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from infercore.errors import InvalidInputError, UnsupportedFeatureError

if TYPE_CHECKING:
    from infercore.testing.llama import Shape
    from infercore.values.config import ContextConfig, ModelConfig

BACKEND = "reference"
KV_DTYPES = {"f32": "float32", "f16": "float16"}
POOLING = ("none", "mean", "cls", "last")
TOLERANCES = {"f32": 1e-4, "f16": 5e-2}
DEFAULT_N_BATCH = 512

_MODEL_VALUES: dict[str, tuple[Any, ...]] = {
    "n_gpu_layers": (0,),
    "split_mode": (),
    "main_gpu": (),
    "tensor_split": (),
    "device": ("cpu",),
    "use_mmap": (False,),
    "use_mlock": (False,),
}
_CONTEXT_VALUES: dict[str, tuple[Any, ...]] = {
    "n_threads": (),
    "n_threads_batch": (),
    "rope_scaling_type": ("none", "linear"),
    "yarn_ext_factor": (),
    "yarn_attn_factor": (),
    "yarn_beta_fast": (),
    "yarn_beta_slow": (),
    "yarn_orig_ctx": (),
    "pooling_type": POOLING,
    "flash_attn": ("auto", "off"),
    "type_k": tuple(KV_DTYPES),
    "type_v": tuple(KV_DTYPES),
    "offload_kqv": (False,),
    "op_offload": (False,),
    "swa_full": (True,),
}


def check_model(config: ModelConfig) -> None:
    """Raise `UnsupportedFeatureError` for what NumPy cannot do: GPUs, mapped or locked memory."""
    _check(config, _MODEL_VALUES)


def _check(config: Any, values: dict[str, tuple[Any, ...]]) -> None:
    for name, possible in values.items():
        value = getattr(config, name)
        if value is not None and value not in possible:
            hint = f"it takes {', '.join(map(repr, possible))}" if possible else "leave it out"
            raise UnsupportedFeatureError(feature=f"{name}={value!r}", backend=BACKEND, hint=hint)


def resolve(config: ContextConfig, shape: Shape) -> dict[str, Any]:
    """Return the value in force of every field. Raises `UnsupportedFeatureError`."""
    _check(config, _CONTEXT_VALUES)
    pooling = config.pooling_type or "none"
    embeddings = pooling != "none" if config.embeddings is None else config.embeddings
    n_threads = os.cpu_count() or 1
    return {
        "n_ctx": config.n_ctx,
        **_sizes(config, one_step=pooling != "none" or config.attention_type == "non-causal"),
        "n_seq_max": config.n_seq_max or 1,
        "n_threads": n_threads,
        "n_threads_batch": n_threads,
        **_rope(config, shape),
        "pooling_type": pooling,
        "attention_type": config.attention_type or "causal",
        "flash_attn": "off",
        "type_k": config.type_k or "f32",
        "type_v": config.type_v or "f32",
        "embeddings": embeddings,
        "offload_kqv": False,
        "op_offload": False,
        "swa_full": True,
        "kv_unified": config.kv_unified is True,
        "no_perf": config.no_perf is True,
        "adapters": (),
    }


def _sizes(config: ContextConfig, *, one_step: bool) -> dict[str, int]:
    """Batch sizes; ``one_step`` where a call is computed at once or not at all."""
    n_ctx = config.n_ctx or DEFAULT_N_BATCH
    n_batch = config.n_batch or max(min(DEFAULT_N_BATCH, n_ctx), config.n_ubatch or 0)
    if one_step and config.n_batch is None and config.n_ubatch is None:
        n_batch = n_ctx
    return {"n_batch": n_batch, "n_ubatch": min(config.n_ubatch or n_batch, n_batch)}


def _rope(config: ContextConfig, shape: Shape) -> dict[str, Any]:
    """Base and scale; 0 is the model's own, as in llama.cpp."""
    kind = config.rope_scaling_type or ("linear" if config.rope_freq_scale else "none")
    scale = config.rope_freq_scale or 1.0
    if kind == "none" and scale != 1.0:
        raise InvalidInputError(
            f"rope_freq_scale={scale} needs rope_scaling_type='linear'",
            field="rope_freq_scale",
            value=scale,
            allowed=1.0,
        )
    return {
        "rope_scaling_type": kind,
        "rope_freq_base": config.rope_freq_base or shape.rope_theta,
        "rope_freq_scale": scale,
    }
