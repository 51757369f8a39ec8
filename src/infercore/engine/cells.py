"""Which sequence holds which tokens at which positions, and how many cells that takes.

The engine's own positions stay the truth; the map adds what engines do not report: how many tokens
a sequence holds (it differs from the next position after holes and divides), which tokens they
are, and how many cells of the cache all sequences take together.

A sequence is a list of runs, ordered by position. A run is a segment of cells that it holds whole;
a copy holds the same segments, and what cuts one cuts it for all who hold it. So no operation looks
at single tokens: each takes time with the number of runs, which copies, holes and cuts make, and
not with the number of tokens or with the order in which sequences take their cells.
"""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import chain, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    Positions = npt.NDArray[np.int64]

_by_position = attrgetter("pos")


class _Segment:
    """The tokens of consecutive cells, and how many runs hold them."""

    __slots__ = ("n_holders", "tokens")

    def __init__(self, tokens: Iterable[int], n_holders: int) -> None:
        self.tokens = array("i", tokens)
        self.n_holders = n_holders


class _Run:
    """A segment at the positions from ``pos`` on, or at those of ``at`` (once divided)."""

    __slots__ = ("at", "pos", "segment")

    def __init__(self, segment: _Segment, pos: int, at: Positions | None = None) -> None:
        self.segment = segment
        self.pos = pos
        self.at = at

    @property
    def n(self) -> int:
        return len(self.segment.tokens)

    @property
    def end(self) -> int:
        """One more than its last position."""
        return self.pos + self.n if self.at is None else int(self.at[-1]) + 1

    def positions(self) -> Positions:
        return np.arange(self.pos, self.pos + self.n) if self.at is None else self.at

    def index(self, position: int) -> int:
        """Return how many of its positions lie below ``position``."""
        if self.at is not None:
            return int(np.searchsorted(self.at, position))
        return min(max(position - self.pos, 0), self.n)

    def cut(self, p0: int, p1: int) -> tuple[int, int]:
        """Return the part ``start:stop`` of it that lies in [p0, p1)."""
        return self.index(p0), self.index(p1)


