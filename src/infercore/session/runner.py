"""In whose thread a scheduler's steps are taken: one thread that owns its context."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty
from typing import TYPE_CHECKING

from infercore.engine.gate import fork_count
from infercore.errors import (
    InferCoreError,
    InvalidStateError,
    SessionBusyError,
    SessionFatalError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from infercore.session.jobs import Job
    from infercore.session.scheduler import Scheduler
    from infercore.session.sequence import Sequence

    T = TypeVar("T")

_END_SECONDS = 10.0
_PAUSE_S = 0.02
_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


class Owner:
    """The thread that owns a scheduler's context; it starts with the first job.

    It does not keep the process alive. In a child of `os.fork` there is no such thread: every call
    raises `InvalidStateError` there.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._born = fork_count()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._waiters: ThreadPoolExecutor | None = None
        _owners.add(self)

    @property
    def is_here(self) -> bool:
        """Whether the caller is the owner's thread, or in a process without it."""
        return threading.current_thread() is self._thread or self._born != fork_count()

    def submit(self, job: Job) -> None:
        """Let ``job`` be worked on; it does not wait. Raises what `check` raises."""
        self.check()
        self._start()
        self.scheduler.submit(job)
        self._see_to_it()

    def _see_to_it(self) -> None:
        """Where the thread has ended meanwhile, do what it can no longer do: refuse."""
        scheduler = self.scheduler
        if scheduler.ended:
            _do_all(scheduler)
            scheduler.outbox.send()

    def run(self, job: Job) -> None:
        """Let ``job`` be worked on and wait for its end. Raises its error."""
        self.submit(job)
        job.wait()
        if job.error is not None:
            raise job.error

    def check(self) -> None:
        """Raise unless a call may be made from here."""
        if self._born != fork_count():
            raise InvalidStateError(
                "this pool was made before os.fork(), which does not copy its thread; open a "
                "new one in the child",
                operation="use",
                state="forked",
            )
        if threading.current_thread() is self._thread:
            raise SessionBusyError(
                "a callback of a generation cannot call sessions of its own pool: they would wait "
                "for each other"
            )

    def waiters(self) -> ThreadPoolExecutor:
        """Return the threads in which the calls of tasks wait.

        There are enough for all that may be admitted, so that the pool decides who is next.
        """
        with self._lock:
            if self._waiters is None:
                n = self.scheduler.admission.n_most + 2  # each starts when it is needed
                self._waiters = ThreadPoolExecutor(n, thread_name_prefix="infercore-waiter")
            return self._waiters

    def _start(self) -> None:
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None and not self.scheduler.ended:
                self._thread = threading.Thread(
                    target=_work, args=(self.scheduler,), name="infercore-pool", daemon=True
                )
                self._thread.start()

    def let_go(self, sequence: Sequence) -> None:
        """Let the owner forget ``sequence``; where it works for others that is after its step."""
        done = threading.Event()

        def forgetting() -> None:
            try:
                self.scheduler.forget(sequence)
            finally:
                done.set()

        self._start()
        self.scheduler.post(forgetting)
        self._see_to_it()
        if not self.scheduler.n_running:
            done.wait()

    def ask(self, work: Callable[[], T]) -> T:
        """Let the owner do ``work`` between two steps; return what it returns."""
        self.check()
        found: list[T] = []
        failed: list[BaseException] = []
        done = threading.Event()

        def doing() -> None:
            try:
                found.append(work())
            except BaseException as error:  # noqa: BLE001  (raised by the one who asked)
                failed.append(error)
            finally:
                done.set()

        self._start()
        self.scheduler.post(doing)
        self._see_to_it()
        done.wait()
        if failed:
            raise failed[0]
        return found[0]

    def stop(self, *, wait: bool = True) -> None:
        """End all jobs, close the context and end the thread; idempotent."""
        if self._born != fork_count():
            return
        scheduler = self.scheduler
        self._waiters = None  # calls that come later are refused in others
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    scheduler.ended = True
                    scheduler.close()
            if scheduler.ended:
                self._see_to_it()
                return
        scheduler.stopping = True
        scheduler.wake()
        if not wait or threading.current_thread() is self._thread:
            return
        with self._lock:  # where another call starts it, it has started
            thread = self._thread
        if thread is not None:
            thread.join(0.02)
            until = time.perf_counter() + _END_SECONDS
            while thread.is_alive() and time.perf_counter() < until:
                scheduler.abort()
                thread.join(0.05)


def _work(scheduler: Scheduler) -> None:
    """Take steps until the scheduler is asked to stop."""
    inbox, idle = scheduler.inbox, False
    try:
        while not scheduler.stopping:
            if idle:
                _wait(scheduler)
            while not inbox.empty():
                scheduler.do(inbox.get())
            _gather(scheduler)
            idle = not scheduler.step()
    except BaseException as error:  # noqa: BLE001  (nobody may be left waiting)
        scheduler.endings.fail(SessionFatalError(f"the pool's thread failed: {error}", cause=error))
    finally:
        scheduler.close()
        scheduler.ended = True
        _do_all(scheduler)
        scheduler.outbox.send()
        scheduler.outbox.close()


def _gather(scheduler: Scheduler) -> None:
    """Do what is posted while calls are waited for that may begin together."""
    while (until := scheduler.gathers_until()) is not None:
        _move_out_ahead(scheduler)
        try:
            work = scheduler.inbox.get(timeout=max(0.0, until - time.perf_counter()))
        except Empty:
            return
        scheduler.do(work)


def _move_out_ahead(scheduler: Scheduler) -> None:
    """Use a pause for what who comes next would have to wait for."""
    while scheduler.inbox.empty() and scheduler.places.has_ahead:
        scheduler.do(scheduler.places.move_out_ahead)


def _do_all(scheduler: Scheduler) -> None:
    """Do what is left of an owner that has ended; several threads may."""
    while True:
        try:
            work = scheduler.inbox.get_nowait()
        except Empty:
            return
        scheduler.do(work)


def _wait(scheduler: Scheduler) -> None:
    """Wait until somebody wants something, or a time is over."""
    _move_out_ahead(scheduler)
    deadline = scheduler.roster.next_deadline()
    timeout = None if deadline is None else max(0.0, deadline - time.perf_counter()) + 1e-4
    try:
        work = scheduler.inbox.get(timeout=_PAUSE_S if timeout is None else timeout)
    except Empty:
        if timeout is not None:
            return
        scheduler.context.release_threads()  # the engine's, so that others' have the processors
        work = scheduler.inbox.get()
    scheduler.do(work)


def _stop_all() -> None:
    """At exit no thread may be left within an engine that is taken down."""
    for owner in list(_owners):
        with suppress(InferCoreError):
            owner.stop()


atexit.register(_stop_all)
