"""What all parts of the session share: its context, its books, its gate and its identity."""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs

from infercore.engine.digest import adapter_identities
from infercore.engine.gate import Gate
from infercore.errors import (
    SessionBusyError,
    SessionClosedError,
    SessionFatalError,
    UnsupportedFeatureError,
)
from infercore.limited.caller import looked_at
from infercore.session.identity import identity
from infercore.session.observer import observed
from infercore.session.parts import CLOSED, EMPTY, FATAL, PREFIXED, Parts
from infercore.session.pieces import pieces_of
from infercore.session.report import context_report
from infercore.session.resident import Resident
from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType
    from typing import TypeVar
    from weakref import ref

    from typing_extensions import Self

    from infercore.protocols.guarded import SequenceContext, SessionModel
    from infercore.session.stream import DecodeStream
    from infercore.values.config import DecodeConfig
    from infercore.values.manifest import ContextManifest
    from infercore.values.session import ContextReport

    T = TypeVar("T")

Overflow = Literal["error", "truncate", "shift"]


@attrs.frozen(kw_only=True)
class SessionOptions:
    """What a session is opened with beside its context.

    ``add_bos=None`` follows the tokenizer. ``profile_id`` and ``prompt_format`` are names of the
    caller's that become part of the identity. ``overflow`` says what happens when the window is
    full: "error" raises; "truncate" drops the oldest tokens of a suffix that does not fit;
    "shift" drops the oldest half of suffix and generated tokens while decoding, and moves the
    rest up. Statuses and chunks report every token that was dropped.
    """

    profile_id: str | None = attrs.field(default=None, validator=checks.text(optional=True))
    prompt_format: str | None = attrs.field(default=None, validator=checks.text(optional=True))
    add_bos: bool | None = attrs.field(default=None, validator=checks.boolean())
    overflow: Overflow = attrs.field(
        default="error", validator=checks.one_of("error", "truncate", "shift", optional=False)
    )


class Home(Protocol):
    """**Protocol:** what a session lives in: a context, and how its calls enter and leave it."""

    @property
    def context(self) -> SequenceContext:
        """Where its sessions have their sequences."""

    def call(self, operation: str) -> AbstractContextManager[Any]:
        """Return what a call named ``operation`` runs within."""

    def for_twin(self, session: Any) -> tuple[Home, int]:
        """Return where a fork lives, and the id of its sequence there."""

    def sharing(self, session: Any) -> Any:
        """Return what continuations of ``session`` share with it (a `Share`), None for nothing."""

    def copy(self, source: Resident, target: Resident) -> bool:
        """Give ``target`` the tokens of ``source``; True where they were evaluated anew."""

    def new_stream(
        self, session: Any, generation: Any, dropped: Sequence[int], started: float | None
    ) -> Any:
        """Return the iterator over what ``generation`` makes."""

    def give_back(self, seq_id: int) -> None:
        """Take back the sequence of a session that is closed."""


