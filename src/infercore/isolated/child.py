"""One process of an isolated engine: its pipes, and the requests that it has not answered."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from select import PIPE_BUF, POLLOUT, poll
from typing import TYPE_CHECKING, Any

import attrs

from infercore.engine.gate import fork_count
from infercore.isolated import wire
from infercore.isolated.board import LOG, OF_POOL, PING, SIZE, STEP, Board
from infercore.isolated.lane import Arrival, Lane
from infercore.session.handing import gathering, send_once
from infercore.session.jobs import Latch
from infercore.session.observer import Step, is_observed, tell
from infercore.values.session import StreamChunk

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Mapping, Sequence

    from infercore.isolated.keeper import Keeper

_END_SECONDS = 10.0
_OF_STEP = tuple(field.name for field in attrs.fields(Step))


class DeathError(Exception):
    """The process died before it answered; ``cause`` says how."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Request:
    """A request that waits for its answer."""

    __slots__ = (
        "done",
        "error",
        "is_suspect",
        "mark",
        "name",
        "on_page",
        "result",
        "target",
        "value",
    )

    def __init__(self, target: int, name: str, done: Latch | None = None) -> None:
        self.target = self.mark = target
        self.is_suspect = self.on_page = False
        self.name = name
        self.done = done or Latch()
        self.result: Any = None
        self.error: BaseException | None = None
        self.value: Any = None


