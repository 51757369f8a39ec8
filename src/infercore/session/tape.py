"""The token tape: what the engine holds, and how much of it is the logical context.

The engine's tokens may reach further than the logical context (prefix, suffix, generated): the
rest is a warm tail, kept until something else must be written there. So a longer text that
continues the tail finds it resident.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens ``a`` and ``b`` have in common from the start."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


@attrs.frozen
class Plan:
    """What is needed to hold a text: keep ``keep`` tokens, drop ``drop``, evaluate ``tokens``."""

    keep: int
    drop: int
    tokens: list[int]


class Tape:
    """The engine's tokens of one sequence, in order; the first ``logical`` of them count.

    After tokens were cut out of the middle, those behind the cut were computed with more before
    them than is there now: they are good for going on, not for reuse.
    """

    __slots__ = ("_cut", "_tokens", "logical")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._cut: int | None = None
        self.logical = 0

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def is_cut(self) -> bool:
        """Whether tokens were cut out before some that are held."""
        return self._cut is not None

    @property
    def cut(self) -> int | None:
        """Where tokens were cut out, None where none were."""
        return self._cut

    @property
    def warm_tail(self) -> int:
        """How many tokens are held beyond the logical context."""
        return len(self._tokens) - self.logical

    def tokens(self, start: int = 0, end: int | None = None) -> list[int]:
        """Return the tokens held in [start, end), warm tail included."""
        return self._tokens[start:end]

    def common(self, target: Sequence[int]) -> int:
        """Return how many tokens of ``target`` are held already, from the start."""
        n = common_prefix(self._tokens, list(target))
        return n if self._cut is None else min(n, self._cut)

    def next_is(self, token: int) -> bool:
        """Return whether the first token of the warm tail is ``token``."""
        return self._tokens[self.logical : self.logical + 1] == [token]

    def held_of(self, tokens: Sequence[int]) -> int:
        """Return how many of ``tokens`` are held from the start, moved ones included."""
        return common_prefix(self._tokens, list(tokens))

    def plan(self, target: Sequence[int], *, last_again: bool = False) -> Plan:
        """Return what is to be done so that ``target`` is held.

        ``last_again``: when all of it is held, its last token is evaluated again all the same.
        """
        target = list(target)
        keep = self.common(target)
        if keep == len(target):
            if not (last_again and target):
                return Plan(keep, 0, [])
            keep -= 1
        return Plan(keep, len(self._tokens) - keep, target[keep:])

    def truncate(self, n: int) -> None:
        """Say that the engine holds only the first ``n`` tokens now."""
        del self._tokens[n:]
        self._forget_cut_at_end()
        self.logical = min(self.logical, n)

    def begin_cut(self, start: int) -> None:
        """Say that tokens are about to be cut out at ``start``: those behind it are not reused."""
        self._cut = start if self._cut is None else min(start, self._cut)

    def cut_out(self, start: int, end: int) -> None:
        """Say that the engine moved the rest into the place of [start, end)."""
        self.begin_cut(start)
        del self._tokens[start:end]
        self.logical -= max(0, min(self.logical, end) - start)
        self._forget_cut_at_end()

    def sync(self, held: Sequence[int]) -> None:
        """Say that the engine holds ``held``, after a failure: what stands counts as before."""
        stands = common_prefix(self._tokens, held)
        self._tokens = list(held)
        self._forget_cut_at_end()
        self.logical = min(self.logical, stands)

    def _forget_cut_at_end(self) -> None:
        if self._cut is not None and self._cut >= len(self._tokens):
            self._cut = None  # nothing is left that was computed with more before it

    def extend(self, tokens: Sequence[int]) -> None:
        """Say that the engine holds ``tokens`` more; the logical context is not changed."""
        self._tokens.extend(tokens)

    def replace(self, tokens: Sequence[int], logical: int, cut: int | None = None) -> None:
        """Say that the engine holds exactly ``tokens``, of which ``logical`` count."""
        self._tokens = list(tokens)
        self._cut = cut
        self.logical = logical
