"""The process of an isolated engine: started, asked, watched, and started anew when it has died."""

from __future__ import annotations

import atexit
import itertools
import operator
import os
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager, nullcontext, suppress
from queue import Empty, SimpleQueue
from select import PIPE_BUF, POLLOUT, poll
from typing import TYPE_CHECKING, Any

import attrs

from infercore.engine.gate import fork_count
from infercore.errors import (
    InvalidStateError,
    ModelLoadError,
    SessionClosedError,
    SessionFatalError,
    UnsupportedFeatureError,
)
from infercore.isolated import wire
from infercore.isolated.board import COUNTED, OF_POOL, PING, SIZE, STEP, Board
from infercore.isolated.keeper import Keeper
from infercore.session.handing import gathering, send_once
from infercore.session.jobs import Latch
from infercore.session.observer import Step, is_observed, tell
from infercore.values.session import StreamChunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from infercore.values.pool import PoolStats

_END_SECONDS = 10.0
_STATS_SECONDS = 0.05
_ASKS_SOMETIMES = 5.0
_PAUSE_SECONDS = 1.0
"""Who looks so much too late was stopped, maybe with the process that is looked at."""
_FIRST_SECONDS = 10.0
_BEGIN_SECONDS = 0.25
_LOOK_SECONDS = 0.005
_INNOCENT = frozenset({"next", "cancel", "end", "close", "explain_context"})
"""Calls that do nothing between two engine calls that could end a process."""
_OF_STEP = tuple(field.name for field in attrs.fields(Step))
_processes: weakref.WeakSet[EngineProcess] = weakref.WeakSet()