class CellMap:
    """The runs of every sequence; all positions are half-open ranges.

    ``n_cells`` counts the cells that are held, a shared one once.
    """

    __slots__ = ("_lengths", "_runs", "_tails", "n_cells", "n_seq_max")

    def __init__(self, n_seq_max: int) -> None:
        self.n_seq_max = n_seq_max
        self._runs: list[list[_Run]] = [[] for _ in range(n_seq_max)]
        self._lengths = [0] * n_seq_max
        # Where the next token of a sequence goes, if that is known and nobody else's.
        self._tails: list[array[int] | None] = [None] * n_seq_max
        self.n_cells = 0

    # -- what is held --------------------------------------------------------------------------

    def n_shared(self) -> int:
        """Return how many cells more than one sequence holds; safe beside a change."""
        runs = [run for held in self._runs for run in list(held)]
        shared = {run.segment for run in runs if run.segment.n_holders > 1}
        return sum(len(segment.tokens) for segment in shared)

    def length(self, seq_id: int) -> int:
        """Return how many tokens the sequence holds."""
        return self._lengths[seq_id]

    def next_position(self, seq_id: int, below: int | None = None) -> int:
        """Return one more than the highest position held (below ``below``), 0 without one."""
        runs = self._runs[seq_id]
        if below is None:
            return max((run.end for run in runs), default=0)
        found = self.extent(seq_id, 0, below)
        return found[1] + 1 if found else 0

    def tokens(self, seq_id: int) -> list[int]:
        """Return the tokens the sequence holds, by position."""
        runs = self._runs[seq_id]
        held = _tokens_of(runs)
        if any(run.pos < last.end for last, run in pairwise(runs)):
            order = np.argsort(self._positions(runs), kind="stable")
            return [held[i] for i in order.tolist()]
        return held

    def positions(self, seq_id: int) -> list[int]:
        """Return the position of each token held, in the order of `tokens`."""
        held: list[int] = np.sort(self._positions(self._runs[seq_id])).tolist()
        return held

    @staticmethod
    def _positions(runs: Iterable[_Run]) -> Positions:
        return np.concatenate([np.empty(0, np.int64), *(run.positions() for run in runs)])

    def extent(self, seq_id: int, p0: int, p1: int) -> tuple[int, int] | None:
        """Return the lowest and the highest position held in [p0, p1), None without one."""
        found = [
            run.positions()[[start, stop - 1]].tolist()
            for run, start, stop in self._within(seq_id, p0, p1)
        ]
        return (min(low for low, _ in found), max(high for _, high in found)) if found else None

    def holds(self, seq_id: int, p0: int, p1: int) -> int:
        """Return how many tokens the sequence holds in [p0, p1)."""
        return sum(stop - start for _, start, stop in self._within(seq_id, p0, p1))

    def unshared(self, seq_id: int, p0: int, p1: int) -> int:
        """Return how many cells in [p0, p1) no other sequence holds."""
        parts = self._within(seq_id, p0, p1)
        return sum(stop - start for run, start, stop in parts if run.segment.n_holders == 1)

    def shared(self, seq_id: int, p0: int, p1: int) -> bool:
        """Return whether another sequence holds one of the cells in [p0, p1)."""
        return any(run.segment.n_holders > 1 for run, _, _ in self._within(seq_id, p0, p1))

    def _within(self, seq_id: int, p0: int, p1: int) -> Iterator[tuple[_Run, int, int]]:
        """Yield each run with its part ``start:stop`` in [p0, p1)."""
        for run in self._runs[seq_id]:
            if run.pos < p1:
                start, stop = run.cut(p0, p1)
                if start < stop:
                    yield run, start, stop

    def same(self, a: int, b: int) -> bool:
        """Return whether two sequences hold the same tokens at the same positions."""
        if self._lengths[a] != self._lengths[b]:
            return False
        if _cells_of(self._runs[a]) == _cells_of(self._runs[b]):
            return True
        held = (sorted(zip(self.positions(s), self.tokens(s), strict=True)) for s in (a, b))
        return next(held) == next(held)

    def clash(self, seq_id: int, p0: int, p1: int, delta: int) -> int | None:
        """Return the first position in [p0, p1) that ``delta`` would move onto one that stays."""
        held = np.sort(self._positions(self._runs[seq_id]))
        moves = (held >= p0) & (held < p1)
        hit = held[moves][np.isin(held[moves] + delta, held[~moves])]
        return int(hit[0]) if len(hit) else None

    # -- appending -----------------------------------------------------------------------------

    def append_one(self, seq_id: int, token: int) -> None:
        """Give one token to one sequence at its next position: the hot path of `append`."""
        tail = self._tails[seq_id]
        if tail is None:
            self.append((seq_id,), (token,), self.next_position(seq_id))
            return
        tail.append(token)
        self._lengths[seq_id] += 1
        self.n_cells += 1

    def append_each(self, seq_ids: Sequence[int], tokens: Sequence[int]) -> None:
        """Give each of several sequences its one of ``tokens``, at its next position."""
        tails, lengths = self._tails, self._lengths
        for seq_id, token in zip(seq_ids, tokens, strict=True):
            tail = tails[seq_id]
            if tail is None:
                self.append((seq_id,), (token,), self.next_position(seq_id))
            else:
                tail.append(token)
                lengths[seq_id] += 1
                self.n_cells += 1

    def append(self, seq_ids: Sequence[int], tokens: Sequence[int], pos: int) -> None:
        """Give ``tokens`` to all of ``seq_ids``, from position ``pos`` on, in new cells."""
        n = len(tokens)
        segment = self._growing(seq_ids, pos)
        if segment is None:
            segment = _Segment(tokens, len(seq_ids))
            for seq_id in seq_ids:
                self._insert(seq_id, _Run(segment, pos))
        else:
            segment.tokens.extend(tokens)
        for seq_id in seq_ids:
            self._lengths[seq_id] += n
        self.n_cells += n
        alone = len(seq_ids) == 1 and self.next_position(seq_ids[0]) == pos + n
        for seq_id in seq_ids:
            self._tails[seq_id] = segment.tokens if alone else None

    def _growing(self, seq_ids: Sequence[int], pos: int) -> _Segment | None:
        """Return the segment that ends before ``pos`` in all of ``seq_ids`` and in no other."""
        ends = [runs[-1] for runs in (self._runs[s] for s in seq_ids) if runs]
        if len(ends) < len(seq_ids):
            return None
        segment = ends[0].segment
        fits = segment.n_holders == len(seq_ids) and all(
            run.segment is segment and run.at is None and run.end == pos for run in ends
        )
        return segment if fits else None

    def _insert(self, seq_id: int, run: _Run) -> None:
        runs = self._runs[seq_id]
        runs.append(run)
        if len(runs) > 1 and run.pos < runs[-2].pos:
            runs.sort(key=_by_position)

    # -- changing ------------------------------------------------------------------------------

    def remove(self, seq_id: int, p0: int, p1: int) -> None:
        """Take positions [p0, p1) from the sequence."""
        for run in self._isolated(seq_id, p0, p1):
            self._release(seq_id, run)

    def copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Let ``dst`` hold the cells that ``src`` has in [p0, p1)."""
        for run in self._isolated(src, p0, p1):
            run.segment.n_holders += 1
            self._insert(dst, _Run(run.segment, run.pos, run.at))
            self._lengths[dst] += run.n

    def shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add ``delta`` to the positions in [p0, p1)."""

        def moved(run: _Run) -> None:
            run.pos += delta
            run.at = None if run.at is None else run.at + delta

        self._move(seq_id, p0, p1, moved)

    def divide(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions in [p0, p1) by ``d``."""

        def divided(run: _Run) -> None:
            run.at = run.positions() // d
            run.pos = int(run.at[0])

        self._move(seq_id, p0, p1, divided)

    def _move(self, seq_id: int, p0: int, p1: int, move: Callable[[_Run], None]) -> None:
        for run in self._isolated(seq_id, p0, p1):
            move(run)
        self._runs[seq_id].sort(key=_by_position)

    def clear(self) -> None:
        """Forget everything."""
        self._runs = [[] for _ in range(self.n_seq_max)]
        self._lengths = [0] * self.n_seq_max
        self._tails = [None] * self.n_seq_max
        self.n_cells = 0

    def _isolated(self, seq_id: int, p0: int, p1: int) -> list[_Run]:
        """Return runs that are just what the sequence holds in [p0, p1), cutting some for that."""
        self._tails = [None] * self.n_seq_max
        for run, start, stop in list(self._within(seq_id, p0, p1)):
            if stop < run.n:
                self._split(run.segment, stop)
            if start:
                self._split(run.segment, start)
        return [run for run, _, _ in self._within(seq_id, p0, p1)]

    def _split(self, segment: _Segment, at: int) -> None:
        """Cut a segment in two, for all who hold it."""
        behind = _Segment(segment.tokens[at:], segment.n_holders)
        missing = segment.n_holders
        for runs in self._runs:
            if not missing:
                break
            found = [run for run in runs if run.segment is segment]
            for run in found:
                rest = None if run.at is None else run.at[at:]
                pos = run.pos + at if rest is None else int(rest[0])
                run.at = None if run.at is None else run.at[:at]
                runs.append(_Run(behind, pos, rest))
            if found:
                missing -= len(found)
                runs.sort(key=_by_position)
        del segment.tokens[at:]

    def _release(self, seq_id: int, run: _Run) -> None:
        self._runs[seq_id].remove(run)
        self._lengths[seq_id] -= run.n
        run.segment.n_holders -= 1
        if not run.segment.n_holders:
            self.n_cells -= run.n

    # -- saved state ---------------------------------------------------------------------------

    def describe(self, seq_ids: Iterable[int]) -> list[dict[str, Any]]:
        """Return the sequences as `restore` takes them."""
        first_cells: dict[_Segment, int] = {}
        n_cells = 0
        described = []
        for seq_id in seq_ids:
            runs, cells = [], []
            for run in self._runs[seq_id]:
                if run.segment not in first_cells:
                    first_cells[run.segment] = n_cells
                    n_cells += run.n
                for pos, start, n in _consecutive(run):
                    runs.append([pos, n])
                    cells.append(first_cells[run.segment] + start)
            tokens = _tokens_of(self._runs[seq_id])
            described.append({"seq_id": seq_id, "runs": runs, "cells": cells, "tokens": tokens})
        return described

    def restore(self, sequences: Iterable[Mapping[str, Any]]) -> None:
        """Hold exactly these sequences, with the cells that they shared.

        Each has its ``seq_id``, ``runs`` (position, length), ``cells`` (the first of each run)
        and ``tokens``.
        """
        self.clear()
        held = list(sequences)
        spans = [span for sequence in held for span in _spans(sequence)]
        edges = sorted({edge for _, cell, n, _ in spans for edge in (cell, cell + n)})
        place = {edge: i for i, edge in enumerate(edges)}
        segments: dict[int, _Segment] = {}
        for sequence in held:
            for pos, cell, n, at in _spans(sequence):
                tokens = sequence["tokens"][at : at + n]
                for start, stop in pairwise(edges[place[cell] : place[cell + n] + 1]):
                    if start not in segments:
                        segments[start] = _Segment(tokens[start - cell : stop - cell], 0)
                        self.n_cells += stop - start
                    segments[start].n_holders += 1
                    self._insert(sequence["seq_id"], _Run(segments[start], pos + start - cell))
                self._lengths[sequence["seq_id"]] += n

    def set_sequence(
        self, seq_id: int, runs: Iterable[tuple[int, int]], tokens: Sequence[int]
    ) -> None:
        """Let the sequence hold ``tokens`` at the positions of ``runs`` (position, length)."""
        for run in list(self._runs[seq_id]):
            self._release(seq_id, run)
        self._tails[seq_id] = None
        start = 0
        for pos, n in runs:
            self.append((seq_id,), tokens[start : start + n], pos)
            start += n

    # -- after an interruption -----------------------------------------------------------------

    def recount(self) -> None:
        """Count anew what an interruption may have left uncounted, from the runs."""
        self._tails = [None] * self.n_seq_max
        holders = Counter(run.segment for run in chain.from_iterable(self._runs))
        for segment, n_holders in holders.items():
            segment.n_holders = n_holders
        self._lengths = [sum(run.n for run in runs) for runs in self._runs]
        self.n_cells = sum(len(segment.tokens) for segment in holders)


def _tokens_of(runs: Iterable[_Run]) -> list[int]:
    tokens: list[int] = []
    for run in runs:
        tokens += run.segment.tokens.tolist()
    return tokens


def _cells_of(runs: Iterable[_Run]) -> list[tuple[_Segment, list[int]]]:
    return [(run.segment, [run.pos] if run.at is None else run.at.tolist()) for run in runs]


def n_cells_of(sequences: Iterable[Mapping[str, Any]]) -> int:
    """Return how many cells saved sequences take together; see `CellMap.restore`."""
    n_cells = end = 0
    for cell, n in sorted((cell, n) for seq in sequences for _, cell, n, _ in _spans(seq)):
        n_cells += max(0, cell + n - max(end, cell))
        end = max(end, cell + n)
    return n_cells


def _spans(sequence: Mapping[str, Any]) -> Iterator[tuple[int, int, int, int]]:
    """Yield position, first cell, length and number of tokens before, of each saved run."""
    at = 0
    for cell, (pos, n) in zip(sequence["cells"], sequence["runs"], strict=True):
        yield pos, cell, n, at
        at += n


def _consecutive(run: _Run) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of a run at consecutive positions: position, start, length."""
    if run.at is None:
        yield run.pos, 0, run.n
        return
    starts = [0, *(np.flatnonzero(np.diff(run.at) != 1) + 1).tolist(), run.n]
    for start, stop in pairwise(starts):
        yield int(run.at[start]), start, stop - start
