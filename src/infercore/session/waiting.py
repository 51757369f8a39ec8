"""Calls that wait for a place: those of a namespace in order, the namespaces in turn."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infercore.session.jobs import Job


class Waiting:
    """A queue a namespace; whose call was taken last is the last to have one taken again.

    So one caller's hundred calls do not keep another's from a place.
    """

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Job]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Job]:
        for queue in list(self._queues.values()):
            yield from list(queue)

    def __contains__(self, job: Job) -> bool:
        return job in self._queues.get(job.sequence.namespace, ())

    def append(self, job: Job) -> None:
        """Let ``job`` wait behind those of its namespace."""
        self._queues.setdefault(job.sequence.namespace, deque()).append(job)

    def resume(self, job: Job) -> None:
        """Let ``job``, whose call has begun, wait behind such ones and before the others."""
        queue = self._queues.setdefault(job.sequence.namespace, deque())
        new = (i for i, other in enumerate(queue) if not (other.placed_once or other.goes_on))
        n_before = next(new, len(queue))
        queue.insert(n_before, job)

    def put_back(self, job: Job) -> None:
        """Let ``job``, which was taken too early or lost its place, be the next one."""
        namespace = job.sequence.namespace
        self._queues.setdefault(namespace, deque()).appendleft(job)
        self._queues.move_to_end(namespace, last=False)

    def take(self) -> Job:
        """Return the next one, which waits no more."""
        namespace, queue = next(iter(self._queues.items()))
        job = queue.popleft()
        self._queues.move_to_end(namespace)
        if not queue:
            del self._queues[namespace]
        return job

    def remove(self, job: Job) -> None:
        """Let ``job`` wait no more."""
        namespace = job.sequence.namespace
        self._queues[namespace].remove(job)
        if not self._queues[namespace]:
            del self._queues[namespace]
