"""Who of a pool's sequences holds the beginning of what another one wants, or soon will."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from infercore.session.prefix_index import PrefixIndex
from infercore.session.tape import common_prefix

if TYPE_CHECKING:
    from collections.abc import Iterable

    from infercore.session.jobs import Job
    from infercore.session.sequence import Sequence

_FOLLOW_TOKENS = 8
"""Fewer tokens that another sequence is about to hold are not worth waiting for."""


class Prefixes:
    """Finds the longest beginning that may be copied, within a namespace and identity.

    An index of what ``sequences`` hold, brought up to date when it is asked: what changed since
    is seen by how much a sequence holds and by its serial. ``copies`` says what the engine can copy
    ("any", "full", "none"), ``cuts`` whether it can remove the end of a sequence. With ``multiple``
    only what was evaluated in calls that end at its multiples is taken. Fewer than ``n_least``
    tokens more than a sequence holds are no source: where whole caches are copied, that takes
    longer than evaluating a few.
    """

    def __init__(
        self,
        sequences: set[Sequence],
        *,
        copies: str,
        cuts: bool,
        multiple: int | None,
        n_least: int = 1,
    ) -> None:
        self._sequences = sequences
        self._copies = copies
        self._cuts = cuts
        self._multiple = multiple
        self._n_least = n_least
        self._index: PrefixIndex[Sequence] = PrefixIndex()
        self._seen: dict[Sequence, tuple[int, int, str]] = {}

    def _look(self) -> None:
        """Let the index say what is held now."""
        index, seen = self._index, self._seen
        for gone in [s for s in seen if s not in self._sequences or not _gives(s)]:
            index.drop(gone)
            del seen[gone]
        for sequence in self._sequences:
            state = (sequence.n_held, sequence.serial, sequence.identity)
            if seen.get(sequence) != state and _gives(sequence):
                index.put(sequence, sequence.family, sequence.tokens[: sequence.n_held])
                seen[sequence] = state

    def source(self, sequence: Sequence, n_most: int) -> tuple[Sequence | None, int]:
        """Return who holds the longest beginning of ``sequence`` beyond its own, and how much.

        At most ``n_most`` tokens of it.
        """
        if self._copies == "none" or sequence.is_cold or n_most <= sequence.n_held:
            return None, 0
        self._look()
        wanted = sequence.tokens[:n_most]
        if self._multiple is not None:
            found = self._in_whole_calls(sequence, wanted, self._multiple)
        elif self._cuts:
            match = self._index.find(sequence.family, wanted, but=sequence)
            found = (None, 0) if match is None else (match.holder, match.n_tokens)
        else:
            found = self._whole(sequence, wanted)
        return found if found[1] >= sequence.n_held + self._n_least else (None, 0)

    def _whole(self, sequence: Sequence, wanted: list[int]) -> tuple[Sequence | None, int]:
        """Only a whole copy is possible, and none of it can be removed again."""
        for match in reversed(self._index.inside(sequence.family, wanted)):
            other = match.holder
            if other is not sequence and other.n_cells == match.n_tokens:
                return other, match.n_tokens
        return None, 0

    def _in_whole_calls(
        self, sequence: Sequence, wanted: list[int], multiple: int
    ) -> tuple[Sequence | None, int]:
        best, n_best = None, 0
        wanted = wanted[: _n_exchangeable(sequence, multiple)]
        for other in self._seen:
            if other is sequence or other.family != sequence.family:
                continue
            n = common_prefix(other.tokens[: other.n_held], wanted)
            n = whole_calls(other, sequence.n_held, n, multiple)
            if n > n_best:
                best, n_best = other, n
        return best, n_best

    def has(self, other: Sequence, sequence: Sequence, n: int) -> bool:
        """Whether ``other`` can give ``sequence`` its first ``n`` tokens, by cutting off the rest.

        False where each session has bits of its own: more than the tokens has to agree then.
        """
        if not (n and self._cuts and self._multiple is None and _gives(other)):
            return False
        same = other.family == sequence.family and other.n_held >= n
        return same and other.tokens[:n] == sequence.tokens[:n]

    def is_coming(self, sequence: Sequence, n_found: int, running: Iterable[Job]) -> bool:
        """Whether one of ``running`` is about to hold more than ``n_found`` of what is wanted."""
        if self._copies == "none" or sequence.is_cold or not self._cuts:
            return False
        n_most = len(sequence.tokens)
        if self._multiple is not None:
            n_most = min(n_most, _n_exchangeable(sequence, self._multiple))
            if n_found + self._multiple > n_most:
                return False
        for job in running:
            other = job.sequence
            if other.n_held == len(other.tokens) or other.family != sequence.family:
                continue
            if other.tokens[:1] != sequence.tokens[:1] or other.is_cut:
                continue
            n = min(n_most, common_prefix(other.tokens, sequence.tokens))
            if n > other.n_held and n >= n_found + max(_FOLLOW_TOKENS, self._n_least):
                return True
        return False


def _gives(sequence: Sequence) -> bool:
    """Whether others may copy from it: what was moved behind a cut is good for nobody else."""
    return sequence.seq_id is not None and not sequence.is_cut and sequence.n_held > 0


def _n_exchangeable(sequence: Sequence, multiple: int) -> int:
    """Return how many tokens of ``sequence`` others may have evaluated as well, bit by bit.

    What it evaluated itself in other calls, and lost, has the bits of just these.
    """
    n = whole_calls(sequence, sequence.n_held, sequence.n_high, multiple)
    return sys.maxsize if n >= sequence.n_high else n


def whole_calls(other: Sequence, start: int, n: int, multiple: int) -> int:
    """Return how many of the first ``n`` tokens ``other`` evaluated as a session alone would.

    In calls that end at multiples, and at nothing else, from ``start`` on.
    """
    ends = [end for end in other.ends if start < end <= n]
    found, at = start, start
    for end in ends:
        if end != at - at % multiple + multiple:
            break
        found = at = end
    return found
