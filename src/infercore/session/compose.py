"""What one engine call evaluates: a token of each running session, then pieces of prompts.

Pure: sequences in, a plan out. Nothing here knows an engine, a lock or a clock; what a call costs
is asked of a cost model. There are no phases: each sequence has tokens that it wants and tokens
that are held, and a step lets held catch up.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence


class Wanting(Protocol):
    """**Protocol:** what `compose` reads of a sequence that has work to do."""

    n_missing: int
    """Tokens that are wanted and not held; guesses, which may be left out, come last."""
    n_held: int
    """Tokens held: where the next one is put."""
    n_limit: int | None
    """Most tokens of its next piece (a checkpoint follows, or one at a time); None = any."""
    is_prompt: bool
    """Whether it still evaluates what was given to it, or what it lost, rather than generates."""
    age: int
    """When its call came, as a count: the smaller, the older."""
    served: int
    """The number of the step that it was last part of; -1 = none."""


S = TypeVar("S", bound=Wanting)


class Costs(Protocol):
    """**Protocol:** what `compose` asks of a cost model."""

    def per_call(self, n_running: int) -> int:
        """Return how many of ``n_running`` sequences a call should take: 1 = take turns."""
        ...

    def prompt_tokens(self, n_running: int, depth: int = 0) -> int:
        """Return how many prompt tokens may go beside ``n_running`` single ones; at least 1.

        ``depth`` tokens of the prompt are held already.
        """
        ...

    def rounded(self, n_running: int, n_prompt: int, *, is_all: bool) -> int:
        """Return how many of ``n_prompt`` tokens make a call of one of few lengths; at least 1.

        ``is_all`` says that no more are wanted: what is left over takes a call of its own.
        """
        ...

    def wants_step(self) -> bool:
        """Return whether a step without a piece of prompt is due, to learn what it takes now."""
        ...


@attrs.frozen
class Budget:
    """What bounds one step.

    ``n_tokens`` is the most tokens of the call (what n_step_tokens, n_batch and the free cells
    allow), ``n_sequences`` the most sequences. With ``multiple`` each call has one sequence, and
    pieces of prompts end at multiples of it, counted from the start of the sequence: then a session
    has the same bits beside others as alone.
    """

    n_tokens: int
    n_sequences: int
    multiple: int | None = None


@attrs.frozen
class StepPlan(Generic[S]):
    """``parts`` are sequences, each once, with how many tokens of it are evaluated, in order.

    ``n_running`` of them generate; ``n_prompt`` tokens belong to the others.
    """

    parts: Sequence[tuple[S, int]]
    n_running: int
    n_prompt: int

    @property
    def n_tokens(self) -> int:
        """Tokens of the call."""
        return sum(n for _, n in self.parts)


LENGTHS: tuple[int, ...] = (
    *range(1, 17),
    *(quarters * 2**k for k in range(2, 7) for quarters in (5, 6, 7, 8)),
    *(768, 1024, 1536, 2048),
)
"""The lengths of a call that mixes: few, because a new one costs some engines tens of ms."""

_age = attrgetter("age")
_served = attrgetter("served")


def round_down(n: int) -> int:
    """Return the largest of `LENGTHS` up to ``n``; beyond the last, its largest multiple."""
    last = LENGTHS[-1]
    return n - n % last if n > last else LENGTHS[bisect_right(LENGTHS, n) - 1]


def compose(sequences: Sequence[S], budget: Budget, costs: Costs) -> StepPlan[S]:
    """Return the next engine call for ``sequences``, all of which want at least a token.

    A sequence that is alone gets as much as the budget allows: how its prompt is split does not
    depend on what was measured. So do prompts of which none generates yet. Else each running one
    gets its token, and what the cost model allows beside them goes to the prompts, oldest first,
    of which the first has at least one token. Where the budget has no room for all that, or fewer
    at once are faster, those take turns that waited longest. The plan is empty only where
    ``sequences`` or the budget is.
    """
    if not sequences or budget.n_tokens < 1 or budget.n_sequences < 1:
        return StepPlan((), 0, 0)
    if budget.multiple is not None or budget.n_sequences == 1:
        return _single(sequences, budget, costs)
    if len(sequences) == 1:
        return _alone(sequences[0], budget.n_tokens)
    prompts = [sequence for sequence in sequences if sequence.is_prompt]
    if not prompts:
        return _running(sequences, budget, costs)
    if len(prompts) == len(sequences):
        return StepPlan(*_pieces([], prompts, budget.n_tokens, budget.n_sequences))
    running = [sequence for sequence in sequences if not sequence.is_prompt]
    return _mixed(running, prompts, budget, costs)


def _alone(sequence: S, n_tokens: int) -> StepPlan[S]:
    n = _bounded(sequence, n_tokens)
    return StepPlan(((sequence, n),), *((0, n) if sequence.is_prompt else (1, 0)))


def _bounded(sequence: Wanting, n: int) -> int:
    """Return how many tokens of ``sequence`` a piece of at most ``n`` has."""
    limit = sequence.n_limit
    most = min(n, sequence.n_missing)
    return most if limit is None else max(1, min(most, limit))


def _single(sequences: Sequence[S], budget: Budget, costs: Costs) -> StepPlan[S]:
    """One sequence a call: the one that waited longest; of prompts only the oldest has a turn."""
    running = [sequence for sequence in sequences if not sequence.is_prompt]
    prompts = [sequence for sequence in sequences if sequence.is_prompt]
    turns = [*running, min(prompts, key=_age)] if prompts else running
    chosen = min(turns, key=lambda sequence: (sequence.served, sequence.age))
    n_tokens = budget.n_tokens
    if budget.multiple is not None:
        n_tokens = min(n_tokens, budget.multiple - chosen.n_held % budget.multiple)
    elif chosen.is_prompt and running:
        n_tokens = min(n_tokens, max(1, costs.prompt_tokens(len(running), chosen.n_held)))
    return _alone(chosen, n_tokens)


def _running(sequences: Sequence[S], budget: Budget, costs: Costs) -> StepPlan[S]:
    """A token of each, or of those that waited longest; then guesses, where there is room."""
    n = min(budget.n_tokens, budget.n_sequences, costs.per_call(len(sequences)))
    chosen = longest_waiting(sequences, max(1, n))
    return StepPlan(_with_guesses(chosen, budget.n_tokens), len(chosen), 0)


def longest_waiting(sequences: Sequence[S], n: int) -> Sequence[S]:
    """Return ``n`` of ``sequences``, or all: those whose last step lies furthest back."""
    if n >= len(sequences):
        return sequences
    return sorted(sequences, key=lambda sequence: (sequence.served, sequence.age))[:n]


def _with_guesses(chosen: Sequence[S], n_tokens: int) -> list[tuple[S, int]]:
    """Return what each of ``chosen`` evaluates: its token, and its guesses in what is left over."""
    spare = n_tokens - len(chosen)
    parts = []
    for sequence in chosen:
        n = 1
        if sequence.n_missing > 1 and spare > 0:
            n = _bounded(sequence, spare + 1)
            spare -= n - 1
        parts.append((sequence, n))
    return parts


def _mixed(running: list[S], prompts: list[S], budget: Budget, costs: Costs) -> StepPlan[S]:
    n_most = min(budget.n_tokens, budget.n_sequences)
    if len(running) >= n_most:  # no room for all: the oldest prompt takes turns with them
        turns = [*running, min(prompts, key=_age)]
        chosen = longest_waiting(turns, n_most)
        n_prompt = sum(1 for sequence in chosen if sequence.is_prompt)
        return StepPlan([(sequence, 1) for sequence in chosen], len(chosen) - n_prompt, n_prompt)
    n_running, parts = len(running), [(sequence, 1) for sequence in running]
    if costs.wants_step():
        return StepPlan(parts, n_running, 0)
    n_fitting = costs.prompt_tokens(n_running, min(prompts, key=_age).n_held)
    room = min(budget.n_tokens - n_running, max(1, n_fitting))
    wanted = sum(map(_missing, prompts))
    n_prompt = costs.rounded(n_running, min(room, wanted), is_all=room >= wanted)
    return StepPlan(*_pieces(parts, prompts, n_prompt, budget.n_sequences))


_missing = attrgetter("n_missing")


def _pieces(
    parts: list[tuple[S, int]], prompts: list[S], n_tokens: int, n_sequences: int
) -> tuple[list[tuple[S, int]], int, int]:
    """Add pieces of ``prompts``, oldest first, of ``n_tokens`` in all."""
    n_running, left = len(parts), n_tokens
    for sequence in sorted(prompts, key=_age):
        if left < 1 or len(parts) >= n_sequences:
            break
        n = _bounded(sequence, left)
        parts.append((sequence, n))
        left -= n
    return parts, n_running, n_tokens - left
