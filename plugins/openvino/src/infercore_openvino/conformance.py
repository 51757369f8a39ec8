"""The rigs that the conformance suite tries this backend with, on models of the pack.

The storyteller shows all that both forms of its graph can do; ``recurrent`` cannot take tokens
back.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np

import infercore
from infercore.conformance import Observation, Rig
from infercore.testing import engine_of
from infercore_openvino.files import MODEL_XML

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

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
    {"inference_precision": "f16", "precision": "accurate"},
    {"dynamic_quantization_group_size": 32, "precision": "accurate"},
)  # fmt: skip


def rig() -> Rig:
    """Return the rig. Raises `ModelNotFoundError` without the model pack."""
    rig = _rig(observe=observe, **_beside("gguf-f32"))
    rig.require = (*_REQUIRED, *_OF_BLOCKS)
    rig.wrong_options = _WRONG_OPTIONS
    rig.narrow = in_codes
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
    rig.narrow = in_half_precision
    rig.known = {"MEM-8": "engine: OpenVINO leaves a thread behind for each model it compiles"}
    return rig


def recurrent_rig() -> Rig:
    """Return the rig of a model whose state has no parts that could be removed."""
    rig = _rig("recurrent", variant="recurrent", observe=count_evaluated)
    rig.require = _RECURRENT
    rig.wrong_options = ({"form": "stateful"},)
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


# -- narrower weights ------------------------------------------------------------------------------


def in_half_precision(folder: str) -> Callable[[Floats], Floats]:
    """Write the storyteller into ``folder`` in half precision; return what weights are in it."""
    _write(_graph(), folder, in_half=True)
    return lambda weights: weights.astype(np.float16).astype(np.float32)


def in_codes(folder: str) -> Callable[[Floats], Floats]:
    """Write the storyteller into ``folder`` in 8 bits, as NNCF does: a scale and zero for each row.

    Returns what weights are in it; those that are no matrix stay as they are.
    """
    from openvino import opset13 as op  # noqa: PLC0415  (imports the engine)

    model = _graph()
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Constant" and node.get_friendly_name().endswith(".weight"):
            users = list(node.output(0).get_target_inputs())
            codes, zeros, scales = _coded(np.array(node.data))
            plain = op.subtract(*(op.convert(op.constant(n), "f32") for n in (codes, zeros)))
            for user in users:
                user.replace_source_output(op.multiply(plain, op.constant(scales)).output(0))
    _write(model, folder, in_half=False)
    return _decoded


def _coded(weights: Floats) -> tuple[Any, Any, Any]:
    """Return codes [rows, columns], zeros and scales [rows, 1] of weights."""
    low, high = (ends(weights, axis=1, keepdims=True) for ends in (np.min, np.max))
    scales = ((high - low) / np.float32(255)).astype(np.float32)
    zeros = np.rint(-low / scales).astype(np.uint8)
    codes = np.clip(np.rint(weights / scales) + zeros, 0, 255).astype(np.uint8)
    return codes, zeros, scales


def _decoded(weights: Floats) -> Floats:
    if weights.ndim == 1:
        return weights
    codes, zeros, scales = _coded(weights)
    plain: Floats = (codes.astype(np.float32) - zeros.astype(np.float32)) * scales
    return plain


def _graph() -> Any:
    from infercore_openvino.engine import shared_core  # noqa: PLC0415  (imports the engine)

    return shared_core().read_model(os.path.join(pack_path(MODEL), MODEL_XML))


def _write(model: Any, folder: str, *, in_half: bool) -> None:
    """Write ``model`` with what lies beside the storyteller's graph."""
    import openvino as ov  # noqa: PLC0415

    left = shutil.ignore_patterns("openvino_*")
    shutil.copytree(pack_path(MODEL), folder, ignore=left, dirs_exist_ok=True)
    ov.save_model(model, os.path.join(folder, MODEL_XML), compress_to_fp16=in_half)


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
