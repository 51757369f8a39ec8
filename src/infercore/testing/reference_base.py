"""What the reference's contexts share: threads, adapters, hidden states, and being stopped."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.errors import DecodeAbortedError
from infercore.testing.products import Products, Workers, adapter_target
from infercore.testing.reference_settings import POOLING
from infercore.weight_files import lora

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infercore.protocols.spi import FloatArray
    from infercore.testing.products import Matrix
    from infercore.values.config import AdapterSpec
    from infercore.weight_files.lora import Pair

SHARED: Mapping[str, Any] = {
    "multi_sequence": True,
    "embeddings": True,
    "pooling": POOLING,
    "abort": True,
    "live_threads": True,
}
"""What contexts of every kind of model can do."""


class Base:
    """Options in force, and what does not depend on the kind of model.

    ``workers`` are the threads for single tokens and for batches. The hidden states are there
    after the first call: the core asks for none before.
    """

    _hidden: FloatArray
    _hidden_ids: Sequence[tuple[int, ...]]

    def __init__(self, matrices: Mapping[str, Matrix], effective: dict[str, Any]) -> None:
        self._matrices = matrices
        self._effective = effective
        self.effective: Mapping[str, Any] = MappingProxyType(effective)
        self.n_batch: int = effective["n_batch"]
        self.n_ubatch: int = effective["n_ubatch"]
        self._aborted = False  # no Event: its lock would hold up a signal handler that aborts
        self._ask: Callable[[], bool] | None = None
        self._adapters: Sequence[Mapping[str, Pair]] = ()
        self.set_adapters(effective["adapters"])
        self.set_threads(effective["n_threads"], effective["n_threads_batch"])

    # -- live controls -------------------------------------------------------------------------

    def set_threads(self, n: int, n_batch: int) -> None:
        """Let ``n`` threads compute single tokens and ``n_batch`` all else.

        Threads that were there before end with their last reference, which is here.
        """
        self.workers = Workers(n), Workers(n_batch)
        self._effective.update(n_threads=n, n_threads_batch=n_batch)

    def set_adapters(self, adapters: Sequence[AdapterSpec]) -> None:
        """Replace the whole list; unchanged where one of them cannot be read."""
        target = adapter_target(self._matrices)
        self._adapters = [lora.read(adapter, target) for adapter in adapters]
        self._effective["adapters"] = (*adapters,)

    def _product(self, n_tokens: int) -> Products:
        """Return what a step of ``n_tokens`` multiplies with."""
        return Products(self.workers[n_tokens > 1], self._adapters)

    def abort(self) -> None:
        """Stop the call that runs, before its next layer; from any thread."""
        self._aborted = True

    def clear_abort(self) -> None:
        """Let later calls run."""
        self._aborted = False

    def set_abort_callback(self, callback: Callable[[], bool] | None) -> None:
        """Ask ``callback`` before each layer."""
        self._ask = callback

    def _check_abort(self, n_resident: int) -> None:
        if self._aborted or (self._ask is not None and self._ask()):
            raise DecodeAbortedError(
                f"aborted with {n_resident} tokens resident", resident_tokens=n_resident
            )

    # -- hidden states -------------------------------------------------------------------------

    def embeddings(self) -> FloatArray:
        """Return the hidden state of each token of the last call, [n_tokens, n_embd]."""
        return self._hidden

    def embedding(self, seq_id: int) -> FloatArray:
        """Return the hidden states of a sequence's tokens in the last call, pooled."""
        own = self._hidden[np.array([seq_id in ids for ids in self._hidden_ids])]
        kind = self._effective["pooling_type"]
        if kind == "mean":
            return np.asarray(own.mean(axis=0))
        return np.asarray(own[0] if kind == "cls" else own[-1])

    def close(self) -> None:
        """Let the threads end."""
        for workers in self.workers:
            workers.close()