class DeathError(Exception):
    """The process died before it answered; ``cause`` says how."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Call:
    """A request that waits for its answer."""

    __slots__ = ("done", "error", "is_suspect", "mark", "name", "result", "target", "value")

    def __init__(self, target: int, name: str) -> None:
        self.target = self.mark = target
        self.is_suspect = False
        self.name = name
        self.done = Latch()
        self.result: Any = None
        self.error: BaseException | None = None
        self.value: Any = None


class _Child:
    """One process, its pipes, and the requests that it has not answered."""

    def __init__(self, keeper: Keeper, on_death: weakref.WeakMethod[Callable[..., object]]) -> None:
        self._on_death = on_death
        self._keeper = keeper
        self._is_waited_for = False
        self._files: list[int] = []
        self._lock = threading.RLock()  # a signal's handler may post as well
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._n_behind = 0
        self._asks: list[bytes] = []
        self._numbers = itertools.count(1)
        self.calls: dict[int, _Call] = {}
        self.death: BaseException | None = None
        self.reason: str | None = None
        self.is_loaded = self.is_counted = False
        self.heard_at = time.monotonic()
        self.born = fork_count()
        self._reader = threading.Thread(target=self._read, name="infercore-isolated", daemon=True)
        self._writer = threading.Thread(target=self._write, name="infercore-write", daemon=True)
        try:
            self._start()
        except BaseException:
            self._close_files()
            raise
        try:
            self._writer.start()
            self._reader.start()
        except BaseException:
            self._outbox.put(None)
            self._kill()
            self._waited_for()
            self._close_files()
            raise

    def _start(self) -> None:
        requests, self._to = self._pipe()
        self._from, answers = self._pipe()
        with tempfile.TemporaryFile() as page:
            page.truncate(SIZE)
            self.board = Board(page.fileno())
            self.pid = self._keeper.start((requests, answers, page.fileno()))
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
    ) -> _Call:
        """Send a request; a child that is dead answers it at once. Raises for what cannot cross."""
        if self.board.is_observed != is_observed():
            self.board.is_observed = is_observed()
        call = _Call(target, name)
        number = next(self._numbers)
        if name == "next":
            frame = wire.pack_next(number, target)
        else:
            call.mark = target or OF_POOL | (number & (OF_POOL - 1))
            frame = wire.pack([number, target, name, list(args), dict(fields)])
        if not self.calls:
            self.heard_at = time.monotonic()
        self.calls[number] = call
        if name == "next":
            self._ask(frame)
        else:
            self._post(frame)
        if self.death is not None and self.calls.pop(number, None) is not None:
            call.error = DeathError(self.death)
            call.done.open()
        return call

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
            except Exception as error:  # noqa: BLE001  (it is corrupt)
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
        call = self.calls.pop(number, None)
        if call is None:
            return
        call.value = value
        if is_well:
            call.result = result
        else:
            call.error = result
        call.done.open()

    def _answer_chunk(self, data: bytes) -> None:
        number, text, shown, chosen, position = wire.chunk_of(data)
        call = self.calls.get(number)
        if call is None or call.name != "next":
            raise wire.FrameError("a chunk that nobody asked for")
        del self.calls[number]
        call.result = StreamChunk(text=text, tokens=shown), chosen, position
        call.done.open()

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
                    call.done.open()

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


def _end_of(code: int | None) -> str:
    if code is None:
        return "ended with its parent"
    if code >= 0:
        return f"ended with status {code}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _no_wait(_: _Call) -> None:
    """What waits for nothing."""


class EngineProcess:
    """Answers for one pool in a process that may die: the next request starts another.

    Which sessions were in the engine call of two deaths in a row, `ended` tells; what is tried
    alone, `lone`. After ``max_restarts`` starts within ``restart_window`` every request raises
    `SessionFatalError` with the first cause.
    """

    def __init__(
        self,
        load: Mapping[str, Any],
        *,
        step_timeout: float,
        load_timeout: float,
        max_restarts: int,
        restart_window: float,
    ) -> None:
        if os.name != "posix" or not sys.executable:
            raise UnsupportedFeatureError(
                feature="isolate", hint="isolated engines need a POSIX system"
            )
        self._load = dict(load)
        self._step_timeout = step_timeout
        self._load_timeout = load_timeout
        self._max_restarts = max_restarts
        self._restart_window = restart_window
        self._lock = threading.RLock()
        self._deaths: deque[float] = deque()
        self._first_cause: BaseException | None = None
        self._keeper: Keeper | None = None
        self._child: _Child | None = None
        self._before: tuple[int, ...] = (0,) * len(COUNTED)
        self._suspects: set[int] = set()
        self._lone: set[int] = set()
        self._first: set[int] = set()
        self._first_until = 0.0
        self._in_step: set[int] = set()
        self._alone = threading.Lock()
        self.ended: dict[int, BaseException] = {}
        self.fatal: SessionFatalError | None = None
        self.closed = False
        self.epoch = 0
        self.n_restarts = 0
        self._looked_at = self._lenient_until = time.monotonic()
        self.left: SimpleQueue[tuple[int, str] | None] = SimpleQueue()
        """Sessions and streams that were dropped; put here by finalizers, which take no lock."""
        self._last: list[Any] = [None, None]
        weakref.finalize(self, _kill_last, self._last)
        try:
            self.facts = self._started()
        except BaseException:
            if self._keeper is not None:
                self._keeper.end()
            raise
        _processes.add(self)
        watching = weakref.ref(self), self.left, self._last
        threading.Thread(target=_watch, args=watching, name="infercore-watch", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """The process, None where none runs."""
        child = self._child
        return None if child is None or child.death is not None else child.pid

    @property
    def living(self) -> int:
        """The number of the process that answers now, 0 where none does."""
        child = self._child
        return 0 if child is None or child.death is not None else self.epoch

    def check(self) -> None:
        """Raise unless a call may be made."""
        if self._child is not None and self._child.born != fork_count():
            raise InvalidStateError(
                "this pool was opened before os.fork(); open a new one in the child",
                operation="use",
                state="forked",
            )
        if self.closed:
            raise SessionClosedError("this pool is closed; open a new one")
        if self.fatal is not None:
            raise SessionFatalError(str(self.fatal), cause=self.fatal.cause)

    def here(self) -> int:
        """Return the number of the process that answers now, started if need be."""
        with self._lock:
            self.check()
            if self._child is None or self._child.death is not None:
                self._started()
                self._first_until = time.monotonic() + _FIRST_SECONDS
                self.n_restarts += 1
            return self.epoch

    def _started(self) -> dict[str, Any]:
        """Start a process and load the model; return the facts about it."""
        while True:
            try:
                child = _Child(self._kept(), weakref.WeakMethod(self._noted_death))
            except (OSError, RuntimeError) as error:  # no file, no folder, no thread is to be had
                path = str(self._load["path"])
                raise ModelLoadError(
                    f"no process could be started for {path}: {error}", path=path
                ) from error
            self.epoch += 1
            self._child = self._last[0] = child
            call = child.send(0, "load", (), self._load)
            try:
                if not call.done.wait(self._load_timeout):
                    child.kill(f"did not load within {self._load_timeout:g} seconds")
                    call.done.wait()
            except BaseException:
                child.kill("was not waited for")
                child.end(_END_SECONDS)
                raise
            if call.error is None:
                child.is_loaded = True
                facts: dict[str, Any] = call.result
                return facts
            if not isinstance(call.error, DeathError):
                child.end(_END_SECONDS)
                if not hasattr(self, "facts"):
                    raise call.error
                self._note(call.error)  # what was loaded once may load again
                self.check()
                continue
            if not hasattr(self, "facts"):
                path = str(self._load["path"])
                raise ModelLoadError(
                    f"{path} could not be loaded: {call.error.cause}", path=path
                ) from call.error.cause
            self.check()

    def _kept(self) -> Keeper:
        """Return who starts workers, started if need be."""
        keeper = self._keeper
        if keeper is None or keeper.ended:
            keeper = Keeper(str(self._load["backend"]), self._load_timeout)
            self._keeper = self._last[1] = keeper
        return keeper

    # -- asking --------------------------------------------------------------------------------

    def send(
        self,
        epoch: int,
        target: int,
        name: str,
        args: Sequence[Any] = (),
        fields: Mapping[str, Any] | None = None,
    ) -> _Call:
        """Send a request to the process number ``epoch``; one that is gone has died."""
        child = self._child
        if child is None or epoch != self.epoch or self.closed:
            call = _Call(target, name)
            call.error = DeathError(ChildProcessError("the process of the engine is gone"))
            call.done.open()
            return call
        return child.send(target, name, args, fields or {})

    def place(self) -> EngineProcess:
        """Return where a new session lives: here."""
        return self

    def beside(self) -> EngineProcess:
        """Return where a fork lives: here."""
        return self

    def stats(self) -> PoolStats | None:
        """Return what the pool does now; None where its process does not answer at once."""
        call = self.send(self.epoch, 0, "stats")
        answered = call.done.wait(_STATS_SECONDS) and call.error is None
        return call.result if answered else None

    def flush(self, namespace: str | None) -> None:
        """Forget what is kept of sequences that lost their cells."""
        self.ask("of_pool", "flush_cache", [namespace], {})

    def drain(self, timeout: float | None) -> bool | None:
        """Let the calls that have begun end; None where the process died meanwhile."""
        call = self.send(self.here(), 0, "of_pool", ["drain", [timeout], {}])
        call.done.wait()
        if call.error is not None and not isinstance(call.error, DeathError):
            raise call.error
        has_ended: bool | None = call.result
        return has_ended

    def ask(self, name: str, *args: Any, **fields: Any) -> Any:
        """Return what the pool answers, from another process where one died over it."""
        suspect: int | None = None
        while True:
            epoch = self.here()
            self.let_first(suspect or 0)
            with nullcontext() if suspect is None else self._alone:
                call = self.send(epoch, 0, name, args, fields)
                call.done.wait()
            self._first.difference_update(() if suspect is None else (suspect, call.mark))
            if call.error is None:
                return call.result
            if not isinstance(call.error, DeathError):
                raise call.error
            if call.is_suspect and suspect is not None:
                cause = call.error.cause
                raise SessionFatalError(
                    f"{name} ended the engine's process twice: {cause}; other calls go on",
                    cause=cause,
                ) from cause
            suspect = call.mark if call.is_suspect else None

    @property
    def counts(self) -> dict[str, int]:
        """What all its processes have done, by the names in `board.COUNTED`."""
        child = self._child
        living = (child.board.counts,) if child is not None and not child.is_counted else ()
        return dict(zip(COUNTED, map(sum, zip(self._before, *living, strict=True)), strict=True))

    def _count(self, child: _Child) -> None:
        """Keep what a process has done that does nothing more."""
        if not child.is_counted:
            counts, child.is_counted = child.board.counts, True
            self._before = tuple(map(operator.add, self._before, counts))

    # -- deaths --------------------------------------------------------------------------------

    def _noted_death(self, child: _Child, cause: BaseException) -> None:
        """Judge a death: who was in the call, and whether there were too many."""
        if self.closed or child.born != fork_count():
            return
        self._count(child)
        calls = [call for call in list(child.calls.values()) if call.name not in _INNOCENT]
        outside = child.board.outside
        self._in_step = set(child.board.in_call or ())
        suspects = self._in_step | outside or {call.target for call in calls}
        suspects.discard(0)
        for target in suspects & self._suspects:
            self.ended[target] = cause
        for call in calls:
            call.is_suspect = call.mark in suspects
        self._suspects = {mark for mark in suspects if mark < OF_POOL}
        self._lone = set(self._suspects)
        again = {call.mark for call in calls if call.name != "open_session"}
        self._first = (outside & again) - self._in_step - self.ended.keys()
        self._first_until = time.monotonic() + _FIRST_SECONDS
        self._note(cause)

    def _note(self, cause: BaseException) -> None:
        """Count a death, or a load that failed; too many are the end."""
        now = time.monotonic()
        while self._deaths and now - self._deaths[0] > self._restart_window:
            self._deaths.popleft()
        if not self._deaths:
            self._first_cause = cause
        self._deaths.append(now)
        if len(self._deaths) > self._max_restarts:
            self._fail(self._first_cause or cause)

    def _fail(self, cause: BaseException) -> None:
        self.fatal = self.fatal or SessionFatalError(
            f"this pool's engine died too often: {cause}; open a new pool", cause=cause
        )

    def is_lone(self, target: int) -> bool:
        """Whether a session may be why the last process died; answers so once."""
        is_lone = target in self._lone
        self._lone.discard(target)
        return is_lone

    def let_first(self, mark: int) -> None:
        """Wait until those have made their calls again who may have ended the last process.

        They do so one after the other and beside nobody else: then another death has one cause.
        Who has not come back in good time after the start of the next process is not waited for
        any more.
        """
        while self._first and mark not in self._first:
            if time.monotonic() > self._first_until:
                if self.living and self._child is not None and self._child.is_loaded:
                    self._first.clear()
                return
            time.sleep(_LOOK_SECONDS)

    @contextmanager
    def alone(self, mark: int) -> Iterator[Callable[[_Call], None]]:
        """Hold back who else may have ended the last process, if ``mark`` is one of them.

        Gives what waits until a call is in the engine, or done.
        """
        if mark not in self._first:
            yield _no_wait
            return
        with self._alone:
            try:
                yield self._until_inside
            finally:
                self._first.discard(mark)

    def _until_inside(self, call: _Call) -> None:
        child, has_begun = self._child, False
        until = time.monotonic() + _BEGIN_SECONDS
        while not (call.done.wait(_LOOK_SECONDS) or child is None or self.closed):
            is_outside = call.mark in child.board.outside
            if not is_outside and (has_begun or time.monotonic() > until):
                break
            has_begun = has_begun or is_outside
        if not isinstance(call.error, DeathError) and call.target not in self._in_step:
            self._suspects.discard(call.target)  # alone it ended nothing

    def forget_session(self, target: int) -> None:
        """Forget what was held against a session that is closed."""
        self.ended.pop(target, None)
        self._suspects.discard(target)
        self._first.discard(target)

    def went_on(self, target: int) -> None:
        """Note that a session got further than where the last process died."""
        self._suspects.discard(target)

    def look(self) -> None:
        """End a process that hangs, unless this one was stopped as well."""
        now, child = time.monotonic(), self._child
        if now - self._looked_at > self.look_every + _PAUSE_SECONDS:
            self._lenient_until = now + min(_ASKS_SOMETIMES, self._step_timeout)
        self._looked_at = now
        if child is None or child.death is not None or not (child.calls and child.is_loaded):
            return
        if now < self._lenient_until:
            child.heard_at = now
            return
        if child.board.is_late:
            child.kill(f"did not end a step within {self._step_timeout:g} seconds of the expected")
        silent = now - child.heard_at
        if silent > self._step_timeout + 2 * min(_ASKS_SOMETIMES, self._step_timeout / 4):
            child.kill(f"did not answer for {silent:.0f} seconds")
        elif silent > min(_ASKS_SOMETIMES, self._step_timeout / 4):
            child.ask_whether_it_works()

    @property
    def look_every(self) -> float:
        """Seconds between two looks."""
        return min(1.0, self._step_timeout / 4)

    def let_go(self, target: int, name: str) -> None:
        """End what was dropped, if the process that had it lives."""
        child = self._child
        if child is not None and child.death is None and not self.closed:
            child.send(target, name, (), {})

    def close(self, *, wait: bool = True) -> None:
        """End the process; idempotent."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            child = self._child
        self.left.put(None)
        if child is None or child.born != fork_count():
            return
        if wait and child.death is None:
            call = child.send(0, "close", (), {})
            if not call.done.wait(_END_SECONDS):
                child.kill("did not close")
        child.end(_END_SECONDS if wait else 0)
        self._count(child)
        child.board.close()
        if self._keeper is not None:
            self._keeper.end()

    def forget(self) -> None:
        """In a child of `os.fork`: the process is the parent's."""
        self._lock = threading.RLock()  # the one who had it may not be here
        if self._child is not None:
            self._child.forget()
        if self._keeper is not None:
            self._keeper.forget()


def _watch(process: weakref.ref[EngineProcess], left: SimpleQueue[Any], last: list[Any]) -> None:
    """Look after a process until it is closed, or nobody has it any more."""
    every = 0.05
    while True:
        item: Any = ()
        with suppress(Empty):
            item = left.get(timeout=every)
        there = process()
        if there is None:
            last[1].end()
            return
        if item is None or there.closed:
            return
        if item:
            there.let_go(*item)
        there.look()
        every = there.look_every
        del there


def _kill_last(last: list[Any]) -> None:
    """What becomes of a process that nobody has any more."""
    child = last[0]
    if child is not None and child.death is None and child.born == fork_count():
        child.kill("was dropped")


@atexit.register
def _close_all() -> None:
    for process in list(_processes):
        with suppress(Exception):
            process.close()


def _forget_all() -> None:
    for process in list(_processes):
        process.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
