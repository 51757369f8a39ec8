"""The work of one call on a sequence, and how its caller hears of it.

A job is made by the caller and changed by whoever owns the context alone; what both use is put so
that no lock is needed: a flag that only goes up, a count that one side writes, a queue.
"""

from __future__ import annotations

import sys
import time
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any

from infercore.errors import CallTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Tokens

    from infercore.protocols.spi import FloatArray
    from infercore.session.generation import Ahead, Generation, Shown
    from infercore.session.sequence import Sequence
    from infercore.values.session import StreamChunk


class Latch:
    """Opens once; a thread may wait for it, or be called when it opens."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._lock.acquire()
        self.is_open = False
        self._callbacks: list[Callable[[], object]] = []

    def open(self) -> None:
        """Let all go on who wait."""
        self.is_open = True
        self._lock.release()
        while self._callbacks:
            self._callbacks.pop()()

    def wait(self, timeout: float = -1) -> bool:
        """Wait until it is open; False where ``timeout`` seconds were not enough."""
        if self.is_open:
            return True
        if not self._lock.acquire(timeout=timeout):
            return False
        self._lock.release()
        return True

    def when_open(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` when it opens, or now where it has; maybe twice."""
        self._callbacks.append(callback)
        if self.is_open:
            callback()


_AGAIN_S = 0.02
"""Seconds after which a late call is looked at again: its engine call may have begun just then."""


def _nothing(_: object) -> None:
    """What a job calls that nobody works on."""


class Job:
    """Lets the engine hold the first ``n_keep`` of a sequence's tokens and ``tokens`` behind them.

    Where ``then`` is given it is called with the sequence once all is held, by the owner of the
    context and between two steps; ``result`` is what it returned. ``error`` is what ended the job.
    ``n_base`` tokens were held when it first got a place, of which ``n_shared`` were copied from
    another sequence and ``n_restored`` came from memory or disk. ``goes_on`` says that its call
    has had a place, so that it is placed before calls that had none; ``leads_on`` that its caller
    submits the next job at once.
    """

    # Attributes beyond 30 lie in a dictionary, which a step would look through for each job.
    __slots__ = (
        "age", "ahead", "called_at", "cancelled", "counts_as_call", "deadline", "done", "error",
        "failures", "generation", "goes_on", "is_prompt", "leads_on", "n_ahead", "n_asked",
        "n_base", "n_before", "n_given", "n_held", "n_keep", "n_limit", "n_looked", "n_missing",
        "n_restored", "n_shared", "n_unshown", "need_row", "on_change", "placed_once", "primed",
        "result", "sequence", "served", "then", "tokens", "waited_s", "waiting_since",
    )  # fmt: skip

    def __init__(
        self,
        sequence: Sequence,
        tokens: Tokens[int] = (),
        *,
        n_keep: int | None = None,
        need_row: bool = True,
        deadline: float | None = None,
        called_at: float | None = None,
        then: Callable[[Sequence], Any] | None = None,
    ) -> None:
        self.sequence = sequence
        self.generation: Generation | None = None
        self.ahead: Ahead | None = None
        self.primed = False
        self.n_given = self.n_asked = self.n_unshown = 0
        self.n_ahead = sys.maxsize
        self.n_looked: int | None = None
        self.tokens = tokens
        self.n_keep = len(sequence.tokens) if n_keep is None else n_keep
        self.need_row = need_row
        self.deadline = deadline
        self.then = then
        self.done = Latch()
        self.on_change: Callable[[Job], object] = _nothing
        self.error: BaseException | None = None
        self.result: Any = None
        self.cancelled = False
        self.counts_as_call = False
        self.goes_on = self.leads_on = False
        self.n_before = self.n_base = 0
        self.n_shared = self.n_restored = 0
        self.placed_once = False
        self.failures = 0
        now = time.perf_counter()
        self.called_at = now if called_at is None else called_at
        self.waiting_since: float | None = now
        self.waited_s = 0.0
        # What `compose` reads.
        self.n_missing = self.n_held = 0
        self.n_limit: int | None = None
        self.is_prompt = True
        self.age = 0
        self.served = -1

    def is_over(self, now: float) -> bool:
        """Whether its caller wants no more of it: it was cancelled, or its time is over."""
        return self.cancelled or (self.deadline is not None and now >= self.deadline)

    def wait(self) -> None:
        """Wait for the end; an interruption cancels the job and waits for that."""
        try:
            if self.deadline is not None:
                timeout = max(0.0, self.deadline - time.perf_counter())
                while not self.done.wait(timeout):
                    self.on_change(self)
                    timeout = _AGAIN_S
            self.done.wait()
        except BaseException:
            self.cancelled = True
            self.on_change(self)
            self.done.wait()
            raise

    def late(self, now: float) -> CallTimeoutError:
        """Return the error of a call whose time is over."""
        return CallTimeoutError(
            elapsed_ms=(now - self.called_at) * 1e3, resident_tokens=self.sequence.n_held
        )


