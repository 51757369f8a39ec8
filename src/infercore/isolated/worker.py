"""What runs in the process of an isolated engine: it answers one pool's calls until it ends."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from select import PIPE_BUF
from typing import TYPE_CHECKING, Any

import attrs

from infercore.engine import digest
from infercore.errors import InferCoreError, SessionBusyError, SessionClosedError
from infercore.isolated import wire
from infercore.isolated.board import COUNTED, OF_POOL, STEP
from infercore.isolated.held import Held, answer_of_shown
from infercore.isolated.line import Line, frame_of_chunk
from infercore.isolated.logs import ToProgram
from infercore.session import snapshots
from infercore.session.generation import Shown
from infercore.session.jobs import Item
from infercore.session.observer import Step, is_observed, set_observer
from infercore.session.pool_stream import PoolStream
from infercore.values.pool import PoolConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from infercore.session.pool import SessionPool
    from infercore.session.session import CoreSession

AT_ONCE = frozenset({"ping", "stats", "explain_context", "cancel"})
"""Calls that wait for nothing, and so are answered by the thread that reads."""
_GOES_ON = frozenset({"load", "next", "end", "close"})
"""Calls that do nothing of their own that could end a process, but for the engine's steps."""
_CALLS = frozenset(
    {
        "ensure_prefix",
        "prefill_suffix",
        "beam_search",
        "sample_many",
        "evict",
        "snapshot",
        "restore",
        "check_decode",
    }
)
_OWN_CALLS = frozenset({"open", "next", "end", "fork"})
_TOKENIZER = frozenset(
    {"encode", "decode", "token_bytes", "is_eog", "is_control", "apply_chat_template"}
)
_STREAMS = frozenset({"decode", "completion", "chat", "generating", "infill"})
N_THREADS = 4096
_BARE = Shown("", ())[2:]
_SWITCH_SECONDS = 5e-4
"""For who wants the interpreter: the thread of the engine, which gives it up in each of its calls,
would wait Python's 5 ms for it wherever the calls of sessions begin or end."""
_SLACK = 20.0
"""A call that takes so many times the mean of late is still expected."""


