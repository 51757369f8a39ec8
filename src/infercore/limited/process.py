"""A process with limits: kept, and started anew when it has died."""

from __future__ import annotations

import atexit
import contextlib
import errno
import marshal
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

from infercore.errors import OutOfMemoryError, TransientEngineError, UnsupportedFeatureError
from infercore.limited import caller
from infercore.limited.wire import (
    HEADER,
    LENGTH,
    MAX_SECONDS,
    PATIENCE,
    STOPPED,
    TOO_MUCH_MEMORY,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_WAIT_S = 10.0  # until the work of others is done
_LOOK_S = 0.05
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:]; from infercore.limited.worker import main; main()"
)
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
_HAS_TIMER = hasattr(signal, "setitimer")
_HAS_POLL = hasattr(select, "poll")  # not on Windows: there only `seconds` end the work
_WORKED_TOO_LONG, _STOOD_STILL = (-signal.SIGPROF, -signal.SIGALRM) if _HAS_TIMER else (None, None)


def can_start() -> bool:
    """Whether a Python can be started from this one (not from a frozen program)."""
    has_processes = sys.platform not in ("emscripten", "wasi")
    return has_processes and bool(sys.executable) and not getattr(sys, "frozen", False)


class LimitedProcess:
    """Does one piece of work at a time; may be used from many threads, and after `os.fork`.

    The process ends with this one, also where this one is killed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may ask in the middle of a request
        self._kept: _Child | None = None
        self._alive: set[_Child] = set()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def run(self, work: str, *arguments: Any, seconds: float | None = None) -> tuple[bytes, str]:
        """Return what ``work`` ("module:function") makes of ``arguments``, or `STOPPED` and why.

        It may use a processor for ``seconds`` (None: `MAX_SECONDS`). Raises `ValueError` for
        arguments that `marshal` cannot write, `OutOfMemoryError` or `UnsupportedFeatureError` where
        no process can be started, and what `turn` and `caller.look` raise. A program that cannot
        start a Python does the work itself, without these limits.
        """
        limit = MAX_SECONDS if seconds is None else seconds
        data = marshal.dumps((limit, work, *arguments))
        if not can_start():
            from infercore.limited import worker  # noqa: PLC0415  (seldom needed)

            return worker.find(work)(*marshal.loads(data)[2:])  # noqa: S302  (written above)
        with self.turn():
            # It may have died of something else since the last request, or stood still in this one.
            for is_last in (False, True):
                child, self._kept = self._kept or self._started(), None
                try:
                    found = child.exchange(data, limit)
                except BaseException:
                    self._end(child)
                    raise
                if found is not None and not child.is_spent(*found):
                    self._kept = child
                    return found
                code = self._end(child)
                if found is not None:
                    return found
                late = child.timed_out or code == _WORKED_TOO_LONG
                if late or (is_last and code == _STOOD_STILL):
                    return STOPPED, f"it takes more than {limit:g} seconds"
                if code == -getattr(signal, "SIGABRT", 0):  # how native code ends without memory
                    return STOPPED, TOO_MUCH_MEMORY
        return STOPPED, f"the process that worked on it has died (status {code})"

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let this thread alone use the process; what it runs within does not wait again.

        Raises `TransientEngineError` after `MAX_WAIT_S`, and what `caller.look` raises.
        """
        lock, until = self._lock, time.monotonic() + MAX_WAIT_S
        while not lock.acquire(timeout=_LOOK_S):
            caller.look()
            if time.monotonic() >= until:
                raise TransientEngineError(
                    f"others' texts and grammars were worked on for {MAX_WAIT_S:g} seconds before "
                    "this one; ask again later",
                    backend="",
                    retry_after=MAX_WAIT_S,
                )
        try:
            yield
        finally:
            lock.release()

    def _started(self) -> _Child:
        child = _Child()
        self._alive.add(child)
        return child

    def _end(self, child: _Child) -> int:
        self._alive.discard(child)
        return child.end()

    def close(self) -> None:
        """End the process and what it works on; the next request starts another."""
        lock = self._lock
        while not lock.acquire(timeout=_LOOK_S):
            for child in tuple(self._alive):
                child.kill()
        try:
            self._kept = None
            while self._alive:
                self._alive.pop().end()
        finally:
            lock.release()

    def _forget(self) -> None:
        """In a fork the process is the parent's, which may be in the middle of a render."""
        self._lock, self._kept = threading.RLock(), None
        while self._alive:
            self._alive.pop().forget()


class _Child:
    """A process, and the two pipes to it."""

    def __init__(self) -> None:
        self._pipes: list[int] = []
        self.timed_out = False
        try:
            self._start()
        except OSError as error:
            self._close()
            _cannot_start(error)

    def _start(self) -> None:
        requests, self._to = self._pipe()
        self._from, answers = self._pipe()
        if _HAS_POLL:
            self._answered = select.poll()
            self._answered.register(self._from, select.POLLIN)
        paths = [path for path in sys.path if isinstance(path, str)]
        self._process = subprocess.Popen(  # noqa: S603  (this Python, and nothing of a caller's)
            [sys.executable, "-c", _PROGRAM, *paths],
            stdin=requests,
            stdout=answers,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at the terminal is this process's business
        )
        for file in (requests, answers):
            self._pipes.remove(file)
            os.close(file)

    def _pipe(self) -> tuple[int, int]:
        pair = os.pipe()
        self._pipes += pair
        return pair

    def exchange(self, data: bytes, seconds: float) -> tuple[bytes, str] | None:
        """Return the answer to a request; None where the process died."""
        timer = None if _HAS_TIMER else threading.Timer(seconds * PATIENCE, self._time_out)
        if timer is not None:
            timer.start()
        try:
            self._write(LENGTH.pack(len(data)) + data)
            kind, size = HEADER.unpack(self._read(HEADER.size))
            return kind, self._read(size).decode()
        except (EOFError, BrokenPipeError):
            return None
        finally:
            if timer is not None:
                timer.cancel()

    def _time_out(self) -> None:
        self.timed_out = True
        self.kill()

    def kill(self) -> None:
        """Let it end; whoever waits for its answer gets none."""
        self._process.kill()

    @staticmethod
    def is_spent(kind: bytes, text: str) -> bool:
        """Whether the process ends itself after this answer."""
        return (kind, text) == (STOPPED, TOO_MUCH_MEMORY)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._to, rest) :]

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            while _HAS_POLL and not self._answered.poll(_LOOK_S * 1e3):
                caller.look()
            part = os.read(self._from, min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _close(self) -> None:
        while self._pipes:
            os.close(self._pipes.pop())

    def end(self) -> int:
        """End the process, if it has not ended; return its status."""
        self._close()
        self._process.kill()
        return self._process.wait()

    def forget(self) -> None:
        """Let go of it without ending it."""
        with contextlib.suppress(OSError):
            self._close()
        self._process.returncode = 0  # not for this process to wait for


def _cannot_start(error: OSError) -> NoReturn:
    message = f"the process that works on untrusted input cannot be started: {error}"
    if error.errno in _SCARCE:
        raise OutOfMemoryError(message) from error
    raise UnsupportedFeatureError(message, feature="child process") from error


limited = LimitedProcess()
"""For chat templates, which are quick."""
