"""How many bytes a model and a context take, from the files alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infercore import MemoryPlan
from infercore_openvino.facts import KvShape, trained_window
from infercore_openvino.settings import DEFAULT_N_UBATCH

if TYPE_CHECKING:
    from infercore import ContextConfig
    from infercore_openvino.files import ModelFiles

_BLOCK_SIZE = 32
_TYPE_BYTES = {"f32": 4}
_DEFAULT_TYPE_BYTES = 2
_DEFAULT_N_CTX = 4096
_FLOAT_BYTES = 4
_LIVE_ACTIVATIONS = 6  # arrays [n_ubatch, width] that exist at the same time, roughly


def plan(files: ModelFiles, config: ContextConfig) -> MemoryPlan:
    """Return the plan for a context of ``config``; activations are an estimate."""
    shape = KvShape.of(files.config)
    trained = trained_window(files)
    n_ctx = config.n_ctx or (trained if config.n_ctx == 0 else min(trained, _DEFAULT_N_CTX))
    n_cells = (-(-n_ctx // _BLOCK_SIZE) + (config.n_seq_max or 1) + 1) * _BLOCK_SIZE
    asked = config.type_k or config.type_v or ""
    kv = n_cells * shape.numbers_per_token * _TYPE_BYTES.get(asked, _DEFAULT_TYPE_BYTES)
    kv = kv if files.has_cache else 0
    weights = files.weights_bytes
    # a prompt's steps repack the keys and values that they read, in each layer, and keep that room
    compute = _compute_bytes(files.config, config.n_ubatch or DEFAULT_N_UBATCH) + kv
    return MemoryPlan(
        weights_bytes=weights,
        kv_bytes=kv,
        compute_bytes=compute,
        # while compiling, the engine holds the file's pages beside its own copy
        peak_bytes=max(2 * weights, weights + kv + compute),
        n_ctx=n_ctx,
        kv_bytes_by_kind={"full": kv},
    )


def _compute_bytes(model: dict[str, Any], n_ubatch: int) -> int:
    width = max(int(model.get("intermediate_size") or 0), int(model.get("hidden_size") or 0))
    return (n_ubatch * width * _LIVE_ACTIVATIONS + int(model.get("vocab_size") or 0)) * _FLOAT_BYTES
