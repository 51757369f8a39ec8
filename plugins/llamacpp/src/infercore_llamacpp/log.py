"""llama.cpp's log: sent to a Python logger, and kept for the errors that it explains."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections import deque
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

E = TypeVar("E", bound=BaseException)

LOGGER = logging.getLogger("infercore.llamacpp")
LOGGER.addHandler(logging.NullHandler())

KEPT_LINES = 20
_CONTINUED = 5
_LEVELS = {1: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}  # any other is INFO


class _Thread(threading.local):
    """What one thread's calls have logged: the engine logs in the thread that calls it.

    ``raised`` is what a handler of a signal or of the log raised meanwhile. It cannot pass through
    the engine, and is raised when the call has ended.
    """

    def __init__(self) -> None:
        self.level = logging.INFO
        self.pending = ""
        self.complaints: deque[str] = deque(maxlen=KEPT_LINES)
        self.listeners: list[list[str]] = []
        self.raised: BaseException | None = None


thread = _Thread()
was_raised = False
"""Whether any thread ever had a ``raised``: to look at what is a thread's own takes far longer."""


def receive(level: int, text: bytes, _data: object = None) -> None:
    """Take a piece of log text; lines come in pieces, each continuing the one before."""
    global was_raised  # noqa: PLW0603  (in place: a Ctrl-C shows at the start of a function)
    state = thread
    try:
        if level != _CONTINUED:
            _flush(state)
            state.level = _LEVELS.get(level, logging.INFO)
        if state.level == logging.DEBUG and not LOGGER.isEnabledFor(logging.DEBUG):
            return
        state.pending += text.decode("utf-8", "replace")
        if state.pending.endswith("\n"):
            _flush(state)
    except BaseException as error:  # noqa: BLE001  (cannot pass through the engine)
        was_raised = True
        state.raised = state.raised or error


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
    """Collect this thread's lines from INFO up; complaints outlive only a failure."""
    lines: list[str] = []
    thread.complaints.clear()
    thread.listeners.append(lines)
    try:
        with _interruptions_kept():
            yield lines
        thread.complaints.clear()
    finally:
        thread.listeners.pop()


@contextmanager
def _interruptions_kept() -> Iterator[None]:
    """Keep what ctypes drops of a Ctrl-C at the very edge of `receive`, too."""
    if threading.current_thread() is not threading.main_thread():  # it gets no signals
        yield
        return
    before = sys.unraisablehook

    def keep(dropped: sys.UnraisableHookArgs) -> None:
        global was_raised  # noqa: PLW0603
        if _is_ours(dropped.exc_traceback):
            was_raised = True
            thread.raised = thread.raised or dropped.exc_value
        else:
            before(dropped)

    sys.unraisablehook = keep
    try:
        yield
    finally:
        sys.unraisablehook = before


def _is_ours(trace: TracebackType | None) -> bool:
    return trace is not None and trace.tb_frame.f_code is receive.__code__


def raise_kept(undo: Callable[[], object] | None = None) -> None:
    """Raise what was raised in the midst of a line, if anything was, after ``undo``."""
    error, thread.raised = thread.raised, None
    if error is not None:
        if undo is not None:
            undo()
        raise error


C = TypeVar("C", bound=type)


def raising(cls: C) -> C:
    """Let the methods that ``cls`` itself defines raise at their end what was kept meanwhile."""
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and name[0] != "_":
            setattr(cls, name, _raising(method))
    return cls


def _raising(method: FunctionType) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            raise_kept()

    return wrapper


def explain(error: E) -> E:
    """Return ``error`` with this thread's last warnings and errors attached as a note."""
    lines = list(thread.complaints)
    thread.complaints.clear()
    if lines:
        note = "llama.cpp said:\n  " + "\n  ".join(lines)
        error.__dict__.setdefault("__notes__", []).append(note)  # as Python 3.11's add_note does
    return error


def last_complaint_but(empty: str) -> str:
    """Return the last complaint that says more than ``empty``."""
    return next((line for line in reversed(thread.complaints) if empty not in line), "")
