"""llama.cpp's log: sent to a Python logger, and kept for the errors that it explains."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

E = TypeVar("E", bound=BaseException)

LOGGER = logging.getLogger("infercore.llamacpp")
LOGGER.addHandler(logging.NullHandler())

KEPT_LINES = 20
_CONTINUED = 5
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}


class _Thread(threading.local):
    """What one thread's calls have logged: the engine logs in the thread that calls it."""

    def __init__(self) -> None:
        self.level = logging.INFO
        self.pending = ""
        self.complaints: deque[str] = deque(maxlen=KEPT_LINES)
        self.listeners: list[list[str]] = []
        self.interruption: BaseException | None = None


_thread = _Thread()


def receive(level: int, text: bytes, _data: object = None) -> None:
    """Take a piece of log text; lines come in pieces, each continuing the one before."""
    state = _thread
    if level != _CONTINUED:
        _flush(state)
        state.level = _LEVELS.get(level, logging.INFO)
    if state.level == logging.DEBUG and not LOGGER.isEnabledFor(logging.DEBUG):
        return
    state.pending += text.decode("utf-8", "replace")
    if state.pending.endswith("\n"):
        _flush(state)


def _flush(state: _Thread) -> None:
    line, state.pending = state.pending.strip(), ""
    if not line.strip("."):
        return
    for lines in state.listeners:
        lines.append(line)
    if state.level >= logging.WARNING:
        state.complaints.append(line)
    LOGGER.log(state.level, "%s", line)


@contextmanager
def listening() -> Iterator[list[str]]:
    """Collect this thread's lines from INFO up; complaints outlive only a failure.

    A Ctrl-C that Python tells `receive` cannot pass through the engine: it is raised at the end.
    """
    lines: list[str] = []
    _thread.complaints.clear()
    _thread.listeners.append(lines)
    try:
        with _interruptions_kept():
            yield lines
        _thread.complaints.clear()
    finally:
        _flush(_thread)
        _thread.listeners.remove(lines)


@contextmanager
def _interruptions_kept() -> Iterator[None]:
    """Keep what ctypes drops of `receive`; only the main thread is told of signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = sys.unraisablehook

    def keep(dropped: sys.UnraisableHookArgs) -> None:
        if _is_ours(dropped.exc_traceback):
            _thread.interruption = dropped.exc_value
        else:
            before(dropped)

    sys.unraisablehook = keep
    try:
        yield
    finally:
        sys.unraisablehook = before
        raise_interruption(lambda: None)


def _is_ours(trace: TracebackType | None) -> bool:
    return trace is not None and trace.tb_frame.f_code is receive.__code__


def raise_interruption(undo: Callable[[], object]) -> None:
    """Raise what interrupted `receive`, if anything did, after ``undo``."""
    error, _thread.interruption = _thread.interruption, None
    if error is not None:
        undo()
        raise error


def explain(error: E) -> E:
    """Return ``error`` with this thread's last warnings and errors attached as a note."""
    _flush(_thread)
    lines = list(_thread.complaints)
    _thread.complaints.clear()
    if lines:
        note = "llama.cpp said:\n  " + "\n  ".join(lines)
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:  # Python 3.10 shows no notes, but tools read them
            notes = error.__dict__.setdefault("__notes__", [])
            notes.append(note)
    return error


def last_complaint() -> str:
    """Return the last warning or error of this thread, "" when there was none."""
    return _thread.complaints[-1] if _thread.complaints else ""


def last_complaint_but(empty: str) -> str:
    """Return the last complaint that says more than ``empty``."""
    return next((line for line in reversed(_thread.complaints) if empty not in line), "")
