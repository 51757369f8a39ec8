"""The rig that the conformance suite tries this backend with: the pack's storyteller."""

from __future__ import annotations

from typing import Any

import infercore
from infercore.conformance import Observation, Rig
from infercore.testing import engine_of

BACKEND = "openvino"
MODEL, FORMAT = "storyteller", "openvino"
TOLERANCE = 5e-3
"""Float32 weights and cache."""


def rig() -> Rig:
    """Return the rig. Raises `ModelNotFoundError` without the model pack."""
    path = model_path()
    return Rig(
        backend=BACKEND,
        open_model=lambda: infercore.load_model(path, backend=BACKEND),
        path=path,
        open_path=lambda where: infercore.load_model(where, backend=BACKEND),
        model_name=MODEL,
        tolerance=TOLERANCE,
        exact={"flash_attn": "off", "type_k": "f32", "type_v": "f32"},
        suite_version="1.0",
        observe=observe,
    )


def model_path() -> str:
    """Return the path of the pack's model. Raises `ModelNotFoundError` without the pack."""
    try:
        import infercore_models  # noqa: PLC0415  (a distribution of its own)
    except ImportError as error:
        raise infercore.ModelNotFoundError(
            "the model pack is not installed; run: pip install infercore-models", path=MODEL
        ) from error
    return str(infercore_models.path(MODEL, FORMAT))


def observe(context: Any, seq_id: int) -> Observation:
    """Return what the block tables hold, and how many tokens went into the infer request."""
    inner = engine_of(context)
    counts = inner.perf()
    return Observation(
        resident=len(inner._tables.positions(seq_id)),  # noqa: SLF001
        evaluated=counts.prefill_tokens + counts.decode_tokens,
    )
