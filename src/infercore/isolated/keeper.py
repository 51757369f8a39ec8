"""The parent of workers: a process that has imported all they need, and forks one when asked.

Importing takes most of a worker's start, so it is done once. A keeper loads no model and has no
thread, which makes forking safe; engines begin in the worker.
"""

from __future__ import annotations

import array
import gc
import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress

from infercore.engine.gate import fork_count

_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[4:]; from infercore.isolated.keeper import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
)
_ASKED = struct.Struct("<q")
_ANSWER = struct.Struct("<q")
_N_FILES = 4
_FORK = 0
_MODULES = ("infercore.isolated.worker", "infercore.api", "infercore.session.pool", "numpy.random")
_END_SECONDS = 5.0


class Keeper:
    """Starts workers, and tells how they ended.

    A worker that has ended is kept by its keeper until `wait` asks, so that its number names no
    other process. What interrupts an exchange ends the keeper, and with it all its workers.
    """

    def __init__(self, backend: str, seconds: float) -> None:
        self.born = fork_count()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        life, self._life = os.pipe()
        try:
            self._socket.settimeout(seconds)
            paths = [path for path in sys.path if isinstance(path, str)]
            given = (theirs.fileno(), life)
            self._process = subprocess.Popen(  # noqa: S603  (this Python, and nothing of a caller's)
                [sys.executable, "-c", _PROGRAM, *map(str, given), backend, *paths],
                stdin=subprocess.DEVNULL,
                pass_fds=given,
                start_new_session=True,  # Ctrl-C at the terminal is this program's business
            )
            _end_with(life, self._process.pid)
        except BaseException:
            self._close_files()
            raise
        finally:
            theirs.close()
            os.close(life)

    @property
    def pid(self) -> int:
        """The keeper's process."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it starts no worker any more."""
        return self._life < 0

    def start(self, files: tuple[int, int, int, int]) -> int:
        """Return the number of a new worker, which has ``files``. Raises OSError."""
        return self._exchange(_FORK, files)

    def wait(self, pid: int) -> int | None:
        """Return how a worker ended, as `subprocess` tells it; None where nobody can say."""
        try:
            return os.waitstatus_to_exitcode(self._exchange(pid))
        except OSError:
            return None

    def _exchange(self, asked: int, files: tuple[int, ...] = ()) -> int:
        with self._lock:
            if self.ended:
                raise ConnectionError("the keeper has ended")
            try:
                socket.send_fds(self._socket, [_ASKED.pack(asked)], files)
                data = self._socket.recv(_ANSWER.size, socket.MSG_WAITALL)
            except BaseException:
                self._end(0)
                raise
            if len(data) < _ANSWER.size:
                self._end(0)
                raise ConnectionError("the keeper has ended")
            number: int = _ANSWER.unpack(data)[0]
            return number

    def end(self) -> None:
        """Let it end, and wait until it is gone; idempotent."""
        with self._lock:
            self._end(_END_SECONDS)

    def _end(self, seconds: float) -> None:
        if self.ended:
            return
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._close_files()  # which ends what it has left

    def _close_files(self) -> None:
        self._socket.close()
        life, self._life = self._life, -1
        if life >= 0:
            os.close(life)

    def forget(self) -> None:
        """In a fork: let go of what is the parent's."""
        self._lock = threading.Lock()
        with suppress(OSError):
            self._close_files()
        self._process.returncode = 0


def _end_with(life: int, group: int) -> None:
    """Let the kernel end a keeper and its workers when the other end of ``life`` is closed.

    Also while an engine holds the interpreter, or where somebody stopped them; done here, so that
    a keeper that still starts ends as well. Elsewhere than on Linux a thread of the worker does it.
    """
    if sys.platform == "linux":
        import fcntl  # noqa: PLC0415  (POSIX)

        fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life, fcntl.F_SETOWN, -group)
        flags = fcntl.fcntl(life, fcntl.F_GETFL)
        fcntl.fcntl(life, fcntl.F_SETFL, flags | os.O_ASYNC)


# -- in the process of the keeper ------------------------------------------------------------------


def main(control: int, life: int, backend: str) -> None:
    """Fork workers for the program at the other end of ``control`` until that is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the program's business
    channel = socket.socket(fileno=control)
    for name in _MODULES:
        importlib.import_module(name)
    _preload(backend)
    gc.collect()
    gc.freeze()  # what is there stays shared with the workers
    while True:
        size = array.array("i", [0] * _N_FILES).itemsize * _N_FILES
        data, files, _, _ = socket.recv_fds(channel, _ASKED.size, size)
        if len(data) < _ASKED.size:
            os._exit(0)
        asked: int = _ASKED.unpack(data)[0]
        number = os.waitpid(asked, 0)[1] if asked else _forked(channel, files, life)
        for file in files:
            os.close(file)
        try:
            channel.sendall(_ANSWER.pack(number))
        except OSError:
            os._exit(0)


def _preload(backend: str) -> None:
    """Import what ``backend`` names for that; what fails there is told by the worker's load."""
    from infercore.registry import default_registry  # noqa: PLC0415  (in this process alone)

    with suppress(Exception):
        for name in default_registry().get(backend).preload:
            importlib.import_module(name)


def _forked(channel: socket.socket, files: list[int], life: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        channel.close()
        from infercore.isolated.worker import main as work  # noqa: PLC0415  (imports this one)

        requests, answers, board, lane = files
        work(requests, answers, board, lane, life)
    finally:
        os._exit(1)