class Child:
    """One process, its pipes, and the requests that it has not answered."""

    def __init__(
        self,
        keeper: Keeper,
        on_death: weakref.WeakMethod[Callable[..., object]],
        log: Callable[..., object],
    ) -> None:
        self._on_death = on_death
        self._log = log
        self._keeper = keeper
        self._is_waited_for = False
        self._files: list[int] = []
        self._lock = threading.RLock()  # a signal's handler may post as well
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._n_behind = 0
        self._asks: list[bytes] = []
        self._numbers = itertools.count(1)
        self.calls: dict[int, Request] = {}
        self.death: BaseException | None = None
        self.reason: str | None = None
        self.is_loaded = self.is_counted = False
        self.heard_at = time.monotonic()
        self.born = fork_count()
        self.lane = Lane()
        self._reader = threading.Thread(target=self._read, name="infercore-isolated", daemon=True)
        self._writer = threading.Thread(target=self._write, name="infercore-write", daemon=True)
        try:
            self._start()
        except BaseException:
            self._close_files()
            self.lane.close()
            raise
        try:
            self._writer.start()
            self._reader.start()
        except BaseException:
            self._outbox.put(None)
            self._kill()
            self._waited_for()
            self._close_files()
            self.lane.close()
            raise

    def _start(self) -> None:
        requests, self._to = self._pipe()
        self._from, answers = self._pipe()
        with tempfile.TemporaryFile() as page:
            page.truncate(SIZE)
            self.board = Board(page.fileno())
            files = requests, answers, page.fileno(), self.lane.theirs
            self.pid = self._keeper.start(files)
        for file in (requests, answers):
            self._files.remove(file)
            os.close(file)
        os.set_blocking(self._to, False)

    def _pipe(self) -> tuple[int, int]:
        pair = os.pipe()
        self._files += pair
        return pair

    # -- asking --------------------------------------------------------------------------------

    def send(
        self,
        target: int,
        name: str,
        args: Sequence[Any],
        fields: Mapping[str, Any],
    ) -> Request:
        """Send a request; a child that is dead answers it at once. Raises for what cannot cross."""
        call = Request(target, name)
        number = next(self._numbers)
        if name == "next":
            frame = wire.pack_next(number, target)
        else:
            call.mark = target or OF_POOL | (number & (OF_POOL - 1))
            frame = wire.pack([number, target, name, list(args), dict(fields)])
        self._expect(number, call)
        if name == "next":
            self._ask(frame)
        else:
            self._post(frame)
        return self._unless_dead(number, call)

    def send_next(self, target: int) -> Request:
        """Ask for a session's next chunk, which the caller waits for in this thread."""
        done = Arrival(self, target)
        if not self.lane.enter(done):
            return self.send(target, "next", (), {})
        call = Request(target, "next", done)
        try:
            done.number = number = next(self._numbers)
            self._expect(number, call)
            call.on_page = self._ask_on_page(number, target)
            if not call.on_page:
                self._post(wire.pack_next(number, target, in_lane=True))
            return self._unless_dead(number, call)
        except BaseException:
            self.lane.leave(done)
            raise

    def _ask_on_page(self, number: int, target: int) -> bool:
        """Ask without waking anybody; False where nobody will look."""
        board = self.board
        if not board.ask(number, target):
            return False
        with self._lock:  # what was written is there before what is read next
            return board.armed == target

    def _expect(self, number: int, call: Request) -> None:
        if self.board.is_observed != is_observed():
            self.board.is_observed = is_observed()
        if not self.calls:
            self.heard_at = time.monotonic()
        self.calls[number] = call

    def _unless_dead(self, number: int, call: Request) -> Request:
        if self.death is not None and self.calls.pop(number, None) is not None:
            call.error = DeathError(self.death)
            call.done.open()
        return call

    def ask_again(self, number: int, target: int) -> None:
        """Ask for a chunk that may have been sent, and lost; it comes as other answers do."""
        self._post(wire.pack_next(number, target))

    def remind(self) -> None:
        """Send what was asked on the page alone some time ago, should nobody have looked."""
        for number, call in list(self.calls.items()):
            if call.on_page:
                call.on_page = False
                self._post(wire.pack_next(number, call.target, in_lane=True))

    def ask_whether_it_works(self) -> None:
        """Send a ping, unless requests wait for the pipe already."""
        if not self._n_behind:
            self._post(wire.pack([PING, 0, "ping", [], {}]))

    def _ask(self, frame: bytes) -> None:
        """Ask for a stream's next chunk; tasks of a loop ask with one write."""
        with self._lock:
            self._asks.append(frame)
        send_once(self._send_asks)

    def _send_asks(self) -> None:
        if self._asks:
            self._post(b"")

    def _post(self, frame: bytes) -> None:
        """Write a small frame whole and at once, or leave it to the thread that writes.

        An exception of a signal's handler never leaves a part of a frame behind: POSIX writes at
        most ``PIPE_BUF`` bytes to a pipe at once or not at all.
        """
        with self._lock, suppress(OSError):  # who reads sees its death too
            if self._to not in self._files:
                return
            if self._asks:  # which go first
                asks, self._asks = self._asks, []
                frame = b"".join((*asks, frame))
            if not self._n_behind and len(frame) <= PIPE_BUF:
                with suppress(BlockingIOError):
                    os.write(self._to, frame)
                    return
            self._n_behind += 1
            self._outbox.put(frame)

    def _write(self) -> None:
        """Write what the pipe did not take at once."""
        ready = poll()
        ready.register(self._to, POLLOUT)
        while (frame := self._outbox.get()) is not None:
            rest = memoryview(frame)
            try:
                while rest:
                    ready.poll()
                    with suppress(BlockingIOError):
                        rest = rest[os.write(self._to, rest) :]
            except OSError:
                return
            with self._lock:
                self._n_behind -= 1

    def _stop_writing(self, seconds: float) -> None:
        """Let the thread that writes end; after ``seconds`` with the process."""
        self._outbox.put(None)
        self._writer.join(seconds)
        if self._writer.is_alive():
            self._kill()
            self._writer.join()

    # -- answers -------------------------------------------------------------------------------

    def _read(self) -> None:
        """Hand out answers until the process ends, or says what is no answer."""
        self._files.remove(self._from)
        with os.fdopen(self._from, "rb") as file, gathering() as hand_over:
            answers = wire.Input(file.fileno(), hand_over)
            try:
                while True:
                    self._answer(wire.read(answers.take))
            except (EOFError, OSError):
                pass
            except BaseException as error:  # noqa: BLE001  (it is corrupt)
                self.reason = self.reason or f"sent an invalid answer ({error})"
        self._bury()

    def _answer(self, answer: Any) -> None:
        self.heard_at = time.monotonic()
        if type(answer) is bytes:
            self._answer_chunk(answer)
            return
        number, is_well, result, value = answer
        if number == STEP:
            tell("on_step", Step(**dict(zip(_OF_STEP, result, strict=True))))
            return
        if number == LOG:
            self._log(*result)
            return
        call = self.calls.pop(number, None)
        if call is None:
            return
        call.value = value
        if is_well:
            call.result = result
        else:
            call.error = result
        self._open(call)

    def _answer_chunk(self, data: bytes, reader: Arrival | None = None) -> None:
        number, text, shown, chosen, position = wire.chunk_of(data)
        call = self.calls.get(number)
        if call is None and number < next(self._numbers):  # it came before
            return
        if call is None or call.name != "next":
            raise wire.FrameError("a chunk that nobody asked for")
        if call.result is None:
            call.result = StreamChunk(text=text, tokens=shown), chosen, position
        self._open(call, reader)
        self.calls.pop(number, None)  # at last: who reads may be interrupted, and asks again

    def _open(self, call: Request, reader: Arrival | None = None) -> None:
        done = call.done
        with self._lock:
            if not done.is_open:
                done.open()
        if type(done) is Arrival and done is not reader:
            self.lane.wake(done)

    def read_lane(self, until: Arrival) -> None:
        """Hand out what comes through the lane until ``until`` is open."""
        try:
            while not until.is_open:
                for body in wire.bodies(self.lane.read()):
                    self.heard_at = time.monotonic()
                    self._answer_chunk(body, until)
        except wire.FrameError as error:
            self.kill(f"sent an invalid answer ({error})")
            Latch.wait(until)

    def _bury(self) -> None:
        """Wait for the process, and let those know who wait for it."""
        self._kill()
        code = self._waited_for()
        cause = ChildProcessError(f"the process of the engine {self.reason or _end_of(code)}")
        self.death = cause
        try:
            judge = self._on_death()
            if judge is not None:
                judge(self, cause)
            self._stop_writing(0)
            with self._lock:
                self._close_files()
        finally:
            for number in list(self.calls):
                call = self.calls.pop(number, None)
                if call is not None:
                    call.error = DeathError(cause)
                    self._open(call)
            self.lane.close()

    def kill(self, reason: str) -> None:
        """End the process, which ``reason`` says why."""
        self.reason = self.reason or reason
        self._kill()

    def _kill(self) -> None:
        with self._lock, suppress(ProcessLookupError):
            if not self._is_waited_for:  # until then the number is this process's
                os.kill(self.pid, signal.SIGKILL)

    def _waited_for(self) -> int | None:
        """Return how the process ended, which was killed before; None where nobody can say."""
        with self._lock:
            self._is_waited_for = True
            return self._keeper.wait(self.pid)

    def end(self, seconds: float) -> None:
        """Let the process end, for at most ``seconds``, and wait until it is gone."""
        self._stop_writing(seconds)
        with self._lock:
            self._close_files()
        if threading.current_thread() is not self._reader:
            self._reader.join(seconds)
            if self._reader.is_alive():
                self._kill()
                self._reader.join(_END_SECONDS)

    def _close_files(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def forget(self) -> None:
        """In a fork: let go of a process that is the parent's."""
        with suppress(OSError):
            self._close_files()
        self.lane.forget()


def _end_of(code: int | None) -> str:
    if code is None:
        return "ended with its parent"
    if code >= 0:
        return f"ended with status {code}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
