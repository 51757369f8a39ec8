"""One thread at a time, in the process that made the object, and only while it is open."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from infercore.errors import (
    InferCoreError,
    InvalidStateError,
    SessionBusyError,
    SessionClosedError,
    SessionFatalError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_END_SECONDS = 10.0
INSIDE, _SHUT = "inside", "shut"
_forks = 0
_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


def _count_fork() -> None:
    global _forks  # noqa: PLW0603  (the one process-wide counter)
    _forks += 1
    for gate in _gates:
        gate.bar = gate.rest = _SHUT


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


def fork_count() -> int:
    """Return how many forks lie between the first process and this one."""
    return _forks


class Gate:
    """A context manager that each call of a guarded object passes through.

    Raises `SessionBusyError` when another call is inside, `SessionClosedError` after `shut`,
    `InvalidStateError` in a forked child and `SessionFatalError` after `fail`. What runs once a
    token does what `__enter__` and `__exit__` do itself: for that are the public attributes.
    ``bar`` is what keeps others out, None where nothing does; who holds the lock may read and
    change it. ``rest`` is what it goes back to.
    """

    __slots__ = (
        "__weakref__",
        "_born",
        "_lock",
        "_name",
        "acquire",
        "bar",
        "closed",
        "fatal",
        "release",
        "rest",
    )

    def __init__(self, name: str) -> None:
        self._lock = threading.RLock()  # it knows its thread, which an interruption may ask for
        self.acquire = self._lock.acquire
        self.release = self._lock.release
        self.bar: str | None = None
        self.rest: str | None = None
        self.fatal: SessionFatalError | None = None
        self.closed = False
        self._name = name
        self._born = _forks
        _gates.add(self)

    def __enter__(self) -> None:
        try:
            if (
                not self.acquire(False) or self.bar is not None
            ):  # by keyword it takes twice the time
                raise self.refusal()
        except BaseException:
            self.let_go()
            raise
        self.bar = INSIDE

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self.bar = self.rest
        self.release()

    def let_go(self) -> None:
        """Release the lock once if this thread has it.

        A Ctrl-C shows behind the call that takes the lock, where nobody knows whether it did.
        """
        with suppress(RuntimeError):
            self.release()

    def refusal(self) -> InferCoreError:
        """Return the error for a call that found the lock taken or the gate barred."""
        if self._born != _forks:
            return InvalidStateError(
                f"this {self._name} was made before os.fork(), and the engine's threads did not "
                "come along; open a new one in the child",
                operation="use",
                state="forked",
            )
        if self.bar is None or self.bar == INSIDE:
            return SessionBusyError(
                f"another call is using this {self._name}; one thread owns it at a time"
            )
        if self.closed or self.fatal is None:
            return SessionClosedError(f"this {self._name} is closed; open a new one")
        error = SessionFatalError(str(self.fatal), cause=self.fatal.cause)
        error.__cause__ = self.fatal.cause
        return error

    def _stay_shut(self) -> None:
        """Let nobody in any more; who is inside may end what it does."""
        self.rest = _SHUT
        if self.bar is None:
            self.bar = _SHUT

    def fail(self, cause: BaseException) -> SessionFatalError:
        """Refuse every later call with the first cause; return the error to raise now."""
        if self.fatal is None:
            self.fatal = SessionFatalError(
                f"this {self._name} can no longer be trusted: {cause}; close it and open a new one",
                cause=cause,
            )
        self._stay_shut()
        return self.fatal

    @property
    def inside(self) -> bool:
        """Whether a call is inside, of whichever thread."""
        return self.bar == INSIDE

    @property
    def entered_here(self) -> bool:
        """Whether the calling thread itself is inside."""
        try:
            here = self.acquire(False) and self.inside  # it lets its own thread in again
        finally:
            self.let_go()
        return here

    def shut_at_end(self, stop: Callable[[], object] | None) -> bool:
        """Let nobody in any more and wait for the call inside, which ``stop`` ends sooner.

        False where it does not end: at exit of the interpreter a thread may still be in an
        engine, which must not be freed then.
        """
        self.closed = True
        self._stay_shut()
        if self.inside and stop is not None:
            stop()
        if not self.acquire(timeout=_END_SECONDS):
            return False
        self.release()
        return True

    def shut(self) -> bool:
        """Close the gate after the call that is inside; False if it was closed already.

        Raises `SessionBusyError` when the calling thread itself is inside (a callback).
        """
        if self._born != _forks:
            self.closed = True
            return False
        if self.entered_here:
            raise SessionBusyError(f"close this {self._name} after its call has returned")
        with self._lock:
            was_open = not self.closed
            self.closed = True
            self._stay_shut()
        return was_open
