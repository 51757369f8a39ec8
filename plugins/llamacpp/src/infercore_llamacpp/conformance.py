"""The rig that the conformance suite tries this backend with: the pack's storyteller."""

from __future__ import annotations

from typing import Any

import infercore
from infercore.conformance import Observation, Rig
from infercore.testing import engine_of

BACKEND = "llamacpp"
MODEL, FORMAT = "storyteller", "gguf-f32"
TOLERANCE = 5e-3
"""Float32 weights and cache, without flash attention."""

_EXACT = {
    "flash_attn": "off",
    "type_k": "f32",
    "type_v": "f32",
    "n_threads": 1,  # the engine's threads wait in a loop: more are slower on a busy machine
    "n_threads_batch": 1,
}


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
        exact=_EXACT,
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
    """Return what llama.cpp itself says: the positions held, the tokens it has evaluated."""
    from infercore_llamacpp.library import api  # noqa: PLC0415  (imports the engine)

    inner = engine_of(context)
    api.llama_synchronize(inner.handle)
    first = api.llama_memory_seq_pos_min(inner.memory.handle, seq_id)
    last = api.llama_memory_seq_pos_max(inner.memory.handle, seq_id)
    counts = api.llama_perf_context(inner.handle)
    return Observation(
        resident=last - first + 1 if last >= 0 else 0,
        evaluated=counts.n_p_eval + counts.n_eval,
    )