class Looking(Job):
    """Lets all tokens of a sequence be evaluated anew, each with its row of logits.

    ``each`` gets the place of a token and its row, once and in order; ``n_looked`` is how many it
    got. No call has more than `MOST_ROWS` tokens of it.
    """

    MOST_ROWS = 64

    __slots__ = ("_each",)

    def __init__(
        self,
        sequence: Sequence,
        each: Callable[[int, FloatArray], object],
        *,
        n_keep: int,
        deadline: float | None = None,
        called_at: float | None = None,
    ) -> None:
        super().__init__(sequence, n_keep=n_keep, deadline=deadline, called_at=called_at)
        self._each = each
        self.n_looked: int = 0

    def look(self, row: Callable[[int], FloatArray], first: int, n: int) -> None:
        """Take the rows of the last ``n`` tokens held, the first of which is row ``first``.

        Some may have been taken before: of tokens that were lost since, and evaluated again.
        """
        self.sequence.cut = None
        n_before = self.sequence.n_held - n
        for i in range(self.n_looked - n_before, n):
            self._each(self.n_looked, row(first + i))
            self.n_looked += 1


class Item:
    """What a generation gives its reader beside what is shown: its end, or what it changes.

    Most of what a reader gets is just `Shown`.
    """

    __slots__ = ("chunk", "cuts", "error", "final", "make")

    def __init__(
        self,
        chunk: StreamChunk | None = None,
        *,
        error: BaseException | None = None,
        final: bool = False,
        make: Callable[[], StreamChunk] | None = None,
    ) -> None:
        self.chunk = chunk
        self.make = make
        """Makes the chunk, behind those of the items before."""
        self.error = error
        self.final = final
        self.cuts: Tokens[tuple[int, int]] = ()
        """What was taken out of the tokens since the item before, each as they were by then."""


class Generating(Job):
    """Generates behind a sequence's tokens until an end is reached, or the reader goes away.

    ``n_asked`` counts the items that the reader asked for (the reader alone writes it), ``n_given``
    those it was given; of these ``n_unshown`` were tokens without text of their own, which reach no
    reader (who shows them writes it). No more than ``n_ahead`` are given beyond those asked for: a
    generation that is further on rests, and gives its place away.
    """

    __slots__ = (
        "cuts", "dropped", "items", "n_batched", "n_steps", "n_sure", "on_item", "reader_timeout",
        "rested_since", "rests", "shift_from", "usage", "window",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913  (each is its own fact)
        self,
        sequence: Sequence,
        generation: Generation,
        *,
        n_keep: int,
        n_ahead: int,
        window: int,
        shift_from: int | None,
        usage: dict[str, Any],
        deadline: float | None = None,
        reader_timeout: float | None = None,
    ) -> None:
        super().__init__(sequence, n_keep=n_keep, deadline=deadline, called_at=usage["started"])
        self.generation: Generation = generation
        self.n_ahead = n_ahead
        self.window = window
        self.shift_from = shift_from
        self.usage = usage
        self.reader_timeout = reader_timeout
        self.items: SimpleQueue[Shown | Item] = SimpleQueue()
        self.on_item: Callable[[], object] | None = None
        self.rests = False
        self.rested_since = 0.0
        self.dropped = False
        self.n_sure = 0
        self.cuts: list[tuple[int, int]] = []
        self.n_steps = self.n_batched = 0

    @property
    def is_ahead(self) -> bool:
        """Whether it has given as much as it may before its reader asks again."""
        return self.n_given - self.n_unshown - self.n_asked >= self.n_ahead

    def take_cuts(self) -> Tokens[tuple[int, int]]:
        """Return what was cut out since the item before."""
        cuts, self.cuts = self.cuts, []
        return cuts
