"""The tokens that penalties look back on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

_FIRST_SIZE = 256


class TokenHistory:
    """All tokens so far, in order, and how often each stands among the last ``window`` ones.

    ``window`` counts tokens; -1 means all of them, 0 none.
    """

    def __init__(self, n_vocab: int, window: int) -> None:
        self._window = window
        self._counts = np.zeros(n_vocab if window else 0, dtype=np.int32)
        self._tokens = np.zeros(_FIRST_SIZE, dtype=np.int32)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def extend(self, tokens: Sequence[int]) -> None:
        """Append ``tokens``, which are valid ids."""
        self._reserve(len(tokens))
        if len(tokens) == 1:
            self._count_one(tokens[0])
        self._tokens[self._size : self._size + len(tokens)] = tokens
        self._size += len(tokens)
        if len(tokens) > 1:
            self._count_anew()

    def _count_one(self, token: int) -> None:
        if self._window == 0:
            return
        if 0 < self._window <= self._size:
            self._counts[self._tokens[self._size - self._window]] -= 1
        self._counts[token] += 1

    def _count_anew(self) -> None:
        if self._window:
            self._counts[:] = np.bincount(self.last(self._window), minlength=self._counts.size)

    def _reserve(self, n_more: int) -> None:
        needed = self._size + n_more
        if needed > self._tokens.size:
            grown = np.zeros(max(needed, 2 * self._tokens.size), dtype=np.int32)
            grown[: self._size] = self._tokens[: self._size]
            self._tokens = grown

    def last(self, n: int) -> npt.NDArray[np.int32]:
        """Return the last ``n`` tokens (-1 = all), oldest first; a view, not to be kept."""
        start = 0 if n < 0 else max(0, self._size - n)
        return self._tokens[start : self._size]

    def counts(self, window: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return how often each token of ``window`` [m] stands in the counted window."""
        return self._counts[window]

    def clear(self) -> None:
        """Forget everything."""
        self._size = 0
        self._counts[:] = 0

    def copy(self) -> TokenHistory:
        """Return an independent copy."""
        twin = object.__new__(TokenHistory)
        twin._window, twin._size = self._window, self._size
        twin._counts, twin._tokens = self._counts.copy(), self._tokens.copy()
        return twin
