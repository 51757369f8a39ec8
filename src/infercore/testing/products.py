"""Matrix products: shared by threads, and changed by LoRA adapters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import attrs
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.protocols.spi import FloatArray
    from infercore.testing.lora import Delta

ROWS = 64
"""Output rows of one piece of work. It is fixed, so the bits do not depend on the threads."""


@attrs.frozen(eq=False)
class Matrix:
    """A weight [n_out, n_in] with its name in the file, which adapters speak of."""

    name: str
    weight: FloatArray


class Workers:
    """Threads that compute pieces of a matrix product; with one, it is the caller's own."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._pool = ThreadPoolExecutor(n_threads) if n_threads > 1 else None

    def product(self, x: FloatArray, weight: FloatArray) -> FloatArray:
        """Return ``x`` [n, n_in] times the transpose of ``weight`` [n_out, n_in]: [n, n_out]."""
        out = np.empty((len(x), len(weight)), np.float32)

        def compute(start: int) -> None:
            part = slice(start, start + ROWS)
            out[:, part] = x @ weight[part].T

        starts = range(0, len(weight), ROWS)
        for _ in map(compute, starts) if self._pool is None else self._pool.map(compute, starts):
            pass
        return out

    def close(self) -> None:
        """Let the threads end."""
        if self._pool is not None:
            self._pool.shutdown()


class Products:
    """What a forward pass multiplies with: weights, and what adapters add to them."""

    def __init__(self, workers: Workers, deltas: Sequence[Delta]) -> None:
        self._workers = workers
        self._deltas = deltas

    def __call__(self, x: FloatArray, matrix: Matrix) -> FloatArray:
        """Return ``x`` [n, n_in] times the transpose of the matrix, adapters included."""
        out = self._workers.product(x, matrix.weight)
        for delta in self._deltas:
            if matrix.name in delta.pairs:
                a, b = delta.pairs[matrix.name]
                out += np.float32(delta.scale) * ((x @ a.T) @ b.T)
        return out
