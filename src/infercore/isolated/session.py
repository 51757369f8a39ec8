"""A session whose engine lives in another process, and may die: its value is kept here."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import attrs

from infercore.engine.gate import Gate
from infercore.errors import (
    CallTimeoutError,
    ContextOverflowError,
    InferCoreError,
    SessionBusyError,
    SessionFatalError,
)
from infercore.isolated.child import DeathError
from infercore.isolated.lane import Arrival
from infercore.isolated.stream import Asked, IsolatedStream, Opened, less_time, on_its_way
from infercore.session import snapshots, tool_loop
from infercore.session.observer import observed, stream_begins, stream_ended
from infercore.session.parts import CLOSED, DECODED, FATAL
from infercore.session.prefill import as_input
from infercore.session.session import check_begun, decode_config
from infercore.values import checks
from infercore.values.session import PrefixInput, SuffixInput

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from typing_extensions import Self

    from infercore.isolated.places import Place
    from infercore.isolated.pool import IsolatedPool
    from infercore.values.config import DecodeConfig
    from infercore.values.session import (
        Beam,
        Completion,
        ContextReport,
        Message,
        PrefixStatus,
        Snapshot,
        StreamChunk,
        SuffixStatus,
    )

_REPORT_SECONDS = 1.0
"""A process that does not answer so long is stuck: what was known of a session is told."""


class IsolatedSession:
    """A `Session` of an `IsolatedPool`.

    What it is without its engine (state, parts, tokens) comes back with every answer; where the
    engine's process has died, the next one is given that and the call is made again.
    """

    def __init__(
        self,
        pool: IsolatedPool,
        target: int,
        options: Mapping[str, Any],
        *,
        owns_pool: bool = False,
        forked: tuple[int, ContextReport, Any] | None = None,
        place: Place | None = None,
    ) -> None:
        self.context = pool  # an AsyncSession asks it for threads
        self._pool = pool
        self._process = pool.process.place() if place is None else place
        self._target = target
        self._options = dict(options)
        self._owns_pool = owns_pool
        self._gate = Gate("session")
        self._value: Any = None
        self._opened: Opened | None = None
        self._cancelled = self._in_call = False
        self._epoch = 0
        if forked is None:
            self._arrive()
        else:
            self._epoch, self._report, self._value = forked
        pool.take_in(self)
        self._drop = weakref.finalize(self, _dropped, self._process, target)

    # -- facts ---------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """EMPTY, PREFIXED, READY, DECODED, CLOSED or FATAL."""
        return self.explain_context().state

    @property
    def closed(self) -> bool:
        """Whether `close` was called, of the session or of its pool."""
        return self._gate.closed or (self._process.closed and self._gate.fatal is None)

    @property
    def was_cancelled(self) -> bool:
        """Whether `cancel` was called since the last call began."""
        return self._cancelled

    @property
    def is_interrupted(self) -> bool:
        """Whether a call or stream has begun whose process died, and has no other one yet."""
        opened, living = self._opened, self._process.living
        if self.closed:
            return False
        return (self._in_call and self._epoch != living) or (
            opened is not None and opened.epoch != living
        )

    def explain_context(self) -> ContextReport:
        """Report what is resident; see `Session.explain_context`."""
        if not self.closed and self._gate.fatal is None:
            call = self._process.send(self._epoch, self._target, "explain_context")
            answered = call.done.wait(_REPORT_SECONDS) and call.error is None
            self._report = call.result if answered else self._known()
        state, fatal = self._report.state, self._gate.fatal
        if self.closed:
            state = CLOSED
        elif fatal is not None:
            state = FATAL
        return attrs.evolve(
            self._report,
            state=state,
            closed=state == CLOSED,
            fatal_cause=None if fatal is None else str(fatal.cause),
        )

    def _known(self) -> ContextReport:
        """Return the report of a session that no engine holds anything of."""
        report, value, opened = self._report, self._value, self._opened
        if value is None:
            return report
        parts, n_shown = value["parts"], 0
        if opened is not None and opened.kind in ("decode", "completion"):
            n_shown = opened.n_shown_tokens
        n = len(value["tokens"]) + n_shown
        n_prefix = min(parts["n_prefix"], n)
        n_generated = min(parts["n_generated"] + n_shown, n - n_prefix)
        return attrs.evolve(
            report,
            state=DECODED if n_shown else value["state"],
            resident_tokens=n,
            prefix_tokens=n_prefix,
            suffix_tokens=n - n_prefix - n_generated,
            generated_tokens=n_generated,
            warm_tail_tokens=0,
            pending_tokens=0,
            held_tokens=0,
            available_tokens=max(0, report.n_ctx - n),
            stable_byte_hash=parts["byte_hash"],
            stable_token_hash=parts["token_hash"],
        )

    # -- asking --------------------------------------------------------------------------------

    @contextmanager
    def _entered(self, operation: str) -> Iterator[None]:
        """Hold the session for a call: alone, and with no decode open."""
        with self._gate:
            self._check_no_stream(operation)
            if self._opened is not None:
                self._leave(self._opened)
            self._check_begins()
            self._cancelled = False
            self._in_call = True
            try:
                with observed(operation):
                    yield
            finally:
                self._in_call = False

    def _check_begins(self) -> None:
        """Raise where no call may begin; where a pool gave up, its sessions have ended."""
        try:
            self._pool.check_open()
        except SessionFatalError as error:
            raise self._gate.fail(error.cause) from error

    def _check_no_stream(self, operation: str) -> None:
        """Raise `SessionBusyError` while a decode is open that is neither dropped nor cancelled."""
        opened = self._opened
        if opened is not None and not (opened.is_dropped or self._was_cancelled(opened)):
            raise SessionBusyError(
                f"{operation} must wait: a decode is open; read it to its end, or close it"
            )

    def _was_cancelled(self, opened: Opened) -> bool:
        """Whether a stream was cancelled, or nobody read it for so long that its pool does that."""
        timeout = self._pool.config.reader_timeout
        if self._cancelled or timeout is None or opened.is_awaited:
            return self._cancelled
        return time.perf_counter() > opened.read_at + timeout

    def _leave(self, opened: Opened) -> None:
        """End a stream that nobody has any more, or nobody has to read."""
        stream = None if opened.stream is None else opened.stream()
        if stream is not None:
            stream.let_go()
        opened.tell_end()
        self.end(opened)

    def _arrive(self) -> None:
        """Be in the process that answers now: with what this session is, where it is another."""
        while True:
            cause = self._process.ended.get(self._target)
            if cause is not None:
                raise self._gate.fail(cause)
            try:
                epoch = self._process.here()
            except SessionFatalError as error:
                raise self._gate.fail(error.cause) from error
            if epoch == self._epoch:
                return
            is_lone = self._process.is_lone(self._target)
            given = [self._target, self._options, self._value]
            call = self._process.send(epoch, 0, "open_session", given, {"lone": is_lone})
            call.done.wait()
            if call.error is None:
                self._epoch = epoch
                self._report = call.result
                return
            if not isinstance(call.error, DeathError):
                raise call.error

    def _ask(self, name: str, *args: Any, **fields: Any) -> Any:
        """Return what the engine's process answers; made anew in another where one died over it."""
        started = time.perf_counter()

        def again() -> Asked:
            spent = time.perf_counter() - started
            return args, {name: less_time(value, spent, name) for name, value in fields.items()}

        return self._ask_for(name, (args, fields), again)

    def _ask_for(self, name: str, asked: Asked, again: Callable[[], Asked]) -> Any:
        """Return what is answered to ``asked``, or to ``again()`` where a process died over it."""
        started = time.perf_counter()
        while True:
            self._process.let_first(self._target)
            self._arrive()
            with self._process.alone(self._target) as until_inside:
                call = self._process.send(self._epoch, self._target, name, *asked)
                until_inside(call)
            self._wait(call)
            if call.error is None:
                if self._opened is None:  # beginning a stream anew is no progress
                    self._process.went_on(self._target)
                return call.result
            if isinstance(call.error, CallTimeoutError):
                elapsed_ms = (time.perf_counter() - started) * 1e3  # in all processes that died too
                n_tokens = call.error.resident_tokens
                late = CallTimeoutError(elapsed_ms=elapsed_ms, resident_tokens=n_tokens)
                raise late from call.error
            if not isinstance(call.error, DeathError):
                raise self._judged(call.error)
            asked = again()

    def _wait(self, call: Any) -> None:
        """Wait for an answer; an interruption cancels the call and waits for that."""
        try:
            if self._cancelled:
                self._send_cancel()
            call.done.wait()
        except BaseException:
            self.cancel()
            call.done.wait()
            raise
        finally:
            if call.value is not None:
                self._value = call.value

    def _judged(self, error: BaseException) -> BaseException:
        if isinstance(error, SessionFatalError):
            self._gate.fail(error.cause)
        return error

    def _call(self, name: str, *args: Any, **fields: Any) -> Any:
        with self._entered(name):
            return self._ask(name, *args, **fields)

    # -- prefix and suffix ---------------------------------------------------------------------

    def ensure_prefix(
        self, prefix: PrefixInput | str | Sequence[int], *, timeout: float | None = None
    ) -> PrefixStatus:
        """Make the context equal ``prefix``; see `Session.ensure_prefix`."""
        checks.check_seconds("timeout", timeout)
        given = as_input(prefix, PrefixInput, "prefix")
        status: PrefixStatus = self._call("ensure_prefix", given, timeout=timeout)
        return status

    def prefill_suffix(
        self, suffix: SuffixInput | str | Sequence[int], *, timeout: float | None = None
    ) -> SuffixStatus:
        """Put ``suffix`` after the prefix; see `Session.prefill_suffix`."""
        checks.check_seconds("timeout", timeout)
        given = as_input(suffix, SuffixInput, "suffix")
        status: SuffixStatus = self._call("prefill_suffix", given, timeout=timeout)
        return status

    def evict(self, start: int, end: int) -> PrefixStatus:
        """Take the tokens in [start, end) out of the context; see `Session.evict`."""
        status: PrefixStatus = self._call("evict", start, end)
        return status

    # -- generating ----------------------------------------------------------------------------

    def _decode_config(
        self, config: DecodeConfig | None, fields: Mapping[str, Any]
    ) -> DecodeConfig:
        return decode_config(config, fields, self._pool.info)

    def decode(self, config: DecodeConfig | None = None, **fields: Any) -> IsolatedStream:
        """Return an iterator that generates from here; see `Session.decode`."""
        return self._stream("decode", self._decode_config(config, fields))

    def check_decode(self, config: DecodeConfig | None, fields: Mapping[str, Any]) -> DecodeConfig:
        """Return the config of a decode that could begin now; raises what `decode` raises.

        It asks nobody: what a session is stands here.
        """
        built = self._decode_config(config, fields)
        with self._gate, observed("decode"):
            self._check_no_stream("decode")
            self._check_begins()
            known = self._known()
            n, n_ctx = known.resident_tokens, known.n_ctx
            check_begun(known.state, n)
            shifts = self._options["overflow"] == "shift" and n - known.prefix_tokens > 1
            if n + (not shifts) > n_ctx:
                raise ContextOverflowError(
                    stage="decode",
                    resident_tokens=n,
                    additional_tokens=int(not shifts),
                    n_ctx=n_ctx,
                )
        return built

    def chat(
        self, messages: Sequence[Message | Mapping[str, Any]], **fields: Any
    ) -> IsolatedStream:
        """Return an iterator over the answer to ``messages``; see `Session.chat`."""
        return self._stream("chat", messages, **fields)

    def completion(
        self,
        prompt: PrefixInput | str | Sequence[int],
        config: DecodeConfig | None = None,
        **decode: Any,
    ) -> IsolatedStream:
        """Return an iterator over what follows ``prompt``; see `CoreSession.completion`."""
        given = as_input(prompt, PrefixInput, "prompt")
        return self._stream("completion", given, self._decode_config(config, decode))

    def infill(
        self, prefix: str, suffix: str, config: DecodeConfig | None = None, **decode: Any
    ) -> IsolatedStream:
        """Return an iterator over the text of a gap; see `Session.infill`."""
        return self._stream("infill", prefix, suffix, self._decode_config(config, decode))

    def generate(self, text: str | Sequence[int], **decode: Any) -> str:
        """Return the text generated after ``text`` as suffix; see `Session.generate`."""
        return "".join(chunk.text for chunk in self._stream("generating", text, **decode))

    def beam_search(self, n_beams: int, **options: Any) -> list[Beam]:
        """Return the likeliest continuations, best first; see `Session.beam_search`."""
        beams: list[Beam] = self._call("beam_search", n_beams, **options)
        return beams

    def sample_many(self, n: int, **decode: Any) -> list[Completion]:
        """Return ``n`` continuations, each with its own seed; see `Session.sample_many`."""
        started = time.perf_counter()
        found: list[Completion] = self._call("sample_many", n, **decode)
        for made in found:  # the streams that it read are in the other process
            stream_begins()
            stream_ended(started, made.usage)
        return found

    def run_tools(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        functions: Sequence[Callable[..., Any]],
        *,
        max_rounds: int = 8,
        **decode: Any,
    ) -> list[Message]:
        """Chat, run what the model calls here, and go on; see `Session.run_tools`."""
        return tool_loop.run(self.chat, messages, functions, max_rounds=max_rounds, **decode)

    # -- streams -------------------------------------------------------------------------------

    def _stream(self, kind: str, *args: Any, **fields: Any) -> IsolatedStream:
        args = tuple(map(_kept, args))  # they may be wanted again, by another worker
        fields = {name: _kept(value) for name, value in fields.items()}
        with self._entered("generate" if kind == "generating" else kind):
            opened = Opened(kind, args, fields)
            self._begin(opened)
            if kind == "chat":
                opened.keep()
            self._opened = opened
            stream = IsolatedStream(self, opened)
            opened.stream = weakref.ref(stream)
            return stream

    def _begin(self, opened: Opened) -> None:
        opened.seed = self._ask_for("open", opened.request(), opened.again)
        opened.read_at = time.perf_counter()  # to begin may have taken long
        opened.epoch = self._epoch

    def _ask_of(self, opened: Opened, name: str) -> Any:
        """Ask about an open stream; where its process died it is begun anew behind its tokens."""
        while True:
            self._process.let_first(self._target)
            self._arrive()
            if opened.epoch != self._epoch:
                self._begin_anew(opened)
            call = self._process.send(self._epoch, self._target, name)
            self._wait(call)
            if not isinstance(call.error, DeathError):
                return self._answer_of(call)

    def _begin_anew(self, opened: Opened) -> None:
        """Begin a stream in another process: with all that was shown, then it may be cancelled."""
        opened.n_begun += 1
        was_cancelled, self._cancelled = self._cancelled, False
        try:
            self._ask_for("open", opened.again(), opened.again)
        finally:
            self._cancelled |= was_cancelled
        opened.epoch = self._epoch

    def ask_next(self, opened: Opened, *, waits: bool = False) -> Any:
        """Ask for a stream's next chunk; None where another process has to begin it anew first.

        ``waits``: the caller waits for it in this thread.
        """
        process, target = self._process, self._target
        if self._opened is not opened or opened.epoch != process.living:
            return None
        if waits:
            call = process.send_next(opened.epoch, target)
        else:
            call = process.send(opened.epoch, target, "next")
        if self._cancelled:
            self._send_cancel()
        return call

    def read(self, opened: Opened, asked: Any = None) -> StreamChunk | None:
        """Return the next chunk of a stream, None at its end; ``asked`` was answered before."""
        with self._gate:
            try:
                if self._opened is not opened:  # a call that came first has ended it
                    return on_its_way(asked)
                if asked is None:
                    asked = self.ask_next(opened, waits=True)
                    if asked is not None:
                        self._wait(asked)
                if asked is None or isinstance(asked.error, DeathError):
                    answer = self._ask_of(opened, "next")
                elif asked.error is None and asked.value is None:
                    answer = asked.result
                else:
                    answer = self._answer_of(asked)
            except BaseException:
                if asked is not None and isinstance(asked.done, Arrival):
                    asked.done.leave()  # where nobody waited for it yet
                with suppress(InferCoreError):
                    self.end(opened)
                raise
            return self._taken(opened, *answer)

    def _taken(
        self, opened: Opened, chunk: StreamChunk | None, tokens: Sequence[int], position: Any
    ) -> StreamChunk | None:
        """Note what came of a stream, and return what is shown of it."""
        if chunk is None:
            self._opened = None
            return None
        opened.note(chunk, tokens, position)
        self._process.went_on(self._target)
        if chunk.finish_reason is not None:
            self._opened = None
            return opened.ended(chunk)
        return chunk

    def _answer_of(self, call: Any) -> Any:
        """Return what a call that is done was answered; raises what it was refused with."""
        if call.value is not None:
            self._value = call.value
        if call.error is not None:
            raise self._judged(call.error)
        return call.result

    def waiters(self) -> ThreadPoolExecutor:
        """Return the threads in which the calls of tasks wait."""
        return self._pool.waiters()

    def end(self, opened: Opened) -> None:
        """Close a stream; the session is held."""
        if self._opened is opened:
            try:
                if self._gate.bar is None:
                    n_prompt, n_cached = self._ask_of(opened, "end")
                    opened.counts = n_prompt, n_cached
            finally:
                self._opened = None

    def end_alone(self, opened: Opened) -> None:
        """Close a stream; while another thread takes a step, that step ends it."""
        if self._opened is not opened:
            return
        try:
            with self._gate:
                self.end(opened)
        except SessionBusyError:
            if not opened.is_dropped:  # else the call that is inside ends it
                self.cancel()

    # -- state as a value ----------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return the session's state as a value; see `Session.snapshot`."""
        snapshot: Snapshot = self._call("snapshot")
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Take the state of ``snapshot``; see `Session.restore`."""
        self._call("restore", snapshot)

    def save(self, path: str | os.PathLike[str]) -> Snapshot:
        """Write the state to a file, whole or not at all; see `Session.save`."""
        where = checks.check_path("path", path)
        snapshot = self.snapshot()
        snapshots.write(snapshot, where)
        return snapshot

    def load(self, path: str | os.PathLike[str]) -> Snapshot:
        """Take the state in a file that `save` wrote; see `Session.load`."""
        where = checks.check_path("path", path)
        with self._entered("load"):
            snapshot = snapshots.read(where)
            self._ask("restore", snapshot)
            return snapshot

    def fork(self) -> IsolatedSession:
        """Return an independent session in the same state, of the same pool."""
        with self._entered("fork"):
            target = self._pool.new_target()
            try:
                report = self._ask("fork", target)
            except BaseException:
                self._process.left.put((target, "close"))
                raise
            forked = (self._epoch, report, self._value)
            return IsolatedSession(
                self._pool,
                target,
                self._options,
                owns_pool=self._owns_pool,
                forked=forked,
                place=self._process.beside(),
            )

    # -- ends ----------------------------------------------------------------------------------

    def cancel(self) -> None:
        """End the prefill or decode that runs, from any thread; nothing where none runs."""
        self._cancelled = True
        self._send_cancel()

    def _send_cancel(self) -> None:
        self._process.send(self._epoch, self._target, "cancel")

    def close(self) -> None:
        """Release everything; idempotent. What runs is cancelled first."""
        if not self._gate.entered_here():
            self.cancel()
        if not self._gate.shut() or self._drop.detach() is None:
            return
        if self._opened is not None:
            self._opened.tell_end()
            self._opened = None
        if not self._process.closed:
            call = self._process.send(self._epoch, self._target, "close")
            call.done.wait()
            if call.error is None:
                self._report = call.result
        self._process.forget_session(self._target)
        last = self._pool.leave()
        if last and self._owns_pool:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _kept(value: Any) -> Any:
    """Return what can be read more than once."""
    return list(value) if isinstance(value, Iterator) else value


def _dropped(place: Place, target: int) -> None:
    """What becomes of a session that was dropped; it takes no lock."""
    place.left.put((target, "close"))
