"""Where each job of a pool stands: it has a place, waits for one, or rests."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from infercore.session.jobs import Generating
from infercore.session.waiting import Waiting

if TYPE_CHECKING:
    from infercore.session.jobs import Job
    from infercore.session.sequence import Sequence

_EXPECTED_S = 0.1
"""So long after its call a caller may come back at once, to which HTTP adds its time."""
_MOST_EXPECTED = 64


class Roster:
    """The jobs that have not ended.

    ``running`` have places. ``resting`` are ahead of their readers, and want none. ``alone`` are
    those that share no engine call with others, in the order in which they have one. ``n_changes``
    counts how often another one ran.
    """

    def __init__(self) -> None:
        self.waiting = Waiting()
        self.running: list[Job] = []
        self.resting: set[Generating] = set()
        self.alone: deque[Job] = deque()
        self.n_changes = 0
        self._age = 0
        self._ends: deque[float] = deque(maxlen=_MOST_EXPECTED)
        self._leading: dict[Sequence, float] = {}

    def every(self) -> list[Job]:
        """Return all of them."""
        return [*self.running, *self.waiting, *self.resting]

    def enter(self, job: Job) -> None:
        """Let ``job`` wait for a place, as the youngest, or before all whose call has not begun."""
        self._age += 1
        job.age = self._age
        if self._ends:
            self._ends.pop()
        self.expect_no_more(job.sequence)
        if job.goes_on:
            self.waiting.resume(job)
        else:
            self.waiting.append(job)

    def expect(self, job: Job) -> None:
        """Expect that the caller of ``job``, which has just ended well, comes back with another."""
        now = time.perf_counter()
        self._ends.append(now)
        if job.leads_on:
            self._leading[job.sequence] = now

    def expected(self) -> tuple[int, float]:
        """Return how many callers are expected, and when the last of their jobs ended."""
        ends, since = self._ends, time.perf_counter() - _EXPECTED_S
        while ends and ends[0] < since:
            ends.popleft()
        return len(ends), ends[-1] if ends else 0.0

    def expect_no_more(self, sequence: Sequence) -> None:
        """Expect nothing of ``sequence``, whose session is closed."""
        self._leading.pop(sequence, None)

    def following(self) -> tuple[int, float]:
        """Return how many calls go on at once, as `Job.leads_on` says, and since when the last."""
        leading = self._leading
        if not leading:
            return 0, 0.0
        since = time.perf_counter() - _EXPECTED_S
        for sequence in [each for each, ended in leading.items() if ended < since]:
            del leading[sequence]
        return len(leading), max(leading.values(), default=0.0)

    def give_place(self, job: Job) -> None:
        """Let ``job``, which was taken out of those waiting, run."""
        self.running.append(job)
        self.n_changes += 1
        if job.waiting_since is not None:
            job.waited_s += time.perf_counter() - job.waiting_since
            job.waiting_since = None

    def lose_place(self, job: Job) -> None:
        """Let ``job`` wait again, as the next one."""
        self.leave(job)
        job.waiting_since = time.perf_counter()
        self.waiting.put_back(job)

    def rest(self, job: Generating, now: float) -> None:
        """Take the place of ``job``, which its reader has not caught up with."""
        self.leave(job)
        job.rested_since = now
        self.resting.add(job)

    def wake(self, job: Generating) -> None:
        """Let ``job``, which rested, wait for a place before those that have not begun."""
        job.rests = False
        self.resting.discard(job)
        job.waiting_since = time.perf_counter()
        self._age += 1
        job.age = self._age
        self.waiting.resume(job)

    def leave(self, job: Job) -> None:
        """Let ``job`` stand nowhere."""
        self.n_changes += 1
        if job in self.running:
            self.running.remove(job)
        elif job in self.waiting:
            self.waiting.remove(job)
        if isinstance(job, Generating):
            self.resting.discard(job)
        if job in self.alone:
            self.alone.remove(job)

    def youngest(self) -> Job:
        """Return who got its place last."""
        return max(self.running, key=_age)

    def lose_all_places(self) -> None:
        """Let all that run wait again, the oldest first."""
        now = time.perf_counter()
        self.n_changes += 1
        for job in sorted(self.running, key=_age, reverse=True):
            self.running.remove(job)
            job.waiting_since = now
            self.waiting.put_back(job)

    def next_deadline(self) -> float | None:
        """Return when (`time.perf_counter`) something is to be done though nobody calls."""
        times = [j.deadline for j in (*self.running, *self.waiting) if j.deadline is not None]
        for job in self.resting:
            if job.deadline is not None:
                times.append(job.deadline)
            if job.reader_timeout is not None:
                times.append(job.rested_since + job.reader_timeout)
        return min(times, default=None)


def _age(job: Job) -> int:
    return job.age
