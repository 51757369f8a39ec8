"""The rig that the conformance suite tries this backend with: the pack's storyteller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import infercore
from infercore.conformance import Observation, Rig
from infercore.testing import engine_of

if TYPE_CHECKING:
    from collections.abc import Callable

BACKEND = "openvino"
MODEL, FORMAT, ADAPTER = "storyteller", "openvino", "storyteller-lora"
TOLERANCE = 5e-3
"""Float32 weights and cache."""

# What the rigs must bring and declare: lost, it fails the run and is not refused in silence.
_REQUIRED = (
    "oracle", "observe", "encoder", "kv_remove_any", "state", "sequence_state", "logits_all",
    "embeddings", "chat_template", "plan_memory", "adapter", "lora",
    # options and calls that are honoured
    "n_batch", "n_ubatch", "n_threads", "rope_freq_base", "rope_freq_scale", "yarn", "precision",
    "attention_type", "pooling_type", "f16", "swa_full", "adapters", "decode_vectors",
    "set_control_vector", "warmup", "abort",
)  # fmt: skip
_OF_BLOCKS = (
    "kv_copy_any", "kv_shift", "kv_divide", "multi_sequence", "n_seq_max", "kv_unified",
)  # fmt: skip


def rig() -> Rig:
    """Return the rig. Raises `ModelNotFoundError` without the model pack."""
    rig = _rig(observe=observe, adapter_format="gguf-f32")
    rig.require = (*_REQUIRED, *_OF_BLOCKS)
    return rig


def stateful_rig() -> Rig:
    """Return the rig of the form that is used where a graph cannot be made paged."""
    rig = _rig(
        observe=observe_stateful,
        variant="stateful",
        adapter_format="hf",
        backend_options={"form": "stateful"},
    )
    rig.require = (*_REQUIRED, "set_causal_attention")
    rig.known = {"MEM-8": "engine: OpenVINO leaves a thread behind for each model it compiles"}
    return rig


def _rig(
    *,
    observe: Callable[[Any, int], Observation],
    variant: str = "",
    adapter_format: str,
    **fields: Any,
) -> Rig:
    path = pack_path(MODEL)
    return Rig(
        backend=BACKEND,
        variant=variant,
        engine="openvino",
        open_model=lambda: infercore.load_model(path, backend=BACKEND),
        path=path,
        open_path=lambda where: infercore.load_model(where, backend=BACKEND),
        model_name=MODEL,
        encoder=pack_path("encoder"),
        encoder_name="encoder",
        adapter=pack_path(ADAPTER, adapter_format),
        adapter_name=ADAPTER,
        tolerance=TOLERANCE,
        exact={
            "precision": "accurate",
            "flash_attn": "off",
            "type_k": "f32",
            "type_v": "f32",
            **fields,
        },
        suite_version="1.2",
        observe=observe,
        require=_REQUIRED,
    )


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


def observe_stateful(context: Any, seq_id: int) -> Observation:
    """Return how many tokens went into the infer request."""
    del seq_id
    return Observation(evaluated=engine_of(context).n_evaluated)