class SessionBase:
    """A session's state, and how every call enters and leaves it."""

    def __init__(
        self,
        model: SessionModel,
        shared: Home,
        *,
        seq_id: int,
        new_sampler: Callable[[DecodeConfig], Any],
        options: SessionOptions,
    ) -> None:
        kinds = shared.context.capabilities
        if options.overflow == "shift" and not (kinds.kv_remove == "any" and kinds.kv_shift):
            raise UnsupportedFeatureError(
                feature="overflow='shift'",
                backend=model.backend,
                hint="this context cannot move tokens; use 'error' or 'truncate'",
            )
        self.model = model
        self.resident = Resident(shared.context, seq_id)
        self.parts = Parts()
        self.gate = Gate("session")
        self.was_cancelled: Callable[[], bool] = bool  # before it began, as a call begins
        self.in_call = False  # whether a call of this session runs; `cancel` asks from any thread
        self.shared = shared
        self._has_sequence = True
        self._tokenizer = model.tokenizer
        self.pieces = pieces_of(model.tokenizer)
        self._new_sampler = self.new_sampler = new_sampler
        self._options = options
        self.overflow = options.overflow
        self._state = EMPTY
        self._stream: ref[DecodeStream] | None = None
        self._add_bos = model.tokenizer.add_bos if options.add_bos is None else options.add_bos
        self.renew_identity()

    def renew_identity(self) -> None:
        """Take what the context computes with now as part of the identity."""
        self._computes_with = _changeable(self.shared.context.effective)
        self.identity = self.identity_now()
        self._manifest_digest = self.identity.digest
        if self.resident.page is not None:
            self.resident.page.identity = self._manifest_digest

    def identity_now(self) -> ContextManifest:
        """Return the identity of what the context would compute now."""
        effective, options = self.shared.context.effective, self._options
        return identity(
            self.model,
            effective,
            add_bos=self._add_bos,
            profile_id=options.profile_id,
            prompt_format=options.prompt_format,
            adapters=adapter_identities(effective.get("adapters") or ()),
        )

    def identify_as(self, other: SessionBase) -> None:
        """Have the identity of ``other``, whose tokens this session takes over."""
        self._computes_with, self.identity = other._computes_with, other.identity
        self._manifest_digest = other._manifest_digest
        if self.resident.page is not None:
            self.resident.page.identity = self._manifest_digest

    @property
    def changed(self) -> str | None:
        """What was changed in the context since the identity was taken, None where nothing was."""
        now = _changeable(self.shared.context.effective)
        if now == self._computes_with:
            return None
        return next(name for name in now if now[name] != self._computes_with[name])

    def begin_anew_if_changed(self) -> int:
        """Let go of what was made with what is no longer in force; return how many tokens.

        To be called once nothing can be refused any more.
        """
        if self.changed is None:
            return 0
        n_dropped = self.resident.clear()
        self.resident.owed = []
        self.enter(EMPTY, Parts())
        self.renew_identity()
        return n_dropped

    def __repr__(self) -> str:
        if self.closed:
            return "<Session closed>"
        held = f"{self.resident.n_wanted}/{int(self.context.n_ctx_seq)} tokens"
        return f"<Session {self.state} {held}>"

    @property
    def state(self) -> str:
        """EMPTY, PREFIXED, READY, DECODED, CLOSED or FATAL."""
        if self.closed:
            return CLOSED
        return FATAL if self.gate.fatal is not None else self._state

    @property
    def context(self) -> SequenceContext:
        """The context that it works on: its own, or one that a pool pages in and out."""
        return self.resident.context

    @property
    def closed(self) -> bool:
        """Whether `close` was called, of the session or of its pool."""
        return self.gate.closed or self.context.closed

    def explain_context(self) -> ContextReport:
        """Report what is resident; see `Session.explain_context`."""
        return context_report(
            state=self.state,
            parts=self.parts,
            resident=self.resident,
            identity=self.identity,
            tokenizer=self._tokenizer,
            fatal=self.gate.fatal,
        )

    # -- for the parts of the session ----------------------------------------------------------

    def enter(self, state: str, parts: Parts) -> None:
        """Be in ``state`` with the logical context ``parts``."""
        self._state = state
        self.parts = parts

    def stay(self, state: str, parts: Parts, tokens: list[int]) -> None:
        """After a change that was broken off: be as before, whatever the engine holds now."""
        self.resident.put_back(tokens)
        self.resident.doubt()
        self.enter(state, parts)

    @contextmanager
    def entered(self, operation: str, timeout: float | None = None) -> Iterator[None]:
        """Hold the session for a call: alone, with no decode open and a tape that is true.

        Where the context can no longer be trusted, nor can the session. Raises
        `CallTimeoutError` where ``timeout`` seconds are over.
        """
        with self.gate:
            self.leave_stream(operation)
            self.resident.cancelled = False
            try:
                self.in_call = True
                if self.was_cancelled():
                    self.resident.cancelled = True
                with (
                    observed(operation),
                    self.fatal_for_good(),
                    self.resident.limited(timeout),
                    self.shared.call(operation),
                    looked_at(self.resident.look_whether_wanted),
                ):
                    self.resident.settle()
                    self.parts.fit(self.resident.n_wanted)
                    yield
            finally:
                self.in_call = False

    @contextmanager
    def fatal_for_good(self) -> Iterator[None]:
        """Repeat in every later call the cause for which the context failed in this one."""
        try:
            yield
        except BaseException as error:
            self.judge(error)
            raise

    def judge(self, error: BaseException) -> None:
        """Fail for good where ``error`` means that the context did; name the backend in others."""
        if isinstance(error, UnsupportedFeatureError):  # a template's or a vocabulary's lack
            error.backend = error.backend or self.model.backend
        if isinstance(error, SessionFatalError):
            raise self.gate.fail(error.cause) from error
        if self.resident.fatal_cause is not None:  # an interruption that it did not survive
            self.gate.fail(self.resident.fatal_cause)

    def prefilled(self, work: Callable[[], T], fallback: str) -> T:
        """Run ``work``; where it fails after a change, the state is ``fallback``."""
        before = self.resident.tape.tokens()
        try:
            return work()
        except BaseException:
            if self.resident.tape.tokens() != before:
                self._fall_back(fallback)
            raise

    def _fall_back(self, state: str) -> None:
        tape, parts = self.resident.tape, self.parts
        self._state = state
        if state == EMPTY:
            self.parts = Parts()
            tape.logical = 0
            self.resident.owed = []
        elif state == PREFIXED:
            parts.n_prefix = tape.logical = tape.common(parts.prefix_ids)
            parts.forget_volatile()
            self.resident.owed = []

    def encode(self, text: str, *, parse_special: bool, add_special: bool = True) -> list[int]:
        """Return the ids of ``text``, with BOS in front where the session has it."""
        begins, started = add_special and self._add_bos, time.perf_counter()
        ids: list[int] = self._tokenizer.encode(
            text, add_special=begins, parse_special=parse_special
        )
        self.context.count_time("tokenize", time.perf_counter() - started)
        bos = self._tokenizer.bos
        if begins and bos is not None and not self._tokenizer.add_bos:
            ids = [bos, *ids]
        return ids

    def open_stream(self) -> DecodeStream | None:
        """Return the decode that holds the session, if any."""
        stream = self._stream() if self._stream is not None else None
        return None if stream is None or stream.finished else stream

    def leave_stream(self, operation: str) -> None:
        """End a decode that was cancelled, which nobody has to read any more.

        Raises `SessionBusyError` while another is open, `SessionClosedError` if closed.
        """
        if self.closed:
            raise SessionClosedError("this session's pool is closed; open a new one")
        stream = self.open_stream()
        if stream is not None and stream.is_cancelled:
            stream.end()
        elif stream is not None:
            raise SessionBusyError(
                f"{operation} must wait: a decode is open; read it to its end, or close it"
            )

    def sample_through(
        self, wrap: Callable[[Callable[[DecodeConfig], Any], DecodeConfig], Any]
    ) -> None:
        """Let ``wrap(new_sampler, config)`` make the samplers of later decodes; not of a fork's."""
        self.new_sampler = partial(wrap, self._new_sampler)

    # -- ends ----------------------------------------------------------------------------------

    def cancel(self) -> None:
        """End the prefill or decode that runs, from any thread; nothing where none runs."""
        self._cancel_stream()
        if self.in_call:
            self.resident.cancelled = True
            self.context.abort()
        self._cancel_stream()  # one that was made meanwhile, after it had looked for a cancel

    def _cancel_stream(self) -> None:
        stream = self.open_stream()
        if stream is not None:
            stream.cancel()

    def close(self) -> None:
        """Release everything; idempotent. What runs is cancelled first.

        Raises `SessionBusyError`, *unchanged*, from within a call of this session (a callback).
        """
        if not self.gate.entered_here():
            self.cancel()
        if not self.gate.shut():
            return
        stream = self.open_stream()
        if stream is not None:
            stream.abandon()
        has_sequence, self._has_sequence = self._has_sequence, False
        if has_sequence:
            self.shared.give_back(self.resident.seq_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _changeable(effective: Mapping[str, Any]) -> dict[str, Any]:
    """Return what changes KV values and may be changed while a context lives."""
    return {
        "adapters": tuple(effective.get("adapters") or ()),
        "control_vector": effective.get("control_vector"),
        "attention_type": effective.get("attention_type"),
    }
