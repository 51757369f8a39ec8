"""Beam search: which continuations go on, which are finished, and when the search ends.

Pure: rows of logits in, moves out. Who drives a `BeamSearch` evaluates the tokens that its moves
name, each behind the beam it continues.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import attrs
import numpy as np

from infercore.sampling.candidates import descending, largest

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from infercore.protocols.spi import FloatArray


@attrs.frozen
class Path:
    """Generated tokens, the log-probability of each, and the token that ended them, if one did."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    ended_by: int | None = None

    @property
    def total(self) -> float:
        """The sum of log-probabilities, the end token's included."""
        return sum(self.logprobs)

    def score(self, length_penalty: float) -> float:
        """Return the total over the number of tokens to the power of ``length_penalty``."""
        return self.total / math.pow(len(self.logprobs), length_penalty)


class Move(NamedTuple):
    """The beam ``path`` continues that of place ``parent`` by its last token."""

    parent: int
    path: Path


class BeamSearch:
    """Keeps the ``n_beams`` likeliest continuations, and the best ones that have ended.

    As Hugging Face's transformers search (``GenerationMixin._beam_search``): of the likeliest
    ``n_beams`` continuations those that end are finished, the likeliest others go on. With
    ``early_stopping`` the search ends once ``n_beams`` are finished; else once no running beam, as
    long as it is now, would score better than the worst of them. At ``max_tokens`` all end.
    """

    def __init__(
        self,
        n_beams: int,
        *,
        max_tokens: int,
        length_penalty: float,
        early_stopping: bool,
        ends: Collection[int],
    ) -> None:
        self._n = n_beams
        self._max_tokens = max_tokens
        self._penalty = length_penalty
        self._early = early_stopping
        self._ends = frozenset(ends)
        self.running: list[Path] = [Path()]
        self._finished: list[Path] = []
        self.done = False

    @property
    def finished(self) -> Sequence[Path]:
        """The best beams that have ended, best first."""
        return tuple(self._finished)

    def step(self, rows: Sequence[FloatArray]) -> list[Move]:
        """Return the beams that go on, given the logits behind each of ``running``.

        None where the search is ``done``.
        """
        best = self._likeliest(rows)
        full = len(self.running[0].logprobs) + 1 >= self._max_tokens
        going = []
        for place, move in enumerate(best):
            ended = move.path.tokens[-1] in self._ends
            if not (ended or full):
                going.append(move)
            elif place < self._n:
                self._finish(move.path, ended=ended)
        going = going[: self._n]
        self.done = not going or self._settled(going[0].path)
        self.running = [] if self.done else [move.path for move in going]
        return [] if self.done else going

    def _likeliest(self, rows: Sequence[FloatArray]) -> list[Move]:
        """Return the likeliest continuations, best first: enough that ``n_beams`` can go on."""
        found: list[tuple[float, int, int, float]] = []
        for place, (path, row) in enumerate(zip(self.running, rows, strict=True)):
            ids, logprobs = _top(row, self._n + len(self._ends))
            total = path.total
            found += [
                (-(total + logprob), place, token, logprob)
                for token, logprob in zip(ids, logprobs, strict=True)
                if logprob > -math.inf
            ]
        found.sort()
        return [
            Move(place, _longer(self.running[place], token, logprob))
            for _, place, token, logprob in found
        ]

    def _finish(self, path: Path, *, ended: bool) -> None:
        if ended:
            path = attrs.evolve(path, tokens=path.tokens[:-1], ended_by=path.tokens[-1])
        self._finished.append(path)
        self._finished.sort(key=lambda one: -one.score(self._penalty))
        del self._finished[self._n :]

    def _settled(self, best: Path) -> bool:
        """Whether nothing better is to be expected from ``best``, the likeliest that goes on."""
        if len(self._finished) < self._n:
            return False
        worst = self._finished[-1].score(self._penalty)
        return self._early or best.score(self._penalty) <= worst


def _longer(path: Path, token: int, logprob: float) -> Path:
    return Path((*path.tokens, token), (*path.logprobs, logprob))


def _top(row: FloatArray, n: int) -> tuple[list[int], list[float]]:
    """Return the ``n`` likeliest tokens of a row of logits, and their log-probabilities."""
    values = row.astype(np.float64)
    values -= values.max()
    total = np.log(np.exp(values).sum())
    places = largest(values, n) if n < values.size else np.arange(values.size)
    places = places[descending(values[places])]
    return places.tolist(), (values[places] - total).tolist()
