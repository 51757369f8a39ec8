"""Which rows of logits exist right now, whose they are, and where."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from infercore.engine.plugin_checks import shown, wrong, wrong_row
from infercore.errors import OutputNotAvailableError, UnsupportedFeatureError
from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from infercore.protocols.spi import EngineContext, FloatArray

    Owners = tuple[int, ...]


_Array, _FLOAT = np.ndarray, np.dtype(np.float32)
_ROUNDED = 1e-3


def rows_of(inner: EngineContext, n_vocab: int, backend: str) -> Callable[[int], FloatArray] | None:
    """Return what reads the engine's rows, as its capabilities have them; None without any."""
    kinds = inner.capabilities
    if kinds.logits == "full":
        return inner.logits
    if kinds.logits == "none":
        return None
    n_least = min(kinds.n_top, n_vocab)

    def likeliest(i: int) -> FloatArray:
        row = inner.logits(i)
        if wrong_row(row, n_vocab, backend) is None:
            known = row[row > -np.inf]
            if len(known) < n_least or not np.exp(known, dtype=np.float64).sum() <= 1 + _ROUNDED:
                told = f"gave {len(known)} numbers, not the log-probabilities of {n_least} tokens"
                raise wrong(backend, f"logits({i})", told)
        return row

    return likeliest


def all_of(inner: EngineContext) -> Callable[[int], FloatArray] | None:
    """Return what reads so many of the engine's first rows as one array, where it has them so."""
    read: Callable[[int], FloatArray] | None = getattr(inner, "logits_rows", None)
    return read if inner.capabilities.logits == "full" else None