class Worker:
    """Answers the requests for one pool: those of a program at the other end of a line, if any."""

    def __init__(self, line: Line | None = None) -> None:
        self._line: Any = line
        self._board: Any = None if line is None else line.board
        self._lane = 0  # the session whose stream has it
        self._lane_lock, self._fence = threading.Lock(), threading.Lock()
        self._threads = ThreadPoolExecutor(N_THREADS, thread_name_prefix="infercore-call")
        self._outside: set[int] = set()
        self._outside_lock = threading.Lock()
        self._held: dict[int, Held] = {}
        self._ids: dict[int, int] = {}  # of sequences, by the identity of the object
        self._model: Any = None
        self._pool: SessionPool | None = None
        self._n_replayed = 0
        self._scheduler: Any = None
        self._step_timeout = 60.0

    def run(self) -> None:
        """Answer until the requests end."""
        while True:
            request = self._line.read()
            if type(request) is bytes:
                self._begin_next(*wire.next_of(request))
                continue
            number, target, name, args, fields = request
            if name == "cancel" and target in self._held:
                self._held[target].cancelled_to = number  # of calls too that have not begun
            work = partial(self._answer_or_end, number, target, name, args, fields)
            if name in AT_ONCE:
                work()
            else:
                self._threads.submit(work)

    # -- chunks --------------------------------------------------------------------------------

    def _begin_next(self, number: int, target: int, in_lane: bool) -> None:  # noqa: FBT001
        """Let who generates answer, so that no thread waits for that; where it cannot, a thread."""
        held = self._held.get(target)
        if held is None:
            self._threads.submit(self._answer_or_end, number, target, "next", [], {})
        elif held.lock.acquire(blocking=False):
            self._next_of(held, number, target, in_lane)
        else:
            self._threads.submit(self._next_later, held, number, target, in_lane)

    def _next_later(self, held: Held, *asked: Any) -> None:
        try:
            held.lock.acquire()
            self._next_of(held, *asked)
        except BaseException:  # noqa: BLE001  (as in `_answer_or_end`)
            os._exit(1)

    def _next_of(self, held: Held, number: int, target: int, in_lane: bool) -> None:  # noqa: FBT001
        """Answer a request for a chunk of a session whose lock is held, and let go of that."""
        if number <= held.answered:  # asked before on the page, and maybe given up since
            sent, frame = held.in_lane
            held.lock.release()
            if sent == number:
                self._line.send_frame(frame)
            elif number < held.answered:  # else its answer is under way
                self._send(number, False, SessionBusyError("another call came before"), None)
            return
        self._give_lane(target, in_lane=in_lane)
        held.number = held.answered = number
        if not held.ask(number, partial(self._given, held, target)):
            self._threads.submit(self._answer_item, held, target, number, None)

    def _given(self, held: Held, target: int, number: int, item: Shown | Item) -> None:
        """Answer with a stream's next item: here where it is text, else in a thread.

        For whoever generates, between two steps: so it waits for nothing.
        """
        try:
            ending = None
            if isinstance(item, Item):
                ending = item
            elif self._answer_text(held, target, number, item):
                return
            self._threads.submit(self._answer_item, held, target, number, ending)
        except BaseException:  # noqa: BLE001  (such as no thread: as in `_answer_or_end`)
            os._exit(1)

    def _answer_text(self, held: Held, target: int, number: int, item: Shown) -> bool:
        """Answer with text, or ask for what follows where none of it is to be shown yet.

        False where that has to be waited for.
        """
        try:
            answer: Any = None
            if item[2:] == _BARE and type(held.stream) is PoolStream:
                answer = answer_of_shown(held, number, item)
            elif (result := held.text(item)) is not None:
                answer = True, result, None
        except BaseException as error:  # noqa: BLE001  (it is the caller's to see)
            answer = False, error, self._value(target, "next")
        if answer is None:
            with self._lane_lock:  # the next item calls another than `_came`
                if self._board.armed == target:
                    self._board.armed = 0
            return held.ask(number, partial(self._given, held, target))
        self._answer_held(held, target, number, answer)
        return True

    def _answer_item(self, held: Held, target: int, number: int, item: Item | None) -> None:
        """Answer with a stream's next item; the session is held since that was asked for."""
        try:
            try:
                answer = True, *self._work_on(held, target, "next", [item], {})
            except BaseException as error:  # noqa: BLE001  (it is the caller's to see)
                answer = False, error, self._value(target, "next")
            self._answer_held(held, target, number, answer)
        except BaseException:  # noqa: BLE001  (as in `_answer_or_end`)
            os._exit(1)

    def _answer_held(self, held: Held, target: int, number: int, answer: Any) -> None:
        """Send the answer, or the frame of it, of a session that is held, and let go of that."""
        frame = answer if type(answer) is bytes else frame_of_chunk([number, *answer])
        in_lane = self._lane == target and frame is not None and len(frame) <= PIPE_BUF
        if in_lane:
            held.in_lane = number, frame
            if self._board.armed != target:  # else `_came` is called as it is
                self._arm(held, target)
        held.lock.release()
        if frame is None:
            self._send(number, *answer)
            return
        self._check_engine()
        send = self._line.send_in_lane if in_lane else self._line.send_frame
        send(frame)

    def _give_lane(self, target: int, *, in_lane: bool) -> None:
        with self._lane_lock:
            if in_lane or self._lane == target:
                self._board.armed = 0
                self._lane = target if in_lane else 0

    def _arm(self, held: Held, target: int) -> None:
        """Look at the page, instead of waiting for a frame, when the stream's next item comes."""
        source = held.source
        if source is None or not source.listen(partial(self._came, held, target)):
            return
        with self._lane_lock:
            if self._lane == target and source.is_empty:
                self._board.armed = target

    def _came(self, held: Held, target: int) -> None:
        """Answer with an item that came, if its reader has asked for it."""
        try:
            while (source := held.source) and (number := self._asked_for(held, source, target)):
                self._given(held, target, number, source.claim())
        except BaseException:  # noqa: BLE001  (as in `_answer_or_end`)
            os._exit(1)

    def _asked_for(self, held: Held, source: PoolStream, target: int) -> int:
        """Return the number of a request for the item that is there, and hold the session; or 0."""
        board = self._board
        if source.is_empty:
            return 0
        with self._lane_lock:
            if self._lane != target:
                return 0
            number = self._number_of(held, target)
            if not number:
                board.armed = 0
                with self._fence:  # what was written is there before what is read next
                    pass
                number = self._number_of(held, target)
                if not number:
                    return 0
                board.armed = target
            if not held.lock.acquire(blocking=False):
                board.armed = 0
                return 0
            if number <= held.answered or source.is_empty:  # another thread has just answered
                held.lock.release()
                return 0
            held.number = held.answered = number
            return number

    def _number_of(self, held: Held, target: int) -> int:
        """Return the number of a request on the page that is this session's, and is new; or 0."""
        number, by = self._board.asked
        return number if by == target and number > held.answered else 0

    def _answer_or_end(self, *request: Any) -> None:
        """Answer a request; who asked would wait for ever for an answer that cannot be sent."""
        try:
            self._answer(*request)
        except BaseException:  # noqa: BLE001  (there is nobody here to see it)
            os._exit(1)

    def _answer(
        self, number: int, target: int, name: str, args: list[Any], fields: dict[str, Any]
    ) -> None:
        mark = target or OF_POOL | (number & (OF_POOL - 1))
        is_outside = name not in AT_ONCE and name not in _GOES_ON
        if is_outside:
            self._begin_outside(mark)
        answer = self.answer(target, name, args, fields, number)
        if is_outside:
            self._leave_outside([mark])
        self._send(number, *answer)

    def _send(self, number: int, is_well: bool, result: Any, value: Any) -> None:  # noqa: FBT001
        """Send an answer, unless another process may do better."""
        self._check_engine()
        self._line.send([number, is_well, result, value])

    def _check_engine(self) -> None:
        if self._scheduler is not None and self._scheduler.fatal is not None:
            os._exit(1)

    def answer(
        self, target: int, name: str, args: list[Any], fields: dict[str, Any], number: int = 0
    ) -> tuple[bool, Any, Any]:
        """Return whether a request went well, its result or error, and the session's value.

        With the ``number`` of the request one that was cancelled before it began is so.
        """
        try:
            if target:
                return True, *self._of_session(target, name, args, fields, number)
            return True, getattr(self, f"do_{name}")(*args, **fields), None
        except BaseException as error:  # noqa: BLE001  (it is the caller's to see)
            return False, error, self._value(target, name)

    def _begin_outside(self, mark: int) -> None:
        with self._outside_lock:
            self._outside.add(mark)
            self._board.begin_outside(list(self._outside))

    def _leave_outside(self, marks: Iterable[int]) -> None:
        with self._outside_lock:
            self._outside.difference_update(marks)
            self._board.begin_outside(list(self._outside))

    # -- sessions ------------------------------------------------------------------------------

    def holds(self, target: int) -> bool:
        """Whether a session is here."""
        return target in self._held

    def _of_session(
        self, target: int, name: str, args: list[Any], fields: dict[str, Any], number: int
    ) -> Any:
        """Return the answer, and the session's value where the call may have changed it."""
        held = self._held.get(target)
        if held is None:
            raise SessionClosedError("this session is closed; open a new one")
        if name in AT_ONCE or name == "close":
            return getattr(self, f"_{name}")(held), None
        with held.lock:
            held.number = held.answered = number
            return self._work_on(held, target, name, args, fields)

    def _work_on(
        self, held: Held, target: int, name: str, args: list[Any], fields: dict[str, Any]
    ) -> Any:
        """Do what the program asks for, one call after the other.

        The program knows whether a stream is open: what it left when it was interrupted is not.
        """
        if name != "next" and self._lane == target:
            self._give_lane(target, in_lane=False)
        if name not in ("next", "end"):
            held.end()
        if name in _CALLS:
            answer = getattr(held.session, name)(*args, **fields)
        elif name in _OWN_CALLS:
            answer = getattr(self, f"_{name}")(held, *args)
        else:
            raise ValueError(name)
        keeps_value = name == "open" or (name == "next" and held.stream is not None)
        return answer, None if keeps_value else self._value(target, name)

    @staticmethod
    def _next(held: Held, item: Item | None = None) -> Any:
        answer = held.next(item)
        if answer[0] is None or answer[0].finish_reason is not None:
            held.forget()
        return answer

    @staticmethod
    def _open(held: Held, kind: str, args: Any, fields: dict[str, Any], replay: Any) -> Any:
        if kind not in _STREAMS:
            raise ValueError(kind)
        return held.open(kind, args, fields, replay)

    @staticmethod
    def _end(held: Held) -> tuple[int, int]:
        held.end()
        return held.counts

    @staticmethod
    def _explain_context(held: Held) -> Any:
        return held.session.explain_context()

    @staticmethod
    def _cancel(held: Held) -> None:
        held.session.cancel()

    def _fork(self, held: Held, target: int) -> Any:
        return self._keep(target, held.session.fork())

    def _close(self, held: Held) -> Any:
        target = self._ids.pop(id(held.session.context.sequence))  # type: ignore[attr-defined]
        self._held.pop(target, None)
        held.session.close()
        return held.session.explain_context()

    def _value(self, target: int, name: str) -> Any:
        held = self._held.get(target)
        if held is None or name in AT_ONCE or held.session.closed:
            return None
        return snapshots.value_of(held.session)

    def _keep(self, target: int, session: CoreSession) -> Any:
        self._held[target] = Held(session, self._note_replayed)
        self._ids[id(session.context.sequence)] = target  # type: ignore[attr-defined]
        return session.explain_context()

    # -- the pool ------------------------------------------------------------------------------

    def do_load(self, path: str, backend: str, model: Any, config: PoolConfig) -> dict[str, Any]:
        """Load model and pool; return the facts about them."""
        infercore = importlib.import_module("infercore")
        plain = PoolConfig()
        times = {name: getattr(plain, name) for name in ("step_timeout", "load_timeout")}
        self._step_timeout = config.step_timeout
        self._model = infercore.load_model(path, backend=backend, config=model)
        own = attrs.evolve(config, isolate=False, **times)
        facts = self.hold(self._model.new_pool(own))
        adapters = [file for each in config.context.adapters for file in digest.files_at(each.path)]
        gc.collect()
        gc.freeze()  # what stays: full collections that scan it would stall all sessions
        return {**facts, "files": digest.stamps((*self._model.files, *adapters))}

    def hold(self, pool: SessionPool) -> dict[str, Any]:
        """Answer for ``pool`` from now on; return the facts about it."""
        self._pool = pool
        if self._line is not None and not pool.capabilities.encoder:
            self._scheduler = pool.owner.scheduler
            self._scheduler.stepping.on_call = self._note_call
            self._scheduler.on_work = self._note_work
            self._scheduler.recovery.instead = self._die_of
        tokenizer: Any = pool.tokenizer
        names = ("n_vocab", "bos", "eos", "eot", "add_bos", "chat_template", "digest")
        return {
            "info": pool.info,
            "backend": pool.model.backend,
            "capabilities": pool.capabilities,
            "effective": dict(pool.effective),
            "tokenizer": {
                **{name: getattr(tokenizer, name) for name in names},
                "tool_format": tokenizer.tool_format,
                "fim": tokenizer.fim,
            },
        }

    def _note_call(self, sequences: Sequence[Any]) -> None:
        """Show whose call begins, before the engine can end the process."""
        if not sequences:
            self._board.end()
            self._count()
            if self._board.is_observed != is_observed():
                set_observer(None if is_observed() else self)
            return
        found = (self._ids.get(id(sequence)) for sequence in sequences)
        ids = [number for number in found if number is not None]
        self._board.begin(ids, self._expected())
        if not self._outside.isdisjoint(ids):
            self._leave_outside(ids)

    def _die_of(self, suspects: Sequence[Any]) -> None:
        """End: an engine that failed for good may be wrong from then on in all of its process.

        Seen with OpenVINO: wrong logits in new contexts once an allocation of an older one failed.
        """
        found = (self._ids.get(id(sequence)) for sequence in suspects)
        self._board.begin([number for number in found if number is not None], self._expected())
        os._exit(1)

    def _note_work(self, *, begins: bool) -> None:
        """Show that the engine's owner works for sessions, which may hang outside a call too."""
        if begins:
            self._board.begin((), self._expected())
        else:
            self._board.end()

    def _expected(self) -> float:
        mean_ms = self._pooled.owner.scheduler.count.step_ms or 0.0
        return self._step_timeout + _SLACK * mean_ms / 1e3

    def _note_replayed(self, n: int) -> None:
        """Count tokens that an earlier process has counted; in the thread of the engine's owner."""
        self._n_replayed += n

    def _count(self) -> None:
        """Show what this process has done, without what it only did again."""
        if self._pooled.capabilities.encoder:
            counts = {"n_steps": self._pooled.stats().n_steps}
        else:
            count = self._pooled.owner.scheduler.count
            counts = {name: getattr(count, name) for name in COUNTED[1:]}
            counts["prompt_tokens"] = count.evaluated_tokens + count.cached_tokens
            # Those of a step are replayed before they are counted.
            generated = count.generated_tokens - self._n_replayed
            counts["generated_tokens"] = max(0, generated)
        self._board.count([counts.get(name, 0) for name in COUNTED])

    def on_step(self, step: Step) -> None:
        """Let the program's observer hear of a step."""
        self._line.send([STEP, True, list(attrs.astuple(step)), None])

    @property
    def _pooled(self) -> SessionPool:
        if self._pool is None:
            raise SessionClosedError("this pool is closed; open a new one")
        return self._pool

    def do_open_session(
        self, target: int, options: dict[str, Any], value: Any, *, lone: bool
    ) -> Any:
        """Open a session; with a ``value`` the one that had it in another process."""
        pool = self._pooled
        session = pool.open_session(**options)
        try:
            if value is not None:
                snapshots.adopt(session, value)
        except BaseException:
            session.close()
            raise
        if lone:
            scheduler, sequence = pool.owner.scheduler, session.context.sequence  # type: ignore[attr-defined]
            scheduler.post(partial(scheduler.stepping.lone.add, sequence))
        return self._keep(target, session)

    def do_ping(self) -> None:
        """Say that this process works."""

    def do_stats(self) -> Any:
        """Return the pool's."""
        if self._line is not None:
            self._count()
        return self._pooled.stats()

    def do_of_pool(self, name: str, args: list[Any], fields: dict[str, Any]) -> Any:
        """Return what a call of the pool returns."""
        if name not in ("embed", "rerank", "flush_cache", "drain"):
            raise ValueError(name)
        try:
            return getattr(self._pooled, name)(*args, **fields)
        finally:
            if self._line is not None and self._pooled.capabilities.encoder:
                self._count()

    def do_tokenizer(self, name: str, args: list[Any], fields: dict[str, Any]) -> Any:
        """Return what a call of the tokenizer returns."""
        if name not in _TOKENIZER:
            raise ValueError(name)
        return getattr(self._pooled.tokenizer, name)(*args, **fields)

    def do_token_bytes(self, start: int, end: int) -> list[bytes]:
        """Return the bytes of the tokens from ``start`` to ``end``."""
        return [self._pooled.tokenizer.token_bytes(token) for token in range(start, end)]

    def do_close(self) -> None:
        """Close pool and model; the process ends when its pipes are closed."""
        if self._pool is not None:
            self._pool.close()
        if self._model is not None:
            self._model.close()


def _wait_for_end(life: int) -> None:
    os.read(life, 1)
    os._exit(0)


def main(requests: int, answers: int, board: int, lane: int, life: int) -> None:
    """Work for the program at the other end of the pipes; end when that of ``life`` is closed."""
    threading.Thread(target=_wait_for_end, args=(life,), daemon=True).start()
    sys.setswitchinterval(_SWITCH_SECONDS)
    line = Line(requests, answers, board, lane)
    ToProgram(line.send).listen()
    try:
        Worker(line).run()
    except (OSError, wire.FrameError, InferCoreError):
        os._exit(1)
