"""What an engine call costs on this machine: learnt from the calls, never assumed.

Whether several sessions in one call are faster than turns depends on file type, form of the cache,
flash attention, threads and processor; there is no rule. So the time of each call is taken, and
the choices follow the measurements. Pure: it is given times and reads no clock.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from infercore.session.compose import LENGTHS, round_down

SIZES = (128, 64, 32, 16, 8, 4, 2, 1)
"""Numbers of sequences that are tried, beside all that run."""
N_FIRST = 3
"""Of the first few times the least counts: a first call of a shape prepares things."""
WEIGHT = 0.25
"""Weight of a new time in a moving average."""
OUTLIER = 2.0
"""A time counts as at most this many times what was expected: a busy machine, a new shape."""
IN_A_ROW = 24
"""So many steps with a piece of prompt are followed by one without, to compare them with,"""
FEW_IN_A_ROW = 3
"""or so many, each of a length that is hardly known, or unlike what was expected by"""
SURPRISE = 0.15
"""so much: whether all calls take longer by now, or those with a piece, only that step can tell."""
MARGIN = 0.98
"""Fewer sequences a call must cost less than this part, a token, to be chosen."""
REFRESH = 16
"""Choices are made anew after so many calls."""
STALE = 1024
"""What was not tried for so many calls is tried once again."""
STEP_FACTOR = 2.25
"""A step with a piece of prompt takes so many times the step without (at worst below 2.5),"""
STEP_FACTOR_OF_MANY = 2.1
"""or, beside more than one sequence, so many times: there 2.25 had gaps beyond 2.5."""
STEP_MS = 250.0
"""And at most so long, or"""
SLOW_FACTOR = 1.5
"""so many times the step without, where that takes nearly as long by itself: a prompt goes on."""
FIRST_PIECE = 16
"""Prompt tokens of a step before anything is known of their cost."""
GROWTH = 0.25
"""A call that was never made, with twice the tokens, is hoped to take so much more: then tried."""
LEAP, LEAP_TOKENS = 1.5, 2
"""And it has at most so many times the tokens of one that is known, and so many more."""
N_TRIES = 2
"""So often a length is tried before its time is believed: the first may prepare things."""
FORGOTTEN = 256
"""A length that was too long is tried once more after so many calls, and, where it still was,"""
MOST_FORGOTTEN = 2048
"""after twice as many, up to these: a try that fails is a gap that somebody sees."""
LEAST_OF_PIECE = 0.05
"""At least this share of a call with a piece is the piece's, however long a step has become."""
DEPTHS = 128
"""Choices are made for so many tokens of a prompt together."""
FADING = 0.98
"""What a call showed of the cost of depth counts this much less with each later call."""


class _Time:
    """What calls of one kind take at the usual pace, and ``depth``: how far into prompts they were.

    A moving average, but of the first few the least. What was not made for ``stale`` calls counts
    half.
    """

    __slots__ = ("depth", "last", "n", "stale", "value")

    def __init__(self, stale: int = STALE) -> None:
        self.value, self.depth, self.n, self.last, self.stale = 0.0, 0.0, 0, 0, stale

    def is_forgotten(self, now: int) -> bool:
        return now - self.last > self.stale

    def add(self, value: float, now: int, depth: float = 0.0, expected: float = 0.0) -> None:
        """Take in ``value``, where ``expected`` was (0 = the average)."""
        if self.n < N_FIRST:
            weight = 1.0 if not self.n or value < self.value else 0.0
        else:
            weight = 0.5 if self.is_forgotten(now) else WEIGHT
            likely = expected or self.value
            value = min(OUTLIER * likely, max(likely / OUTLIER, value))
        self.value += weight * (value - self.value)
        self.depth += weight * (depth - self.depth)
        self.n += 1
        self.last = now


class _Call(NamedTuple):
    """A call with a piece of prompt that nothing was compared with yet."""

    n_tokens: int
    n_prompt: int
    ms: float
    depth: float