class Outputs:
    """The output rows of the last call, counted over all its chunks.

    Each row belongs to the sequences whose token made it and goes with the last of them; the others
    keep their numbers. Rows of one engine call are views into the engine's buffer; rows gathered
    over several calls, or restored with a state, are arrays of our own. An engine without
    ``engine_logits`` has rows that only its own sampler can use. ``serial`` changes whenever
    the rows do, so that a session can tell whether they are still those it asked for.
    """

    __slots__ = (
        "_all_rows",
        "_backend",
        "_each",
        "_ends",
        "_engine_rows",
        "_from_engine",
        "_gathered",
        "_owners",
        "_restored",
        "_shape",
        "are_shown",
        "engine_logits",
        "n_plain",
        "n_vocab",
        "serial",
        "single",
    )

    def __init__(
        self,
        engine_logits: Callable[[int], FloatArray] | None,
        n_vocab: int,
        backend: str = "",
        engine_rows: Callable[[int], FloatArray] | None = None,
    ) -> None:
        self._engine_rows = engine_rows
        self._backend = backend
        self.are_shown = engine_logits is not None
        self.engine_logits = engine_logits or self._refuse
        self.n_vocab = n_vocab
        self._shape = (n_vocab,)
        self.serial = -1
        # Whose rows those of the last `set_each` were: most steps of a pool have the same ones.
        self._each: tuple[list[int], list[Owners], dict[int, int]] = ([], [], {})
        self.invalidate()

    def invalidate(self) -> None:
        """Forget all rows."""
        self._set([], {})

    def _set(self, owners: list[Owners], ends: dict[int, int]) -> None:
        self.serial += 1
        self.single = -1
        """The sequence whose one row, in the engine's buffer, is all there is; else -1."""
        self.n_plain = 0
        """How many rows there are, if all are in the engine's buffer and none was taken away."""
        self._owners = owners
        self._ends = ends
        self._all_rows = False
        self._gathered: FloatArray | None = None
        self._from_engine = True
        self._restored: dict[int, FloatArray] = {}

    def set_single(self, seq_id: int) -> None:
        """Say that the engine's last call made one row, behind the last token of ``seq_id``."""
        self._set([(seq_id,)], {seq_id: 0})
        self.single = seq_id
        self.n_plain = 1

    def set_rows(
        self,
        owners: Sequence[Owners],
        ends: dict[int, int],
        *,
        all_rows: bool,
        gathered: FloatArray | None = None,
    ) -> None:
        """Say whose the rows of the last call are: in the engine's buffer, or ``gathered``.

        ``ends``: the row behind the last token of each sequence that has one.
        """
        self._set(list(owners), ends)
        self._all_rows = all_rows
        if gathered is None:
            self.n_plain = len(self._owners)
        else:
            gathered.flags.writeable = False
            self._gathered = gathered
            self._from_engine = False

    def set_each(self, seq_ids: Sequence[int]) -> FloatArray | list[FloatArray]:
        """Say that the engine's last call made a row for each of ``seq_ids``; return its own."""
        n = len(seq_ids)
        before, owners, ends = self._each
        if seq_ids != before:
            owners = [(seq_id,) for seq_id in seq_ids]
            ends = dict(zip(seq_ids, range(n), strict=True))
            self._each = list(seq_ids), owners, ends
        self._set(owners.copy(), ends)  # the list is changed in place, the mapping never
        self._all_rows = True
        self.n_plain = n
        if self._engine_rows is None:
            return [self.from_engine(i) for i in range(n)]
        block = self._engine_rows(n)
        shape = n, self.n_vocab
        if type(block) is not np.ndarray or block.dtype is not _FLOAT or block.shape != shape:
            told = f"gave {shown(block)}, not float32 {list(shape)}"
            raise wrong(self._backend, f"logits_rows({n})", told)
        return block

    def restore(self, row: FloatArray, owners: Iterable[int]) -> None:
        """Add a row that was saved, behind the last token of its owners; other rows stay."""
        index = len(self._owners)
        self.serial += 1
        self.single = -1
        self.n_plain = 0
        self._all_rows = False
        row.flags.writeable = False
        self._restored[index] = row
        self._owners.append(tuple(owners))
        self._ends = {**self._ends, **dict.fromkeys(self._owners[index], index)}

    def drop(self, seq_id: int) -> None:
        """Take a sequence's rows away: it changed."""
        if not any(seq_id in ids for ids in self._owners):
            return
        owners = [tuple(s for s in ids if s != seq_id) for ids in self._owners]
        if not any(owners):
            self.invalidate()
            return
        self.serial += 1
        self.n_plain = 0
        self._all_rows = False
        self._owners = owners
        self._ends = {s: row for s, row in self._ends.items() if s != seq_id}
        self._restored = {i: row for i, row in self._restored.items() if owners[i]}

    def share(self, source: int, target: int) -> None:
        """Let ``target``, a copy of all of ``source``, have its last row too."""
        row = self._ends.get(source)
        if row is not None:
            self.single = -1
            self._owners[row] += (target,)
            self._ends = {**self._ends, target: row}

    # -- what there is -------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many rows can be read."""
        return self._n_owned if self.are_shown else 0

    @property
    def _n_owned(self) -> int:
        return sum(map(bool, self._owners))

    @property
    def n_in_engine(self) -> int:
        """How many of them lie in the engine's own buffer: not gathered, not restored."""
        return self._n_owned - len(self._restored) if self._from_engine else 0

    def of(self, seq_id: int) -> int | None:
        """Return the row behind the sequence's last token, None without one."""
        return self._ends.get(seq_id) if self.are_shown else None

    def last(self) -> tuple[FloatArray | None, list[int]]:
        """Return the last row that can be read, and whose last tokens it is behind."""
        index = max((i for i, ids in enumerate(self._owners) if ids), default=None)
        if index is None or not self.are_shown:
            return None, []
        return read_only(self.row(index)), [s for s, row in self._ends.items() if row == index]

    def row(self, i: int) -> FloatArray:
        """Return row ``i`` (negative from the end), float32 [n_vocab]; maybe the engine's own."""
        n = self.n_plain
        if type(i) is int and -n <= i < n:
            return self.from_engine(i % n)
        index = self._index(i)
        row = self._restored.get(index)
        if row is None:
            gathered = self._gathered
            row = self.from_engine(index) if gathered is None else gathered[index]
        return row

    def _index(self, i: int) -> int:
        if not checks.is_integer(i):
            raise checks.refuse("i", i, "an integer")
        index = operator.index(i)
        index += len(self._owners) if index < 0 else 0
        if not 0 <= index < len(self._owners) or not self._owners[index]:
            raise self._unavailable(f"logits({checks.shown(i)})")
        return index

    def engine_row(self, i: int) -> int:
        """Return the index of row ``i`` in the engine's own last call.

        Raises `OutputNotAvailableError` also where the rows are no longer the engine's: gathered
        over several calls, or restored.
        """
        index = self._index(i)
        if index in self._restored or not self._from_engine:
            raise self._unavailable("a native sample")
        return index

    def from_engine(self, i: int) -> FloatArray:
        """Return row ``i`` of the engine's last call. Raises `PluginError` for what is no row."""
        row: FloatArray = self.engine_logits(i)
        if type(row) is _Array and row.dtype is _FLOAT and row.shape == self._shape:
            return row
        if fault := wrong_row(row, self.n_vocab, self._backend):
            raise fault
        return row

    def rows(self) -> FloatArray:
        """Return all rows [n_outputs, n_vocab] of a call made with ``logits="all"``."""
        if not self._all_rows:
            raise self._unavailable("logits_all()")
        if self._gathered is None:
            rows = self.allocate(len(self._owners))
            self.copy_engine_rows(rows)
            rows.flags.writeable = False
            self._gathered = rows
        return self._gathered

    def allocate(self, n_rows: int) -> FloatArray:
        """Return an array [n_rows, n_vocab] to gather the rows of several calls in."""
        return np.empty((n_rows, self.n_vocab), dtype=np.float32)

    def copy_engine_rows(self, into: FloatArray) -> None:
        """Copy the first rows of the engine into all of ``into`` [n, n_vocab]."""
        for i in range(len(into)):
            into[i] = self.from_engine(i)

    def _refuse(self, _: int) -> NoReturn:
        raise UnsupportedFeatureError(
            feature="logits",
            backend=self._backend,
            hint="the engine generates by itself and shows none",
        )

    def _unavailable(self, operation: str) -> OutputNotAvailableError:
        n = self.count
        made = f"the last call made {n} output rows" if n else "there are none"
        return OutputNotAvailableError(
            f"{operation} is not available: {made}; decode with logits='last' or 'all' first",
            operation=operation,
            state=f"{n} output rows",
        )


def read_only(array: FloatArray) -> FloatArray:
    """Return a view of ``array`` that cannot be written to."""
    view: FloatArray = np.asarray(array, dtype=np.float32).view()
    view.flags.writeable = False
    return view
