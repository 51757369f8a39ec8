"""One thread at a time, in the process that made the object, and only while it is open."""

from __future__ import annotations

import os
import weakref
from _thread import RLock  # threading.RLock makes these, but is no class
from typing import TYPE_CHECKING

from infercore.engine.calls import described
from infercore.errors import (
    InferCoreError,
    InvalidStateError,
    SessionBusyError,
    SessionClosedError,
    SessionFatalError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

_END_SECONDS = 10.0
_CLOSED, _FATAL, _FORKED = "closed", "fatal", "forked"
_forks = 0
_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


def _count_fork() -> None:
    global _forks  # noqa: PLW0603  (the one process-wide counter)
    _forks += 1
    for gate in _gates:
        if gate.bar != _CLOSED:
            gate.bar = _FORKED


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


def fork_count() -> int:
    """Return how many forks lie between the first process and this one."""
    return _forks


class Gate(RLock):  # type: ignore[misc]  # it may be inherited from, whatever the stubs say
    """A context manager that each call of a guarded object passes through.

    Raises `SessionBusyError` when another call is inside, `SessionClosedError` after `shut`,
    `InvalidStateError` in a forked child and `SessionFatalError` after `fail`. ``bar`` is what
    keeps calls out for good, None where nothing does; ``backend`` is blamed for what its engine
    raises.

    A Ctrl-C shows at the start of a Python function and behind a call of C. So the way out is the
    lock's own, which no interruption can precede, and the way in lets go of the lock without a
    function where it is not known whether it was got.
    """

    __slots__ = ("_born", "_is_shutting", "_name", "backend", "bar", "fatal")

    # `threading.Condition` asks this too; any other way to know would take the lock for a moment.
    entered_here = RLock._is_owned  # type: ignore[attr-defined]  # noqa: SLF001
    """Whether the calling thread itself is inside."""

    def __new__(cls, *_: object, **__: object) -> Self:
        """Return a lock; it takes no arguments itself."""
        return super().__new__(cls)

    def __init__(self, name: str) -> None:
        self._name = name
        self._born = _forks
        self._is_shutting = False
        self.bar: str | None = None
        self.fatal: SessionFatalError | None = None
        self.backend = ""
        _gates.add(self)

    def __enter__(self) -> None:  # type: ignore[override]
        if self.entered_here():
            raise self.refusal()
        try:
            # By keyword it takes twice the time.
            if not self.acquire(False):
                raise self.refusal()
            if self.bar is not None:
                self.release()  # first: Python 3.10 looks for a Ctrl-C before an except clause
                raise self.refusal()
        except BaseException:
            try:  # noqa: SIM105  (an interruption could come before what suppress() does)
                self.release()
            except RuntimeError:
                pass
            raise

    @property
    def closed(self) -> bool:
        """Whether the gate was shut."""
        return self.bar == _CLOSED

    def refusal(self) -> InferCoreError:
        """Return the error for a call that found somebody inside or the gate barred."""
        if self._born != _forks:
            return InvalidStateError(
                f"this {self._name} was made before os.fork(), which does not copy the engine's "
                "threads; open a new one in the child",
                operation="use",
                state="forked",
            )
        if self.bar is None and not self._is_shutting:
            return SessionBusyError(
                f"another call is using this {self._name}; one thread owns it at a time"
            )
        if self.bar != _FATAL or self.fatal is None:
            return SessionClosedError(f"this {self._name} is closed; open a new one")
        error = SessionFatalError(str(self.fatal), cause=self.fatal.cause)
        error.__cause__ = self.fatal.cause
        return error

    def fail(self, cause: BaseException) -> SessionFatalError:
        """Refuse every later call with the first cause; return the error to raise now."""
        if self.fatal is None:
            self.fatal = SessionFatalError(
                f"this {self._name} can no longer be trusted: {self._told(cause)}; close it and "
                "open a new one",
                cause=cause,
            )
        if self.bar is None:
            self.bar = _FATAL
        return self.fatal

    def _told(self, cause: BaseException) -> str:
        if isinstance(cause, InferCoreError):
            return str(cause)
        who = f"backend {self.backend!r} raised " if self.backend else ""
        return who + described(cause)

    def shut_at_end(self, stop: Callable[[], object] | None) -> bool:
        """Let nobody in any more and wait for the call inside, which ``stop`` ends sooner.

        False where it does not end: at exit of the interpreter a thread may still be in an
        engine, which must not be freed then.
        """
        self.bar = _CLOSED
        try:
            free = self.acquire(False)
            if not free:
                if stop is not None:
                    stop()
                free = self.acquire(timeout=_END_SECONDS)
        finally:
            try:  # noqa: SIM105  (see __enter__)
                self.release()
            except RuntimeError:
                pass
        return free

    def shut(self) -> bool:
        """Close the gate after the call that is inside; idempotent.

        False in a forked child, where what lies behind the gate is the parent's to release.
        Raises `SessionBusyError` when the calling thread itself is inside (a callback).
        """
        if self._born != _forks:
            self.bar = _CLOSED
            return False
        if self.entered_here():
            raise SessionBusyError(f"close this {self._name} after its call has returned")
        try:
            self._is_shutting = True  # who finds the lock held is told so
            self.acquire()
            self.bar = _CLOSED
        finally:
            self._is_shutting = False
            try:  # noqa: SIM105  (see __enter__)
                self.release()
            except RuntimeError:  # the interruption came before the call inside had ended
                pass
        return True
