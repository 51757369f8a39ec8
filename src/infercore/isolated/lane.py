"""The pipe through which a stream's chunks come straight to the thread that reads them.

Engine and program share their processors, so a thread that is woken to pass a chunk on costs the
engine's threads more than its own work. One stream at a time has the lane; see `Board.asked`.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from infercore.isolated import wire
from infercore.session.jobs import Latch

if TYPE_CHECKING:
    from infercore.isolated.child import Child

_MOST_BYTES = 1 << 16


class Lane:
    """A pipe for one reader at a time."""

    def __init__(self) -> None:
        self._file, self.theirs = os.pipe()
        self._lock = threading.RLock()  # a signal's handler may read a stream as well
        self._user: weakref.ref[Latch] | None = None
        self._is_closed = False

    def enter(self, user: Latch) -> bool:
        """Have it until `leave`, or until nobody has ``user``; False where somebody else has it."""
        with self._lock:
            if self._is_closed or self._has_user:
                return False
            self._user = weakref.ref(user)
            return True

    @property
    def _has_user(self) -> bool:
        return self._user is not None and self._user() is not None

    def read(self) -> bytes:
        """Wait for frames, and return them; for who has it."""
        return os.read(self._file, _MOST_BYTES)

    def wake(self, user: Latch) -> None:
        """Let ``user`` look whether it is open, if it reads."""
        with self._lock:
            if self._user is not None and self._user() is user:
                os.write(self.theirs, wire.MARK)

    def leave(self, user: Latch) -> None:
        """Let others have it."""
        with self._lock:
            if self._user is not None and self._user() is user:
                self._user = None
            if self._is_closed and not self._has_user:
                self._close_files()

    def close(self) -> None:
        """Let nobody have it any more; who reads closes it at the end."""
        with self._lock:
            self._is_closed = True
            if not self._has_user:
                self._close_files()

    def _close_files(self) -> None:
        files, self._file, self.theirs = (self._file, self.theirs), -1, -1
        for file in files:
            if file >= 0:
                os.close(file)

    def forget(self) -> None:
        """In a fork: let go of what is the parent's."""
        self._lock = threading.RLock()
        with suppress(OSError):
            self._close_files()

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):  # an interruption kept who had it from leaving
            self._close_files()


class Arrival(Latch):
    """Opens when the answer to request ``number`` is there: who waits first reads it.

    An interruption may lose what was read. So who waits again asks again, and leaves the reading
    to the thread that does so for all.
    """

    def __init__(self, child: Child, target: int) -> None:
        super().__init__()
        self._child = child
        self._target = target
        self._is_left = False
        self.number = 0

    def wait(self, timeout: float = -1) -> bool:
        """See `Latch.wait`."""
        if not self._is_left and timeout < 0:
            self._is_left = True
            try:
                self._child.read_lane(self)
            finally:
                self.leave()
        elif not self.is_open:
            self._child.ask_again(self.number, self._target)
            return super().wait(timeout)
        return True

    def leave(self) -> None:
        """Let others have the lane; idempotent."""
        self._child.lane.leave(self)
