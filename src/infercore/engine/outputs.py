"""Which rows of logits exist right now, and where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from infercore.errors import OutputNotAvailableError
from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.protocols.spi import EngineContext, FloatArray


class Outputs:
    """The output rows of the last call, counted over all its chunks.

    Rows of one engine call are views into the engine's buffer; rows gathered over several
    calls, or restored with a state, are arrays of our own. ``serial`` changes whenever the rows
    do, so that a session can tell whether they are still those it asked for.
    """

    __slots__ = (
        "_in_engine",
        "_n_vocab",
        "all_rows",
        "count",
        "engine_logits",
        "gathered",
        "serial",
    )

    def __init__(self, engine: EngineContext, n_vocab: int) -> None:
        self.engine_logits = engine.logits
        self._n_vocab = n_vocab
        self.gathered: FloatArray | None = None
        self._in_engine = True
        self.count = 0
        self.all_rows = False
        self.serial = 0

    def invalidate(self) -> None:
        """Forget all rows."""
        self.serial += 1
        self.count = 0
        self.all_rows = False
        self.gathered = None

    def set_engine_rows(self, count: int, *, all_rows: bool = False) -> None:
        """Say that the engine's last call made ``count`` rows."""
        self.serial += 1
        self.count = count
        self.all_rows = all_rows
        self.gathered = None
        self._in_engine = True

    def allocate(self, n_rows: int) -> FloatArray:
        """Return an array [n_rows, n_vocab] to gather the rows of several calls in."""
        return np.empty((n_rows, self._n_vocab), dtype=np.float32)

    def set_gathered(self, rows: FloatArray, *, all_rows: bool) -> None:
        """Let ``rows`` [n_outputs, n_vocab] be the output rows."""
        self.serial += 1
        rows.flags.writeable = False
        self.gathered = rows
        self._in_engine = False
        self.count = len(rows)
        self.all_rows = all_rows

    def copy_engine_rows(self, count: int, into: FloatArray) -> None:
        """Copy the engine's ``count`` rows into ``into`` [count, n_vocab]."""
        for i in range(count):
            into[i] = self.engine_logits(i)

    def row(self, i: int) -> FloatArray:
        """Return row ``i`` (negative from the end), read-only float32 [n_vocab]."""
        index = self._index(i)
        row: FloatArray = (
            self.engine_logits(index) if self.gathered is None else self.gathered[index]
        )
        return read_only(row) if row.flags.writeable else row

    def _index(self, i: int) -> int:
        if not checks.is_integer(i):
            raise checks.refuse("i", i, "an integer")
        index = i + self.count if i < 0 else i
        if not 0 <= index < self.count:
            raise self._unavailable(f"logits({i})")
        return index

    def engine_row(self, i: int) -> int:
        """Return the index of row ``i`` in the engine's own last call.

        Raises `OutputNotAvailableError` also where the rows are no longer the engine's: gathered
        over several calls, or restored.
        """
        index = self._index(i)
        if not self.in_engine:
            raise self._unavailable("a native sample")
        return index

    @property
    def in_engine(self) -> bool:
        """Whether the rows are those of the engine's last call: not gathered, not restored."""
        return self.gathered is None or self._in_engine

    def rows(self) -> FloatArray:
        """Return all rows [n_outputs, n_vocab] of a call made with ``logits="all"``."""
        if not self.all_rows:
            raise self._unavailable("logits_all()")
        if self.gathered is None:
            rows = self.allocate(self.count)
            self.copy_engine_rows(self.count, rows)
            rows.flags.writeable = False
            self.gathered = rows
        return self.gathered

    def _unavailable(self, operation: str) -> OutputNotAvailableError:
        made = f"the last call made {self.count} output rows" if self.count else "there are none"
        return OutputNotAvailableError(
            f"{operation} is not available: {made}; decode with logits='last' or 'all' first",
            operation=operation,
            state=f"{self.count} output rows",
        )


def read_only(array: FloatArray) -> FloatArray:
    """Return a view of ``array`` that cannot be written to."""
    view: FloatArray = np.asarray(array, dtype=np.float32).view()
    view.flags.writeable = False
    return view


def ending_at_last_row(
    seq_ids: Sequence[tuple[int, ...]], wanted: Sequence[bool]
) -> tuple[int, ...]:
    """Return the sequences whose last token in the batch is that of its last output row."""
    last = max((i for i, want in enumerate(wanted) if want), default=None)
    if last is None:
        return ()
    later = {s for ids in seq_ids[last + 1 :] for s in ids}
    return tuple(s for s in seq_ids[last] if s not in later)
