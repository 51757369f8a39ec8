"""How many calls have begun, and how many more may."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from infercore.errors import PoolFullError

if TYPE_CHECKING:
    from infercore.session.jobs import Job
    from infercore.session.tally import Tally


def n_admitted(n_places: int, max_waiting: int) -> int:
    """Return how many calls there may be at the same time, those of all namespaces together."""
    return n_places + 2 * max_waiting


class Admission:
    """Counts the calls that evaluate, with a place or waiting for one; safe for threads.

    A namespace without a call is let in though others fill the queue, as long as those that have
    calls are not more than may wait: one caller's backlog does not shut out the rest.
    """

    def __init__(self, *, n_places: int, max_waiting: int, tally: Tally) -> None:
        self._n_places = n_places
        self._max_waiting = max_waiting
        self._tally = tally
        self._lock = threading.Lock()
        self._of_namespace: Counter[str] = Counter()
        self.n_calls = 0

    @property
    def n_most(self) -> int:
        """Calls that there may be at the same time."""
        return n_admitted(self._n_places, self._max_waiting)

    @property
    def n_waiting(self) -> int:
        """Calls that wait for a place."""
        return max(0, self.n_calls - self._n_places)

    def enter(self, namespace: str, *, force: bool = False) -> None:
        """Count a call. Raises `PoolFullError` where as many wait as may."""
        with self._lock:
            n_waiting = self.n_calls - self._n_places
            is_first = namespace not in self._of_namespace
            has_room = is_first and len(self._of_namespace) <= self._max_waiting
            if not force and n_waiting >= self._max_waiting and not has_room:
                ms = self._tally.step_ms
                raise PoolFullError(
                    n_waiting=max(0, n_waiting), retry_after=None if ms is None else ms / 1e3
                )
            self.n_calls += 1
            self._of_namespace[namespace] += 1

    def leave(self, namespace: str) -> None:
        """Count a call no more."""
        with self._lock:
            self.n_calls -= 1
            self._of_namespace[namespace] -= 1
            if not self._of_namespace[namespace]:
                del self._of_namespace[namespace]

    def count(self, job: Job, *, counts: bool) -> None:
        """Let ``job`` count as a call, or no more, as when it rests."""
        if job.counts_as_call != counts:
            job.counts_as_call = counts
            if counts:
                self.enter(job.sequence.namespace, force=True)
            else:
                self.leave(job.sequence.namespace)