class CostModel:
    """Milliseconds of a call with n sequences and m prompt tokens, and what follows from them.

    ``batching`` is "auto", "always" or "never", as in `PoolConfig`; with ``step_tokens`` the tokens
    of a call are as many, whatever they cost; else a call with a piece of prompt takes at most
    ``max_step_ms`` (None = as `STEP_FACTOR` says). Not safe for threads: it belongs to whoever
    makes the calls.
    """

    def __init__(
        self,
        *,
        batching: str = "auto",
        step_tokens: int | None = None,
        max_step_ms: float | None = None,
    ) -> None:
        self._batching = batching
        self._step_tokens = step_tokens
        self._max_step_ms = max_step_ms
        self._step: dict[int, _Time] = {}  # by number of sequences, without a prompt
        self._mixed: dict[int, _Time] = {}  # with a prompt, by all tokens of the call
        self._deeper = _Slope()
        self._pace = 1.0  # what a step takes by now, over what steps of its kind take as a rule
        self._last: _Time | None = None  # the kind of the last step without a prompt
        self._calls: deque[_Call] = deque(maxlen=IN_A_ROW)  # since then, beside who runs
        self._n_surprises = 0
        self._now = 0
        self._per_call: dict[int, int] = {}
        self._pieces: dict[tuple[int, int], int] = {}
        self.takes_turns = batching == "never"
        """Whether the last choice was one sequence a call."""
        self.has_own_cells = False
        """Whether sequences have cells of their own: the engine then evaluates the first token of a
        piece with the tokens of those that run, and what is left of it, its rest, by itself."""

    @property
    def learns(self) -> bool:
        """Whether what calls took decides how many prompt tokens later ones take."""
        return self._step_tokens is None

    def record(self, n_running: int, n_prompt: int, elapsed_ms: float, depth: float = 0.0) -> None:
        """Take in what a call with a token of each of ``n_running``, and of prompts, took.

        ``depth`` tokens of the prompts were held before: those behind them look at them all. A call
        with guesses, or one that failed, is not to be told.
        """
        self._now += 1
        if not n_prompt:
            self._take_step(n_running, elapsed_ms)
        else:
            n_tokens = n_running + n_prompt
            if self.has_own_cells and n_running:
                n_tokens = n_prompt - 1
                step_ms = self.step_ms(n_running) or 0.0
                elapsed_ms = max(elapsed_ms - step_ms, LEAST_OF_PIECE * elapsed_ms)
            # Others, as at a prompt's end, come but once.
            if n_tokens and n_tokens == round_down(n_tokens):
                call = _Call(n_tokens, n_prompt, elapsed_ms, depth)
                if n_running:
                    self._keep(call)
                else:
                    self._take(call, self._pace)
        if self._now % REFRESH == 0 or self._now < REFRESH:
            self._per_call.clear()
            self._pieces.clear()

    def wants_step(self) -> bool:
        """Return whether the next step is to be one without a piece of prompt, to learn from."""
        n = len(self._calls)
        return n >= IN_A_ROW or (n >= FEW_IN_A_ROW and self._n_surprises >= FEW_IN_A_ROW)

    def _take_step(self, n_running: int, elapsed_ms: float) -> None:
        known = self._step.setdefault(n_running, _Time())
        is_another = known is not self._last and not self._calls
        if known.n < N_FIRST or is_another or not known.value:
            known.add(elapsed_ms / self._pace, self._now)
        else:
            change = elapsed_ms / known.value / self._pace
            pace = self._pace * min(OUTLIER, max(1.0 / OUTLIER, change))
            self._take_calls(pace)
            self._pace += (0.5 if self._calls else WEIGHT) * (pace - self._pace)
            known.n, known.last = known.n + 1, self._now
        self._calls.clear()
        self._n_surprises, self._last = 0, known

    def _keep(self, call: _Call) -> None:
        """Keep ``call`` until a step tells the pace: then it can be compared."""
        if not self.learns:
            return
        known = self._mixed.get(call.n_tokens)
        if known is None or known.n < N_TRIES or known.is_forgotten(self._now):
            self._take(call, self._pace)  # known at once, if not well
            self._n_surprises += 1
            return
        self._calls.append(call)
        expected = self._expected(known, call) * self._pace
        is_surprising = abs(call.ms / expected - 1.0) > SURPRISE if expected else False
        self._n_surprises = self._n_surprises + 1 if is_surprising else 0

    def _take_calls(self, pace: float) -> None:
        """Take in the calls since the last step, between which the pace became ``pace``."""
        n = len(self._calls)
        for i, call in enumerate(self._calls, 1):
            self._take(call, self._pace + (pace - self._pace) * i / n)

    def _expected(self, known: _Time, call: _Call) -> float:
        deeper = call.n_prompt * (call.depth - known.depth)
        return max(0.0, known.value + self._deeper.value * deeper)

    def _take(self, call: _Call, pace: float) -> None:
        known = self._mixed.setdefault(call.n_tokens, _Time(FORGOTTEN))
        is_new, was_forgotten = known.n < N_TRIES, known.is_forgotten(self._now)
        before, expected, ms = known.value, self._expected(known, call), call.ms / pace
        if not is_new:
            more_ms = min(ms, OUTLIER * before) - before
            self._deeper.add(call.n_prompt * (call.depth - known.depth), more_ms)
        known.add(ms, self._now, call.depth, expected)
        if is_new or was_forgotten:
            self._pieces.clear()
        if was_forgotten and not is_new:
            still = known.value > (1.0 - SURPRISE) * before
            known.stale = min(2 * known.stale, MOST_FORGOTTEN) if still else FORGOTTEN

    def step_ms(self, n_running: int) -> float | None:
        """Return the time of a call with one token of each of ``n_running``, None = not known.

        Between numbers that were measured it is a straight line, beyond them in proportion.
        """
        ms = self._step_at_usual_pace(n_running)
        return None if ms is None else ms * self._pace

    def _step_at_usual_pace(self, n_running: int) -> float | None:
        if n_running == 0:
            return 0.0
        known = self._step.get(n_running)
        if known is not None:
            return known.value
        below = max((n for n in self._step if n < n_running), default=None)
        above = min((n for n in self._step if n > n_running), default=None)
        if above is None:
            return None if below is None else self._step[below].value * n_running / below
        low, low_ms = (0, 0.0) if below is None else (below, self._step[below].value)
        share = (n_running - low) / (above - low)
        return low_ms + share * (self._step[above].value - low_ms)

    def per_call(self, n_running: int) -> int:
        """Return how many of ``n_running`` sequences a call should take; 1 = take turns.

        With "auto" the number that costs least a token; what is not known is tried.
        """
        if self._batching != "auto" or n_running < 2:  # noqa: PLR2004
            return 1 if self._batching == "never" else n_running
        chosen = self._per_call.get(n_running)
        if chosen is None:
            sizes = [n_running, *(n for n in SIZES if n < n_running)]
            untried = next(filter(self._is_untried, sizes), None)
            if untried is not None:
                return untried
            chosen = self._per_call[n_running] = self._cheapest(n_running)
            self.takes_turns = chosen == 1
        return chosen

    def _is_untried(self, n_running: int) -> bool:
        known = self._step.get(n_running)
        return known is None or known.n < N_FIRST or self._now - known.last > STALE

    def _cheapest(self, n_running: int) -> int:
        best = n_running
        for n in sorted((n for n in self._step if n < n_running), reverse=True):
            if self._step[n].value / n < MARGIN * self._step[best].value / best:
                best = n
        return best

    def prompt_tokens(self, n_running: int, depth: int = 0) -> int:
        """Return how many prompt tokens a call takes beside ``n_running`` sequences; at least 1.

        As many as keep it near `STEP_FACTOR` (or `STEP_FACTOR_OF_MANY`) times the call without
        them, and below `STEP_MS`, where ``depth`` tokens of the prompt are held.
        """
        if self._step_tokens is not None:
            return max(1, self._step_tokens - n_running)
        key = n_running, depth // DEPTHS
        n = self._pieces.get(key)
        if n is None:
            n = self._pieces[key] = self._piece(n_running, depth)
        return n

    def rounded(self, n_running: int, n_prompt: int, *, is_all: bool) -> int:
        """Return how many of ``n_prompt`` tokens make a call of one of `LENGTHS`; at least 1.

        What ``is_all`` that is wanted stays whole where a new length costs nothing.
        """
        if is_all and (self.has_own_cells or not self.learns):
            return n_prompt
        n_beside = -1 if self.has_own_cells else n_running
        n_tokens = n_beside + n_prompt
        return max(1, round_down(n_tokens) - n_beside) if n_tokens else 1

    def _piece(self, n_running: int, depth: int) -> int:
        """Return the longest piece whose call is expected to be short enough.

        A length that was not made yet is hoped to cost little more than the longest known below
        it, and so is one that was too long a while ago. One that is known never costs more, in
        proportion, than a shorter one that was made since.
        """
        step = self._step_at_usual_pace(n_running)
        if step is None:
            return FIRST_PIECE
        factor = STEP_FACTOR_OF_MANY if n_running > 1 else STEP_FACTOR
        most = max((self._max_step_ms or STEP_MS) / self._pace, SLOW_FACTOR * step)
        if self._max_step_ms is None:
            most = min(factor * step, most)
        n_beside, least = n_running, step
        if self.has_own_cells:
            n_beside, least, most = -1, 0.0, most - step
        fitting, below, below_ms, below_last = n_beside + 1, n_running, step, self._now
        for n in LENGTHS:
            if n <= n_beside:
                continue
            more = n / below - 1.0
            is_near = n <= LEAP * below + LEAP_TOKENS
            hoped = below_ms * (1.0 + GROWTH * more) if is_near else math.inf
            known, expected = self._mixed.get(n), hoped
            if known is not None and known.n >= N_TRIES:
                deeper_ms = self._deeper.value * (n - n_beside) * (depth - known.depth)
                there = max(least, known.value + deeper_ms)
                expected = there
                if known.last < below_last:
                    expected = min(there, below_ms * (1.0 + more) or there)
                below, below_ms, below_last = n, expected, known.last
                if expected > most and known.is_forgotten(self._now):
                    expected = hoped
            if expected <= most:
                fitting = n
        return fitting - n_beside


class _Slope:
    """What a prompt token costs more for each token before it: a line through what was seen."""

    __slots__ = ("_xx", "_xy")

    def __init__(self) -> None:
        self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """Take in ``y`` milliseconds more at ``x`` tokens times tokens before them more."""
        self._xx = FADING * self._xx + x * x
        self._xy = FADING * self._xy + x * y

    @property
    def value(self) -> float:
        """Milliseconds; 0 where nothing is known."""
        return max(0.0, self._xy / self._xx) if self._xx else 0.0
