"""The books of a context: which sequence holds which tokens at which positions.

The engine's own positions stay the truth; the ledger adds what engines do not tell: how many
tokens a sequence holds (it differs from the next position after holes and divides), which
tokens they are, and how many cells of the cache all sequences take together.

Each appended token gets a cell number, and cells of one append are consecutive. A sequence is
a list of runs ``(cell, position, length)``; copied sequences share cells.
"""

from __future__ import annotations

from array import array
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_COMPACT_AT = 65_536
_new_tuple = tuple.__new__


class Run(NamedTuple):
    """Consecutive cells at consecutive positions."""

    cell: int
    pos: int
    n: int


class Ledger:
    """Runs of every sequence; all positions are half-open ranges."""

    def __init__(self, n_seq_max: int) -> None:
        self._runs: list[list[Run]] = [[] for _ in range(n_seq_max)]
        self._lengths = [0] * n_seq_max
        self._store = array("i")
        self.n_cells = 0
        self.n_changes = 0  # of what is held but for tokens appended

    def length(self, seq_id: int) -> int:
        """Return how many tokens the sequence holds."""
        return self._lengths[seq_id]

    def runs(self, seq_id: int) -> Sequence[Run]:
        """Return the sequence's runs in the order they were appended."""
        return tuple(self._runs[seq_id])

    def tokens(self, seq_id: int) -> list[int]:
        """Return the tokens the sequence holds, in order."""
        return [token for run in self._runs[seq_id] for token in self._slice(run)]

    def _slice(self, run: Run) -> array[int]:
        return self._store[run.cell : run.cell + run.n]

    def next_position(self, seq_id: int) -> int:
        """Return one more than the highest position held, 0 when empty."""
        return max((run.pos + run.n for run in self._runs[seq_id]), default=0)

    def append(self, seq_ids: Iterable[int], tokens: Sequence[int], pos: int) -> None:
        """Give ``tokens`` to all of ``seq_ids``, from position ``pos`` on, in new cells."""
        cell = len(self._store)
        self._store.extend(tokens)
        n = len(tokens)
        for seq_id in seq_ids:
            self._extend(seq_id, Run(cell, pos, n))
        self.n_cells += n
        if len(self._store) > 2 * self.n_cells + _COMPACT_AT:
            self._compact()

    def _extend(self, seq_id: int, run: Run) -> None:
        """Enter a run; no interruption can come between its parts, as there is no call."""
        runs = self._runs[seq_id]
        if runs:
            last = runs[-1]
            if _follows(run, last):
                runs[-1] = Run(last.cell, last.pos, last.n + run.n)
                self._lengths[seq_id] += run.n
                return
        runs += (run,)
        self._lengths[seq_id] += run.n

    def recount(self) -> None:
        """Count anew what an interruption may have left uncounted, from the runs."""
        self._lengths = [sum(run.n for run in runs) for runs in self._runs]
        self.n_cells = _width(run for runs in self._runs for run in runs)

    def append_one(self, seq_id: int, token: int) -> None:
        """Give one token to one sequence at its next position: the hot path of `append`."""
        runs, store = self._runs[seq_id], self._store
        if len(runs) == 1:
            cell, pos, n = runs[0]
            if cell + n == len(store):
                store.append(token)
                runs[0] = _new_tuple(Run, (cell, pos, n + 1))  # a third of the time of Run(...)
                self._lengths[seq_id] += 1
                self.n_cells += 1
                return
        self.append((seq_id,), (token,), self.next_position(seq_id))

    def remove(self, seq_id: int, p0: int, p1: int) -> None:
        """Take positions [p0, p1) from the sequence."""
        self._replace(
            seq_id, [part for run in self._runs[seq_id] for part in _outside(run, p0, p1)]
        )

    def copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Let ``dst`` hold the cells that ``src`` has in [p0, p1)."""
        copied = [part for run in self._runs[src] for part in _inside(run, p0, p1)]
        self._replace(dst, self._runs[dst] + copied)

    def shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add ``delta`` to the positions in [p0, p1)."""
        self._map(seq_id, p0, p1, lambda part: [part._replace(pos=part.pos + delta)])

    def divide(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions in [p0, p1) by ``d``."""
        self._map(
            seq_id,
            p0,
            p1,
            lambda part: [Run(part.cell + i, (part.pos + i) // d, 1) for i in range(part.n)],
        )

    def _map(self, seq_id: int, p0: int, p1: int, change: _Change) -> None:
        changed: list[Run] = []
        for run in self._runs[seq_id]:
            for part in _split(run, p0, p1):
                changed.extend(change(part) if p0 <= part.pos < p1 else (part,))
        self._replace(seq_id, changed)

    def clear(self) -> None:
        """Forget everything."""
        runs: list[list[Run]] = [[] for _ in self._runs]
        lengths, store = [0] * len(runs), array("i")
        self._runs, self._lengths, self._store = runs, lengths, store
        self.n_cells = 0
        self.n_changes += 1

    def set_sequence(
        self, seq_id: int, runs: Iterable[tuple[int, int]], tokens: Sequence[int]
    ) -> None:
        """Let the sequence hold ``tokens`` at the positions of ``runs`` (position, length)."""
        cell = len(self._store)
        self._store.extend(tokens)
        fresh = []
        for pos, n in runs:
            fresh.append(Run(cell, pos, n))
            cell += n
        self._replace(seq_id, fresh)

    def restore(self, sequences: Iterable[Mapping[str, Any]]) -> None:
        """Hold exactly these sequences, with the cells that they shared.

        Each has its ``seq_id``, ``runs`` (position, length), ``cells`` (the first of each run)
        and ``tokens``.
        """
        self.clear()
        held = {sequence["seq_id"]: sequence for sequence in sequences}
        for seq_id, sequence in held.items():
            self._replace(seq_id, list(_runs_of(sequence)))
        self._renumber()  # first: the numbers may be as large as they like
        self._store = array("i", [0]) * self.n_cells
        for seq_id, sequence in held.items():
            at = 0
            for cell, _, n in self._runs[seq_id]:
                self._store[cell : cell + n] = array("i", sequence["tokens"][at : at + n])
                at += n

    def positions(self, seq_id: int) -> Iterator[int]:
        """Yield the position of each token held, in order."""
        for run in self._runs[seq_id]:
            yield from range(run.pos, run.pos + run.n)

    def same(self, a: int, b: int) -> bool:
        """Tell whether two sequences hold the same tokens at the same positions."""
        if self._runs[a] == self._runs[b]:  # the same cells
            return True
        if self._lengths[a] != self._lengths[b]:
            return False
        held = (zip(self.positions(s), self.tokens(s), strict=True) for s in (a, b))
        return sorted(next(held)) == sorted(next(held))

    def holds(self, seq_id: int, p0: int, p1: int) -> int:
        """Return how many tokens the sequence holds in [p0, p1)."""
        return sum(part.n for run in self._runs[seq_id] for part in _inside(run, p0, p1))

    def shared(self, seq_id: int, p0: int, p1: int) -> bool:
        """Tell whether another sequence holds one of the cells in [p0, p1)."""
        own = [part for run in self._runs[seq_id] for part in _inside(run, p0, p1)]
        others = [run for i, runs in enumerate(self._runs) if i != seq_id for run in runs]
        return any(a.cell < b.cell + b.n and b.cell < a.cell + a.n for a in own for b in others)

    def unshared(self, seq_id: int, p0: int, p1: int) -> int:
        """Return how many cells in [p0, p1) no other sequence holds."""
        others = [run for i, runs in enumerate(self._runs) if i != seq_id for run in runs]
        own = [part for run in self._runs[seq_id] for part in _inside(run, p0, p1)]
        return _width([*others, *own]) - _width(others)

    def _replace(self, seq_id: int, runs: Iterable[Run]) -> None:
        """Let the sequence have ``runs``: all at once, as no interruption can come between."""
        fresh: list[Run] = []
        for run in runs:
            if fresh and _follows(run, fresh[-1]):
                cell, pos, n = fresh[-1]
                fresh[-1] = Run(cell, pos, n + run.n)
            else:
                fresh.append(run)
        others = [run for i, held in enumerate(self._runs) if i != seq_id for run in held]
        length, n_cells = sum(run.n for run in fresh), _width([*others, *fresh])
        self._runs[seq_id] = fresh
        self._lengths[seq_id] = length
        self.n_cells = n_cells
        self.n_changes += 1

    def _compact(self) -> None:
        """Number the cells in use anew, so that the store does not grow for ever."""
        store = array("i")
        for start, end in self._renumber():
            store.extend(self._store[start:end])
        self._store = store

    def _renumber(self) -> list[tuple[int, int]]:
        """Number the cells in use from 0 on; return the ranges of those that were in use."""
        spans = _spans(run for runs in self._runs for run in runs)
        ends = accumulate(end - start for start, end in spans)
        starts = [
            (start, end, n - end + start) for (start, end), n in zip(spans, ends, strict=True)
        ]
        self._runs = [[_moved(run, starts) for run in runs] for runs in self._runs]
        return spans


if TYPE_CHECKING:
    from collections.abc import Callable

    _Change = Callable[[Run], list[Run]]


def n_cells_of(sequences: Iterable[Mapping[str, Any]]) -> int:
    """Return how many cells saved sequences take together; see `Ledger.restore`."""
    return _width(run for sequence in sequences for run in _runs_of(sequence))


def _follows(run: Run, last: Run) -> bool:
    """Whether ``run`` begins where ``last`` ends, in cells and in positions."""
    return last.cell + last.n == run.cell and last.pos + last.n == run.pos


def _runs_of(sequence: Mapping[str, Any]) -> Iterator[Run]:
    for cell, (pos, n) in zip(sequence["cells"], sequence["runs"], strict=True):
        yield Run(cell, pos, n)


def _spans(runs: Iterable[Run]) -> list[tuple[int, int]]:
    """Return the cells of ``runs`` as disjoint, ordered ranges."""
    spans: list[tuple[int, int]] = []
    for run in sorted(runs):
        start, end = run.cell, run.cell + run.n
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return spans


def _width(runs: Iterable[Run]) -> int:
    """Return how many different cells ``runs`` have."""
    return sum(end - start for start, end in _spans(runs))


def _moved(run: Run, starts: list[tuple[int, int, int]]) -> Run:
    for start, end, target in starts:
        if start <= run.cell < end:
            return run._replace(cell=run.cell - start + target)
    raise AssertionError(f"{run} lies in no span")


def _inside(run: Run, p0: int, p1: int) -> list[Run]:
    return [part for part in _split(run, p0, p1) if p0 <= part.pos < p1]


def _outside(run: Run, p0: int, p1: int) -> list[Run]:
    return [part for part in _split(run, p0, p1) if not p0 <= part.pos < p1]


def _split(run: Run, p0: int, p1: int) -> list[Run]:
    """Cut ``run`` at p0 and p1; the parts in order."""
    end = run.pos + run.n
    cuts = [run.pos, *sorted(cut for cut in {p0, p1} if run.pos < cut < end), end]
    return [
        Run(run.cell + start - run.pos, start, stop - start)
        for start, stop in pairwise(cuts)
        if stop > start
    ]
