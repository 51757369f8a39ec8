"""How many calls have begun, and how many more may."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from infercore.errors import PoolFullError

if TYPE_CHECKING:
    from infercore.session.jobs import Job
    from infercore.session.tally import Tally


class Admission:
    """Counts the calls that evaluate, with a place or waiting for one; safe for threads."""

    def __init__(self, *, n_places: int, max_waiting: int, tally: Tally) -> None:
        self._n_places = n_places
        self._max_waiting = max_waiting
        self._tally = tally
        self._lock = threading.Lock()
        self.n_calls = 0

    @property
    def n_waiting(self) -> int:
        """Calls that wait for a place."""
        return max(0, self.n_calls - self._n_places)

    def enter(self, *, force: bool = False) -> None:
        """Count a call. Raises `PoolFullError` where as many wait as may."""
        with self._lock:
            n_waiting = self.n_calls - self._n_places
            if not force and n_waiting >= self._max_waiting:
                ms = self._tally.step_ms
                raise PoolFullError(
                    n_waiting=max(0, n_waiting), retry_after=None if ms is None else ms / 1e3
                )
            self.n_calls += 1

    def leave(self) -> None:
        """Count a call no more."""
        with self._lock:
            self.n_calls -= 1

    def count(self, job: Job, *, counts: bool) -> None:
        """Let ``job`` count as a call, or no more, as when it rests."""
        if job.counts_as_call != counts:
            job.counts_as_call = counts
            if counts:
                self.enter(force=True)
            else:
                self.leave()
