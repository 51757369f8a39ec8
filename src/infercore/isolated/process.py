"""The process of an isolated engine: started, asked, watched, and started anew when it has died."""

from __future__ import annotations

import atexit
import logging
import operator
import os
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from infercore.engine.gate import fork_count
from infercore.errors import (
    InvalidStateError,
    ModelLoadError,
    SessionClosedError,
    SessionFatalError,
    UnsupportedFeatureError,
)
from infercore.isolated.board import COUNTED, OF_POOL
from infercore.isolated.child import Child, DeathError, Request
from infercore.isolated.keeper import Keeper
from infercore.isolated.logs import Told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from infercore.values.pool import PoolStats

_logger = logging.getLogger("infercore.isolated")
_END_SECONDS = 10.0
_STATS_SECONDS = 0.05
_ASKS_SOMETIMES = 5.0
_PAUSE_SECONDS = 1.0
"""Who looks so much too late was stopped, maybe with the process that is looked at."""
_MOST_PAUSES = 3
"""In a row; more are a machine that is always late, on which a hang has to end as well."""
_FIRST_SECONDS = 10.0
_BEGIN_SECONDS = 0.25
_LOOK_SECONDS = 0.005
_INNOCENT = frozenset({"next", "cancel", "end", "close", "explain_context"})
"""Calls that do nothing between two engine calls that could end a process."""
_processes: weakref.WeakSet[EngineProcess] = weakref.WeakSet()


def _dead(target: int, name: str) -> Request:
    """Return a request to a process that is gone."""
    call = Request(target, name)
    call.error = DeathError(ChildProcessError("the process of the engine is gone"))
    call.done.open()
    return call


def _changed(path: str) -> ModelLoadError:
    """Return why no process can go on where the last one was."""
    return ModelLoadError(  # without the path, which is no business of a server's clients
        "the files of the model or of its adapters have changed since this pool was opened",
        path=path,
    )


def _no_wait(_: Request) -> None:
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
        self._child: Child | None = None
        self._before: tuple[int, ...] = (0,) * len(COUNTED)
        self._suspects: set[int] = set()
        self._lone: set[int] = set()
        self._first: set[int] = set()
        self._first_until = 0.0
        self._in_step: set[int] = set()
        self._alone = threading.Lock()
        self.ended: dict[int, BaseException] = {}
        self.fatal: SessionFatalError | None = None
        self.closed = self._gives_up = False
        self.epoch = 0
        self._told = Told()
        self.n_restarts = 0
        self._looked_at = self._lenient_until = time.monotonic()
        self._n_pauses = 0
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
        if self.closed or self._gives_up:
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
                log = partial(self._told.log, self.epoch + 1)
                child = Child(self._kept(), weakref.WeakMethod(self._noted_death), log)
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
                facts: dict[str, Any] = call.result
                if hasattr(self, "facts") and facts["files"] != self.facts["files"]:
                    self._fail(_changed(str(self._load["path"])))
                    child.kill("has read other files than the one before")
                    child.end(_END_SECONDS)
                    self.check()
                child.is_loaded = True
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
    ) -> Request:
        """Send a request to the process number ``epoch``; one that is gone has died."""
        child = self._child
        if child is None or epoch != self.epoch or self.closed:
            return _dead(target, name)
        return child.send(target, name, args, fields or {})

    def send_next(self, epoch: int, target: int) -> Request:
        """Ask for a stream's next chunk as `send` does; the caller waits for it in this thread."""
        child = self._child
        if child is None or epoch != self.epoch or self.closed:
            return _dead(target, "next")
        return child.send_next(target)

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

    def _count(self, child: Child) -> None:
        """Keep what a process has done that does nothing more."""
        if not child.is_counted:
            counts, child.is_counted = child.board.counts, True
            self._before = tuple(map(operator.add, self._before, counts))

    # -- deaths --------------------------------------------------------------------------------

    def _noted_death(self, child: Child, cause: BaseException) -> None:
        """Judge a death: who was in the call, and whether there were too many."""
        if self.closed or child.born != fork_count():
            return
        self._count(child)
        _logger.warning("%s: %s", self._load["path"], cause)
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
            self._fail(self._first_cause or cause, "this pool's engine died too often: ")

    def _fail(self, cause: BaseException, why: str = "") -> None:
        self.fatal = self.fatal or SessionFatalError(f"{why}{cause}; open a new pool", cause=cause)

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
    def alone(self, mark: int) -> Iterator[Callable[[Request], None]]:
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

    def _until_inside(self, call: Request) -> None:
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
        if now - self._looked_at <= self.look_every + _PAUSE_SECONDS:
            self._n_pauses = 0 if now >= self._lenient_until else self._n_pauses
        elif self._n_pauses < _MOST_PAUSES:
            self._n_pauses += 1
            self._lenient_until = now + min(_ASKS_SOMETIMES, self._step_timeout)
        self._looked_at = now
        if child is None or child.death is not None or not (child.calls and child.is_loaded):
            return
        child.remind()
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
        """End the process; idempotent. Without ``wait`` also where it is just being started."""
        if not wait:
            self._gives_up = True
            if (starting := self._child) is not None:
                starting.kill("was not waited for")
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
