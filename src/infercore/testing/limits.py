"""A model made less capable, as others are: for tests of refusals and of what replaces them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from infercore.values.config import ContextConfig
    from infercore.values.info import Capabilities

_METHODS = {
    "kv_shift": ("seq_shift",),
    "kv_divide": ("seq_divide",),
    "multi_sequence": ("decode_batch", "decode_spans"),
    "state": ("save_state", "load_state"),
    "sequence_state": ("save_sequence", "load_sequence"),
    "embeddings": ("embedding", "embeddings", "set_embeddings"),
    "encoder": ("encode",),
    "abort": ("abort", "clear_abort", "set_abort_callback"),
    "live_threads": ("set_threads",),
    "lora": ("set_adapters",),
}


class LimitedModel:
    """An `EngineModel` whose contexts can do only what ``capabilities`` says."""

    def __init__(self, inner: Any, capabilities: Capabilities) -> None:
        self._inner = inner
        self.capabilities = capabilities

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def new_context(self, config: ContextConfig) -> LimitedContext:
        """Return a context that lacks the methods of what is not declared."""
        return LimitedContext(self._inner.new_context(config), self.capabilities)


class LimitedContext:
    """An `EngineContext` without the methods of undeclared capabilities."""

    def __init__(self, inner: Any, capabilities: Capabilities) -> None:
        self._inner = inner
        self.capabilities = capabilities
        self._hidden = {
            method
            for capability, methods in _METHODS.items()
            if not getattr(capabilities, capability)
            for method in methods
        }
        if capabilities.kv_copy == "none":
            self._hidden.add("seq_copy")

    def __getattr__(self, name: str) -> Any:
        if name in self._hidden:
            raise AttributeError(f"{name} is not declared")
        return getattr(self._inner, name)

    def logits(self, i: int) -> Any:
        """Return output row ``i``; where only the likeliest are told, with -inf for all others."""
        row = self._inner.logits(i)
        if self.capabilities.logits != "top":
            return row
        likeliest = np.argsort(row, kind="stable")[-self.capabilities.n_top :]
        exact = row.astype(np.float64)
        total = exact.max() + np.log(np.exp(exact - exact.max()).sum())
        told = np.full_like(row, -np.inf)
        told[likeliest] = exact[likeliest] - total
        return told

    def seq_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        """Remove positions [p0, p1), or return False where the declared kind does not cover it."""
        return self._can_remove(seq_id, p0, p1) and bool(self._inner.seq_remove(seq_id, p0, p1))

    def _can_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        kind, end = self.capabilities.kv_remove, self._inner.n_past(seq_id)
        to_end = p1 == -1 or p1 >= end
        if kind == "any" or (p0 == 0 and to_end):
            return True
        if not to_end or kind == "none":
            return False
        return bool(kind == "suffix" or end - p0 <= self.capabilities.max_rollback)
