"""Notifies an observer of calls and steps; what nobody observes costs nothing."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from infercore.values import checks
from infercore.values.handlers import is_a_handlers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypeAlias

    from infercore.values.session import Usage

_CALLS = ("on_call_start", "on_step", "on_call_end")


@attrs.frozen(kw_only=True)
class CallStart:
    """A call of a session begins; ``operation`` is its name."""

    operation: str


@attrs.frozen(kw_only=True)
class Step:
    """One engine call of a pool: ``n_running`` sessions generated, ``n_prompt`` tokens were read.

    ``elapsed_ms`` is the time of the engine call, ``n_sequences`` all that took part.
    """

    n_sequences: int
    n_running: int
    n_prompt: int
    elapsed_ms: float


@attrs.frozen(kw_only=True)
class CallEnd:
    """A call ended: with ``error``, or None; a decode that ended by itself has its ``usage``."""

    operation: str
    elapsed_ms: float
    error: BaseException | None = None
    usage: Usage | None = None


class _OnCallStart(Protocol):
    def on_call_start(self, event: CallStart, /) -> object: ...


class _OnStep(Protocol):
    def on_step(self, event: Step, /) -> object: ...


class _OnCallEnd(Protocol):
    def on_call_end(self, event: CallEnd, /) -> object: ...


if TYPE_CHECKING:
    Observer: TypeAlias = _OnCallStart | _OnStep | _OnCallEnd


class _Holder:
    """The observer in force, None where there is none."""

    observer: Any = None


def set_observer(observer: Observer | None) -> None:
    """Notify ``observer`` of every call and step from now on; None ends that.

    It is an object with any of ``on_call_start(CallStart)``, ``on_step(Step)`` and
    ``on_call_end(CallEnd)``. They are called in the thread that does the work, so they should be
    quick; exceptions they raise are ignored. Raises `InvalidInputError` for an object with none of
    them.
    """
    if observer is not None and not any(callable(getattr(observer, n, None)) for n in _CALLS):
        raise checks.refuse("observer", observer, f"an object with any of {', '.join(_CALLS)}")
    _Holder.observer = observer


def is_observed() -> bool:
    """Whether anybody listens."""
    return _Holder.observer is not None


def tell(name: str, event: Any) -> None:
    """Call the observer's method ``name``, if there is one."""
    method = getattr(_Holder.observer, name, None)
    if method is not None:
        try:
            method(event)
        except BaseException as error:  # who listens must not disturb who works
            if _is_of_a_signal(error):
                raise


def _is_of_a_signal(error: BaseException) -> bool:
    """Whether a signal came while somebody listened: only the main thread hears of one."""
    if threading.current_thread() is not threading.main_thread():
        return False
    return isinstance(error, KeyboardInterrupt) or is_a_handlers(error)


def stream_begins() -> None:
    """Tell that a stream is asked for its first chunk."""
    if _Holder.observer is not None:
        tell("on_call_start", CallStart(operation="stream"))


def stream_ended(started: float, usage: Usage | None, error: BaseException | None = None) -> None:
    """Tell that a stream came to its end: with its usage, an error, or neither (closed)."""
    if _Holder.observer is not None:
        elapsed_ms = (time.perf_counter() - started) * 1e3
        end = CallEnd(operation="stream", elapsed_ms=elapsed_ms, usage=usage, error=error)
        tell("on_call_end", end)


@contextmanager
def observed(operation: str) -> Iterator[None]:
    """Tell of the beginning and the end of a call."""
    if _Holder.observer is None:
        yield
        return
    tell("on_call_start", CallStart(operation=operation))
    started, failed = time.perf_counter(), None
    try:
        yield
    except BaseException as error:
        failed = error
        raise
    finally:
        elapsed_ms = (time.perf_counter() - started) * 1e3
        tell("on_call_end", CallEnd(operation=operation, elapsed_ms=elapsed_ms, error=failed))
