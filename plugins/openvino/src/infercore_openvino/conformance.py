"""The rigs that the conformance suite tries this backend with, on models of the pack.

The storyteller shows all that both forms of its graph can do; ``recurrent`` cannot take tokens
back.
"""

from __future__ import annotations

from typing import Any

import infercore
from infercore.conformance import Observation, Rig
from infercore.testing import engine_of

BACKEND = "openvino"
MODEL, FORMAT, ADAPTER = "storyteller", "openvino", "storyteller-lora"
TOLERANCE = 5e-3
"""Float32 weights and cache."""

_EXACT = {"precision": "accurate", "flash_attn": "off", "type_k": "f32", "type_v": "f32"}

# What the rigs must bring and declare: lost, it fails the run and is not refused in silence.
_REQUIRED = (
    "oracle", "observe", "encoder", "kv_remove_any", "state", "sequence_state", "logits_all",
    "embeddings", "chat_template", "plan_memory", "adapter", "lora",
    # options and calls that are honoured
    "n_batch", "n_ubatch", "n_threads", "rope_freq_base", "rope_freq_scale", "yarn", "precision",
    "attention_type", "pooling_type", "f16", "swa_full", "adapters", "decode_vectors",
    "set_control_vector", "warmup", "abort",
)  # fmt: skip
_RECURRENT = (
    "observe", "kv_copy", "multi_sequence", "state", "sequence_state", "logits_all", "embeddings",
    "plan_memory", "live_threads", "n_batch", "n_ubatch", "n_seq_max",
    "kv_unified", "n_threads", "precision", "pooling_type", "swa_full", "decode_vectors", "warmup",
    "abort",
)  # fmt: skip
_OF_BLOCKS = (
    "kv_copy_any", "kv_shift", "kv_divide", "multi_sequence", "n_seq_max", "kv_unified",
)  # fmt: skip


_WRONG_OPTIONS: tuple[dict[str, Any], ...] = (
    {"num_streams": 0}, {"num_streams": 65}, {"dynamic_quantization_group_size": 2**20 + 1},
    {"form": "blocks"}, {"inference_precision": "f64"}, {"enable_cpu_pinning": 1},
    {"cache_dir": ""}, {"cache_dir": "a\0b"}, {"cache_dir": 5},
)  # fmt: skip


def rig() -> Rig:
    """Return the rig. Raises `ModelNotFoundError` without the model pack."""
    rig = _rig(observe=observe, **_beside("gguf-f32"))
    rig.require = (*_REQUIRED, *_OF_BLOCKS)
    rig.wrong_options = _WRONG_OPTIONS
    return rig


def stateful_rig() -> Rig:
    """Return the rig of the form that is used where a graph cannot be made paged."""
    rig = _rig(
        variant="stateful",
        observe=count_evaluated,
        exact={**_EXACT, "backend_options": {"form": "stateful"}},
        **_beside("hf"),
    )
    rig.require = (*_REQUIRED, "set_causal_attention")
    rig.known = {"MEM-8": "engine: OpenVINO leaves a thread behind for each model it compiles"}
    return rig


def recurrent_rig() -> Rig:
    """Return the rig of a model whose state has no parts that could be removed."""
    rig = _rig("recurrent", variant="recurrent", observe=count_evaluated)
    rig.require = _RECURRENT
    return rig


def _beside(adapter_format: str) -> dict[str, Any]:
    """What goes with the storyteller: its oracle, an adapter, an encoder."""
    return {
        "model_name": MODEL,
        "adapter": pack_path(ADAPTER, adapter_format),
        "adapter_name": ADAPTER,
        "encoder": pack_path("encoder"),
        "encoder_name": "encoder",
    }


def _rig(name: str = MODEL, **fields: Any) -> Rig:
    path = pack_path(name)
    given: dict[str, Any] = {
        "backend": BACKEND,
        "engine": "openvino",
        "open_model": lambda: infercore.load_model(path, backend=BACKEND),
        "path": path,
        "open_path": lambda where: infercore.load_model(where, backend=BACKEND),
        "tolerance": TOLERANCE,
        "exact": _EXACT,
        "suite_version": "1.2",
    }
    return Rig(**{**given, **fields})


def pack_path(name: str, form: str = FORMAT) -> str:
    """Return where a model of the pack lies. Raises `ModelNotFoundError` without the pack."""
    try:
        import infercore_models  # noqa: PLC0415  (a distribution of its own)
    except ImportError as error:
        raise infercore.ModelNotFoundError(
            "the model pack (infercore-models) is not installed; it comes from the same place "
            "as infercore",
            path=name,
        ) from error
    return str(infercore_models.path(name, form))


def observe(context: Any, seq_id: int) -> Observation:
    """Return what the block tables hold, and how many tokens went into the infer request."""
    inner = engine_of(context)
    return Observation(
        resident=len(inner._tables.positions(seq_id)),  # noqa: SLF001
        evaluated=inner.n_evaluated,
    )


def count_evaluated(context: Any, seq_id: int) -> Observation:
    """Return how many tokens went into the infer request."""
    del seq_id
    return Observation(evaluated=engine_of(context).n_evaluated)
