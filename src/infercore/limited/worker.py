"""What runs in the process with limits."""

from __future__ import annotations

import importlib
import marshal
import os
import signal
import sys
from typing import TYPE_CHECKING, BinaryIO

from infercore.limited.wire import (
    HEADER,
    LENGTH,
    MAX_MEMORY_BYTES,
    PATIENCE,
    STOPPED,
    TOO_MUCH_MEMORY,
)

if TYPE_CHECKING:
    from infercore.limited.wire import Work


def main() -> None:
    """Answer requests from standard input until it ends, which it does with the other process."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the other process's business
    limit_memory()
    while True:
        head = requests.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return
        kind, text = _answer_to(requests, *LENGTH.unpack(head))
        _send(answers, kind, text)
        if (kind, text) == (STOPPED, TOO_MUCH_MEMORY):
            return  # a new process has all of its memory again


def _answer_to(requests: BinaryIO, size: int) -> tuple[bytes, str]:
    try:
        request = marshal.loads(requests.read(size))  # noqa: S302  (its sender began this process)
        seconds, name, *arguments = request
        work = find(name)
        with _Watched(requests.fileno(), seconds):
            return work(*arguments)
    except MemoryError:
        return STOPPED, TOO_MUCH_MEMORY


def find(name: str) -> Work:
    """Return the function ``module:function``."""
    module, _, function = name.partition(":")
    work: Work = getattr(importlib.import_module(module), function)
    return work


def _send(answers: BinaryIO, kind: bytes, text: str) -> None:
    data = text.encode("utf-8", errors="backslashreplace")
    answers.write(HEADER.pack(kind, len(data)) + data)
    answers.flush()


class _Watched:
    """Ends this process, whatever it is doing, after ``seconds`` or when the other one dies.

    Those are of processor time, so that a machine that does much else refuses nothing; by the
    clock it may be `PATIENCE` times as long. The kernel does it by signals left at their defaults,
    so that no call of C can put it off. Where there are none, the other process
    ends this one.
    """

    def __init__(self, file: int, seconds: float) -> None:
        self._file = file
        self._seconds = seconds

    def __enter__(self) -> None:
        self._watch_pipe(on=True)
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, self._seconds)
            signal.setitimer(signal.ITIMER_REAL, self._seconds * PATIENCE)

    def __exit__(self, *_: object) -> None:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        self._watch_pipe(on=False)

    def _watch_pipe(self, *, on: bool) -> None:
        """Have SIGIO sent when the pipe's other end is closed (Linux)."""
        if sys.platform != "linux":
            return
        import fcntl  # noqa: PLC0415  (POSIX)
        import select  # noqa: PLC0415

        flags = fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_ASYNC
        fcntl.fcntl(self._file, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | (os.O_ASYNC if on else 0))
        if on and select.select([self._file], [], [], 0)[0]:  # it was closed before
            os._exit(0)


def limit_memory() -> None:
    """Let this process take `MAX_MEMORY_BYTES` more than it has, where the platform can (Linux)."""
    if sys.platform != "linux":
        return
    import resource  # noqa: PLC0415  (POSIX)

    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    limit = held + MAX_MEMORY_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
