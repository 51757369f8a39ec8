"""The output rows of a call, over one or more compute steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]


class Rows:
    """Rows [n, width] of the last call.

    Those of a single step are a view of the engine's buffer, valid until the next step, and
    keep that memory; those of several are copied as they come.
    """

    def __init__(self) -> None:
        self._parts: list[Floats] = []

    def begin(self) -> None:
        """Forget what was there."""
        self._parts = []

    def add(self, rows: Floats, *, last: bool) -> None:
        """Take the rows of one step."""
        if len(rows):
            self._parts.append(rows if last else rows.copy())

    def all(self) -> Floats:
        """Return all rows."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]


def pooled(kind: str, vectors: Floats) -> Floats:
    """Return the pooled vector of one sequence's token ``vectors`` [n_tokens, n_embd]."""
    if kind == "mean":
        return vectors.mean(axis=0)  # type: ignore[no-any-return]
    vector: Floats = vectors[0 if kind == "cls" else -1].copy()
    return vector


def wanted_rows(logits: str, n_tokens: int, *, last: bool) -> Any:
    """Return which of a step's tokens get logits."""
    rows = np.arange(n_tokens)
    if logits == "all":
        return rows
    return rows[-1:] if logits == "last" and last else rows[:0]
