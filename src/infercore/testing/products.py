"""Matrix products: shared by threads, and changed by LoRA adapters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import attrs
import numpy as np

from infercore.weight_files.lora import Target

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infercore.protocols.spi import FloatArray
    from infercore.weight_files.lora import Pair

ROWS = 93
"""Output rows of one piece of work. It is fixed, so the bits do not depend on the threads.

Few sizes are a multiple of it, so that the last piece is small, as it may be in any model.
"""


@attrs.frozen(eq=False)
class Matrix:
    """A weight [n_out, n_in] with its name in the file, which adapters speak of."""

    name: str
    weight: FloatArray


def adapter_target(matrices: Mapping[str, Matrix]) -> Target:
    """Return what adapters of a model with these matrices must fit."""
    shapes = {name: matrix.weight.shape for name, matrix in matrices.items()}
    return Target(backend="reference", shapes=shapes)


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

    def __init__(self, workers: Workers, adapters: Sequence[Mapping[str, Pair]]) -> None:
        self._workers = workers
        self._adapters = adapters

    def __call__(self, x: FloatArray, matrix: Matrix) -> FloatArray:
        """Return ``x`` [n, n_in] times the transpose of the matrix, adapters included."""
        out = self._workers.product(x, matrix.weight)
        for adapter in self._adapters:
            pair = adapter.get(matrix.name)
            if pair is not None:
                out += np.float32(pair.scale) * ((x @ pair.a.T) @ pair.b.T)
        return out
