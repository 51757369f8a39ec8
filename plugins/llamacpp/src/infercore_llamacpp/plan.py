"""How much memory a context takes: asked of the engine itself, which can pretend to allocate.

The sizes are those that it logs, rounded by it to a hundredth of a MiB.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from infercore import (
    ContextConfig,
    MemoryPlan,
    ModelConfig,
    ModelNotFoundError,
    OutOfMemoryError,
)
from infercore_llamacpp import layout, loading, log, settings
from infercore_llamacpp.library import api
from infercore_llamacpp.traits import KV_TYPES, read_traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore import AdapterSpec
    from infercore_llamacpp.traits import Traits

_MIB = 2**20
_CELLS_TRIED = 1 << 18  # of a window; up to twice as many are laid out by the engine
_CELLS_OF_STREAM = 256  # the engine pads to at least this
_CACHE = re.compile(r"^(llama_kv_cache|llama_memory_recurrent)\w*: size = +([\d.]+) MiB")
_CELLS = re.compile(r"^llama_kv_cache\w*: size = .*\( *(\d+) cells, .*?(\d+)/\d+ seqs\)")
_CELL_BYTES = 40  # what the engine writes down of each cell: position, sequences
_COMPUTE = re.compile(r"(?:compute|output) buffer size = +([\d.]+) MiB")
_SLIDING, _FULL = "creating     SWA KV cache", "creating non-SWA KV cache"


def plan_memory(
    path: str, model_config: ModelConfig | None, config: ContextConfig | None
) -> MemoryPlan:
    """Return the bytes that the model at ``path`` and a context on it will take.

    Raises what opening that context raises for a field that cannot be honoured.
    """
    loaded = loading.load(str(path), model_config or ModelConfig(), allocate=False)
    try:
        overrides = {} if model_config is None else model_config.backend_options.get("kv_overrides")
        traits = read_traits(loaded.handle, has_gpu=loaded.has_gpu, overrides=overrides or {})
        chosen = settings.resolve(config or ContextConfig(), traits)
        # The file's pages stay beside the copies.
        n_weight_bytes = traits.info.size_bytes + loaded.n_copied
        return _plan(loaded.handle, chosen, traits, n_weight_bytes)
    finally:
        api.llama_model_free(loaded.handle)
        log.raise_kept()


def _plan(model: int, chosen: dict[str, Any], traits: Traits, n_weight_bytes: int) -> MemoryPlan:
    """Return the plan of a window; of a huge one by what two smaller ones differ in.

    The engine writes a table of all cells even when it only lays them out, which for 2**31 of them
    takes more memory than most machines have.
    """
    n_ctx: int = chosen["n_ctx"]
    if n_ctx <= 2 * _CELLS_TRIED:
        return _laid_out(model, chosen, traits, n_weight_bytes)
    small, large = (
        _laid_out(model, {**chosen, "n_ctx": n}, traits, n_weight_bytes)
        for n in (_CELLS_TRIED, 2 * _CELLS_TRIED)
    )
    n_steps = -(-(n_ctx - _CELLS_TRIED) // _CELLS_OF_STREAM) * _CELLS_OF_STREAM / _CELLS_TRIED

    def extended(first: int, second: int) -> int:
        return first + math.ceil((second - first) * n_steps)

    kinds = {
        kind: extended(n_bytes, large.kv_bytes_by_kind[kind])
        for kind, n_bytes in small.kv_bytes_by_kind.items()
    }
    kv_bytes = sum(kinds.values())
    compute_bytes = extended(small.compute_bytes, large.compute_bytes)
    return MemoryPlan(
        weights_bytes=small.weights_bytes,
        kv_bytes=kv_bytes,
        compute_bytes=compute_bytes,
        peak_bytes=small.weights_bytes + kv_bytes + compute_bytes,
        n_ctx=n_ctx,
        kv_bytes_by_kind=kinds,
    )


def _laid_out(
    model: int, chosen: dict[str, Any], traits: Traits, n_weight_bytes: int
) -> MemoryPlan:
    with log.listening() as lines:
        n_adapter_bytes = sum(map(_adapter_bytes, chosen["adapters"]))
        context = api.llama_init_from_model(model, settings.to_params(chosen, traits))
        if not context:
            raise log.explain(
                OutOfMemoryError(f"llama.cpp cannot lay out a context of n_ctx={chosen['n_ctx']}")
            )
        api.llama_free(context)
        settings.flash_in_force(chosen["flash_attn"], lines)
    kinds = _cache_bytes(lines)
    kv_bytes = sum(kinds.values())
    compute_bytes = sum(_bytes(found[1]) for line in lines if (found := _COMPUTE.search(line)))
    cells = (found for line in lines if (found := _CELLS.search(line)))
    compute_bytes += _CELL_BYTES * sum(int(found[1]) * int(found[2]) for found in cells)
    weights_bytes = n_weight_bytes + n_adapter_bytes
    return MemoryPlan(
        weights_bytes=weights_bytes,
        kv_bytes=kv_bytes,
        compute_bytes=compute_bytes,
        peak_bytes=weights_bytes + kv_bytes + compute_bytes,
        n_ctx=chosen["n_ctx"],
        kv_bytes_by_kind=kinds,
    )


def _adapter_bytes(adapter: AdapterSpec) -> int:
    """Return the size of an adapter's file, which is read whole."""
    try:
        return os.path.getsize(adapter.path)
    except OSError as error:
        path = adapter.path
        raise ModelNotFoundError(f"there is no adapter at {path}", path=path) from error


def _bytes(mib: str) -> int:
    return round(float(mib) * _MIB)


def _cache_bytes(lines: Sequence[str]) -> dict[str, int]:
    kinds: Counter[str] = Counter()
    kind = "full"
    for line in lines:
        if _SLIDING in line or _FULL in line:
            kind = "sliding" if _SLIDING in line else "full"
        if found := _CACHE.match(line):
            name = "recurrent" if found[1] == "llama_memory_recurrent" else kind
            kinds[name] += _bytes(found[2])
    return kinds


# -- before allocating -------------------------------------------------------------------------


def most_kv_bytes(chosen: dict[str, Any], traits: Traits) -> int:
    """Return the size of the cache if every layer kept the whole window; costs nothing to know."""
    k = layout.row_bytes(KV_TYPES[chosen["type_k"]], traits.head_k)
    v = layout.row_bytes(KV_TYPES[chosen["type_v"]], traits.head_v)
    n_streams = 1 if chosen["kv_unified"] else chosen["n_seq_max"]
    n_cells = max(chosen["n_ctx"], _CELLS_OF_STREAM * n_streams)
    n_rows = int(n_cells) * traits.info.n_layer * max(1, traits.info.n_head_kv)
    return n_rows * int(k + v)
