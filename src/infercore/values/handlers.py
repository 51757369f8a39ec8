"""Tells what a handler of a signal raised from what the code raised that it interrupted."""

from __future__ import annotations

import functools
import logging
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType, TracebackType


def is_a_handlers(error: BaseException) -> bool:
    """Whether a handler of a signal or of the log raised ``error``, and no engine or plugin."""
    codes = {logging.Logger.callHandlers.__code__}
    if threading.current_thread() is threading.main_thread():
        codes |= _handler_codes()
    return any(frame.f_code in codes for frame, _ in frames_of(error.__traceback__))


def _handler_codes() -> set[CodeType]:
    """Return the code of each function that is called on a signal."""
    found = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        if not callable(handler) or isinstance(handler, signal.Handlers):
            continue
        while isinstance(handler, functools.partial):
            handler = handler.func
        of_object = type(handler).__call__  # what is called of an object that is no function
        code = getattr(handler, "__code__", getattr(of_object, "__code__", None))
        if code is not None:
            found.add(code)
    return found


def frames_of(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """Yield each frame of a traceback with its line, the outermost first."""
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
