"""What becomes of the jobs of an engine call that failed."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from infercore.errors import DecodeAbortedError, SessionFatalError

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Jobs

    from infercore.session.endings import Endings
    from infercore.session.jobs import Job
    from infercore.session.places import Places
    from infercore.session.placing import Placing
    from infercore.session.roster import Roster
    from infercore.session.sequence import Sequence
    from infercore.session.shared_engine import SharedEngine
    from infercore.session.tally import Tally

_MOST_ABORTS = 3
"""So often a call that nobody cancelled is tried again where the engine says that it was."""


class Recovery:
    """Tries each sequence once more alone, and opens an engine anew that cannot be trusted.

    At most ``max_restarts`` times within ``restart_window`` seconds; then all end.
    """

    def __init__(  # noqa: PLR0913  (each is a part of its own)
        self,
        *,
        engine: SharedEngine,
        roster: Roster,
        sequences: set[Sequence],
        places: Places,
        placing: Placing,
        endings: Endings,
        tally: Tally,
        max_restarts: int,
        restart_window: float,
    ) -> None:
        self._engine = engine
        self._roster = roster
        self._sequences = sequences
        self._places = places
        self._placing = placing
        self._endings = endings
        self._tally = tally
        self._max_restarts = max_restarts
        self._restart_window = restart_window
        self._restarts: deque[float] = deque()
        self._suspects: set[Sequence] = set()
        self.instead: Callable[[Jobs[Sequence]], object] | None = None
        """What is done in place of opening the engine anew, with those who may be the cause."""

    def after(self, error: BaseException, jobs: Jobs[Job]) -> None:
        """Go on after a call of ``jobs`` failed: who fails alone ends."""
        if isinstance(error, SessionFatalError):
            self.restart(error, [job.sequence for job in jobs])
            return
        self._placing.look_at_engine()
        if isinstance(error, DecodeAbortedError):
            now = time.perf_counter()
            for job in jobs:
                job.failures += 1
                if job.cancelled or self._endings.closed:
                    self._endings.cancel(job)
                elif job.is_over(now):
                    self._endings.expire(job, now)
                elif job.failures > _MOST_ABORTS:
                    self._endings.end(job, error)
            return
        if len(jobs) == 1:
            self._endings.end(jobs[0], error)
            return
        for job in jobs:
            if job not in self._roster.alone:
                self._roster.alone.append(job)

    def forget_suspects(self) -> None:
        """A call went well: nobody is suspected any more."""
        if self._suspects:
            self._suspects.clear()

    def restart_with_all(self, error: SessionFatalError) -> None:
        """Open the engine anew; any of those that run may have been the cause."""
        self.restart(error, [job.sequence for job in self._roster.running])

    def restart(self, error: SessionFatalError, suspects: list[Sequence]) -> None:
        """Open the engine anew, or let all end where that was done too often."""
        if self.instead is not None:
            self.instead(suspects)
        now = time.perf_counter()
        while self._restarts and now - self._restarts[0] > self._restart_window:
            self._restarts.popleft()
        for sequence in suspects:
            if sequence in self._suspects and sequence.job is not None:
                self._endings.end(sequence.job, SessionFatalError(str(error), cause=error.cause))
        self._suspects = set(suspects)
        for sequence in self._sequences:
            sequence.lose()
        if len(self._restarts) >= self._max_restarts:
            self._endings.fail(error)
            return
        self._restarts.append(now)
        try:
            self._engine.reopen()
        except Exception:  # noqa: BLE001  (each job gets the first cause)
            self._endings.fail(error)
            return
        self._tally.n_restarts += 1
        self._places.free_all()
        self._roster.lose_all_places()
        self._roster.alone = deque(s.job for s in suspects if s.job is not None)
