"""The engine itself: imported once, its errors turned into typed ones."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import openvino as ov

from infercore import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKEND = "openvino"
logger = logging.getLogger("infercore.openvino")

_N_LINES = 4  # of a message
_MEMORY_WORDS = (
    "bad_alloc",
    "can't alloc",
    "cannot allocate",
    "can not allocate",
    "failed to allocate",
    "out of memory",
)


_cores: list[tuple[Any, int]] = []  # each with the process that made it


@functools.cache
def shared_core(*, use_mmap: bool | None = None) -> Any:
    """Return the `openvino.Core` of all models that are loaded so; it is never freed.

    A core gives the thread that uses it first a stack for signal handlers, and frees that stack
    with itself, although the system may still have it on record: with two cores that are freed
    in the order they were made, or in another thread, the next Ctrl-C would end the process.
    """
    core = ov.Core()
    if use_mmap is not None:
        core.set_property({"ENABLE_MMAP": use_mmap})
    _cores.append((core, os.getpid()))
    keep_if_forked(core)
    return core


def keep_if_forked(part: Any) -> None:
    """In a child of `os.fork` whose parent used the engine, never free ``part`` of the engine.

    Its end would wait for threads that only the parent has, and the child would not end.
    """
    if _cores and _cores[0][1] != os.getpid():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))


def _keep_cores() -> None:
    for core, _ in _cores:
        keep_if_forked(core)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_cores)


def check_files_left() -> None:
    """Raise `OutOfMemoryError` where this process may open no more files.

    The engine then finds no processors, and divides by their number.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise OutOfMemoryError(f"OpenVINO needs to open files, and cannot: {error}") from error


def first_lines(error: BaseException) -> str:
    """Return the first lines of the engine's message that say something, without its stack."""
    lines = [line.strip() for line in str(error).splitlines()]
    telling = [line for line in lines if line and not line.startswith("Exception from")]
    return " ".join(telling[:_N_LINES])


class Runner:
    """Runs a request's steps: where several threads share the work, in the engine's own threads.

    Those stay on their CPUs, so a step takes some 2 % less than one that this thread begins. One
    thread alone would only be waited for.
    """

    def __init__(self, request: Any, n_threads: int) -> None:
        self._request = request
        # Called by C code alone, so that no Ctrl-C comes between the start and the end of a step.
        own: Any = next(each for each in type(request).__mro__ if "wait" in vars(each))
        self._calls = (partial(own.start_async, request, {}, None), partial(own.wait, request))
        self.run = self._in_background if n_threads > 1 else self._here

    def _here(self) -> None:
        self._request.infer(share_inputs=True, share_outputs=True)

    def _in_background(self) -> None:
        deque(map(partial.__call__, self._calls), maxlen=0)


@contextlib.contextmanager
def memory_errors(work: str) -> Iterator[None]:
    """Turn an engine's error of a failed allocation into `OutOfMemoryError`; let others pass."""
    try:
        yield
    except RuntimeError as error:
        raise_memory_error(error, work)
        raise


def raise_memory_error(error: RuntimeError, work: str) -> None:
    """Raise `OutOfMemoryError` if ``error`` tells of a failed allocation.

    The core turns a `MemoryError` into one.
    """
    text = str(error).lower()
    if any(word in text for word in _MEMORY_WORDS):
        raise OutOfMemoryError(f"no memory for {work}: {first_lines(error)}") from error
