"""One thread at a time, in the process that made the object, and only while it is open."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from infercore.errors import (
    InvalidStateError,
    SessionBusyError,
    SessionClosedError,
    SessionFatalError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_END_SECONDS = 10.0
_thread_id = threading.get_ident
_forks = 0


def _count_fork() -> None:
    global _forks  # noqa: PLW0603  (the one process-wide counter)
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


def fork_count() -> int:
    """Return how many forks lie between the first process and this one."""
    return _forks


class Gate:
    """A context manager that each call of a guarded object passes through.

    Raises `SessionBusyError` when another call is inside, `SessionClosedError` after `shut`,
    `InvalidStateError` in a forked child and `SessionFatalError` after `fail`. What runs once a
    token calls `__enter__` itself and does what `__exit__` does, with ``owner`` and ``release``: a
    ``with`` statement takes three times as long.
    """

    __slots__ = ("_acquire", "_born", "_lock", "_name", "closed", "fatal", "owner", "release")

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # it knows its thread, which an interruption may ask for
        self._acquire = self._lock.acquire
        self.release = self._lock.release
        self._born = _forks
        self.closed = False
        self.fatal: SessionFatalError | None = None
        self.owner: int | None = None

    def __enter__(self) -> None:
        if self._born != _forks:
            raise self._forked()
        me = _thread_id()
        if self.owner == me:
            raise self._busy()
        try:
            if self._acquire(False):  # by keyword it takes twice the time
                self.owner = me
        except BaseException:  # a Ctrl-C shows behind a call: whether it is ours is not known here
            with suppress(RuntimeError):
                self.release()
            raise
        if self.owner != me:
            raise self._busy()
        if self.closed or self.fatal is not None:
            self.__exit__()
            raise self._refusal()

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self.owner = None
        self.release()

    def _busy(self) -> SessionBusyError:
        return SessionBusyError(
            f"another call is using this {self._name}; one thread owns it at a time"
        )

    def _forked(self) -> InvalidStateError:
        return InvalidStateError(
            f"this {self._name} was made before os.fork(), and the engine's threads did not "
            "come along; open a new one in the child",
            operation="use",
            state="forked",
        )

    def _refusal(self) -> SessionClosedError | SessionFatalError:
        if self.closed or self.fatal is None:
            return SessionClosedError(f"this {self._name} is closed; open a new one")
        error = SessionFatalError(str(self.fatal), cause=self.fatal.cause)
        error.__cause__ = self.fatal.cause
        return error

    def fail(self, cause: BaseException) -> SessionFatalError:
        """Refuse every later call with the first cause; return the error to raise now."""
        if self.fatal is None:
            self.fatal = SessionFatalError(
                f"this {self._name} can no longer be trusted: {cause}; close it and open a new one",
                cause=cause,
            )
        return self.fatal

    @property
    def entered_here(self) -> bool:
        """Whether the calling thread itself is inside."""
        return self.owner == threading.get_ident()

    def shut_at_end(self, stop: Callable[[], object] | None) -> bool:
        """Let nobody in any more and wait for the call inside, which ``stop`` ends sooner.

        False where it does not end: at exit of the interpreter a thread may still be in an
        engine, which must not be freed then.
        """
        self.closed = True
        if self.owner is not None and stop is not None:
            stop()
        if not self._lock.acquire(timeout=_END_SECONDS):
            return False
        self._lock.release()
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
        return was_open
