"""The iterator that decodes: every end is defined, and the session is free again after each."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

from infercore.errors import DecodeAbortedError, InferCoreError, SessionBusyError
from infercore.session.parts import DECODED, PREFIXED
from infercore.session.text import TextAssembler
from infercore.values.session import StreamChunk, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from infercore.session.resident import Resident
    from infercore.session.source import Chosen, TokenSource
    from infercore.values.config import DecodeConfig
    from infercore.values.session import TokenLogprob


class DecodeStream:
    """An iterator of `StreamChunk`; a context manager that closes itself.

    A token is shown as soon as it is chosen and made resident before the next one is; closing
    or dropping the iterator makes the last one resident too.
    """

    def __init__(
        self,
        session: Any,
        config: DecodeConfig,
        source: TokenSource,
        dropped: Sequence[int] = (),
        *,
        started: float | None = None,
    ) -> None:
        self._session = session
        self._resident: Resident = session.resident
        self._config = config
        self._source = source
        self._text = TextAssembler(config.stop)
        self._pending: Chosen | None = None
        self._shown: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._shifted = list(dropped)
        self._cancelled = False
        self._begun = False
        self._abandoned = False
        self._n_completion = 0
        self._n_prompt = 0
        self._n_cached = 0
        self._started = time.perf_counter() if started is None else started
        self._first_at: float | None = None
        self._last_at: float | None = None
        self.finished = False

    def __iter__(self) -> DecodeStream:
        return self

    def __next__(self) -> StreamChunk:
        if self.finished and not self._abandoned:
            raise StopIteration
        session = self._session
        with session.shared.gate, session.gate:
            try:
                session.in_call = True
                return self._next_chunk()
            except BaseException:
                self._release()
                raise
            finally:
                session.in_call = False

    def _next_chunk(self) -> StreamChunk:
        session = self._session
        try:  # not fatal_for_good: this runs once a token
            if session.shared.is_shared:
                self._come_back()
            while True:
                chunk = self._advance()
                if chunk is not None:
                    return chunk
        except BaseException as error:
            session.judge(error)
            raise

    def _come_back(self) -> None:
        """Another session may have emptied the context, in a failure, that both share."""
        self._resident.settle()
        if self._begun and self._resident.owed:
            self._resident.go_on()

    def _advance(self) -> StreamChunk | None:
        """Take one step; return a chunk when there is something to show."""
        if not self._begun:
            try:
                self._begin()
            except DecodeAbortedError:
                if not self._is_cancelled():
                    raise
                return self._finish("cancelled")
        if self._pending is not None:
            self._settle()
        reason = self._end_reached()
        if reason is not None:
            return self._finish(reason)
        source = self._source
        if not (source.is_ahead or self._resident.has_logits()):
            self._resident.go_on()  # another session has used the context that both share
        chosen = source.next()
        self._clock()
        if source.ends(chosen.token):
            self._session.parts.ended_by = chosen.token
            is_eog = self._session.pieces[chosen.token].is_eog
            return self._finish("eos" if is_eog else "stop")
        return self._take(chosen)

    def _begin(self) -> None:
        """Prime the sampler and see to it that the logits are those of the last token."""
        self._begun = True
        session, tape = self._session, self._resident.tape
        evaluated = self._hold_all()
        parts = session.parts
        parts.ended_by = None
        self._n_prompt = tape.logical
        self._n_cached = max(0, tape.logical - parts.n_evaluated - evaluated)
        parts.n_evaluated = 0
        self._source.prime(tape.tokens(0, tape.logical))
        session.enter(DECODED, parts)

    def _hold_all(self) -> int:
        """Hold the whole logical context with its logits; return the tokens evaluated."""
        session, resident = self._session, self._resident
        native = self._config.sampling.implementation == "native"
        if native and not session.context.n_engine_outputs:
            resident.forget_logits()  # they were restored: no row that the engine could sample
        if session.state != PREFIXED:
            return resident.go_on().prefilled
        evaluated = resident.hold(session.parts.prefix_ids, need_logits=True).prefilled
        session.parts.n_prefix = resident.tape.logical
        return evaluated

    def _settle(self) -> None:
        """Make the token that was shown last resident, after any that a failure took."""
        chosen, self._pending = self._pending, None
        if chosen is None:
            return
        resident = self._resident
        n_before = resident.n_wanted
        self._session.parts.n_generated += 1
        try:
            self._source.settle(chosen)
        except BaseException as error:
            if resident.n_wanted == n_before:
                resident.owe(chosen.token)
            if not (isinstance(error, DecodeAbortedError) and self._is_cancelled()):
                raise
            resident.cancelled, self._cancelled = False, True
            with contextlib.suppress(DecodeAbortedError):  # cancelled again: it stays owed
                resident.go_on()

    def _is_cancelled(self) -> bool:
        return self._cancelled or self._resident.cancelled

    def _end_reached(self) -> str | None:
        if self._cancelled or self._resident.cancelled:
            return "cancelled"
        if self._text.stopped:
            return "stop"
        limit = self._config.max_tokens
        if limit is not None and self._n_completion >= limit:
            return "length"
        full = self._resident.free < 1 and not self._source.is_ahead
        return "context" if full and not self._make_room() else None

    def _make_room(self) -> bool:
        """Drop the older half of what follows the prefix, where that was asked for."""
        start = self._session.parts.n_prefix
        end = start + (self._resident.tape.logical - start) // 2
        if self._session.overflow != "shift" or end <= start:
            return False
        if not self._resident.can_shift_out(start, end):
            return False
        self._shifted += self._resident.shift_out(start, end)
        parts = self._session.parts
        parts.n_generated = min(parts.n_generated, self._resident.tape.logical - start)
        parts.plain = False
        self._resident.go_on()
        return True

    def _take(self, chosen: Chosen) -> StreamChunk | None:
        self._pending = chosen
        self._n_completion += 1
        self._shown.append(chosen.token)
        if chosen.logprob is not None:
            self._logprobs.append(chosen.logprob)
        piece = self._session.pieces[chosen.token]
        shown = self._config.special_text or not piece.is_control
        text = self._text.push(piece.data if shown else b"")
        return self._chunk(text) if text and not self._text.stopped else self._held(text)

    def _held(self, text: str) -> StreamChunk | None:
        """Keep the text before a stop string for the last chunk."""
        if self._text.stopped:
            self._settle()
            return self._finish("stop", text)
        return None

    def _chunk(self, text: str, **ending: Any) -> StreamChunk:
        tokens, self._shown = tuple(self._shown), []
        logprobs = None if self._config.logprobs is None else tuple(self._logprobs)
        self._logprobs = []
        shifted, self._shifted = tuple(self._shifted), []
        return StreamChunk(
            text=text, tokens=tokens, logprobs=logprobs, shifted_out=shifted, **ending
        )

    def _finish(self, reason: str, text: str = "") -> StreamChunk:
        chunk = self._chunk(text + self._text.flush(), finish_reason=reason, usage=self._usage())
        self._release()
        return chunk

    def _clock(self) -> None:
        self._last_at = time.perf_counter()
        if self._first_at is None:
            self._first_at = self._last_at

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._n_prompt,
            cached_tokens=self._n_cached,
            completion_tokens=self._n_completion,
            time_to_first_token_ms=(
                None if self._first_at is None else (self._first_at - self._started) * 1e3
            ),
            tokens_per_second=self._rate(),
            seed=self._source.seed,
            drafted_tokens=self._source.n_drafted,
            accepted_tokens=self._source.n_accepted,
        )

    def _rate(self) -> float | None:
        if self._first_at is None or self._last_at is None or self._n_completion < 2:  # noqa: PLR2004
            return None
        elapsed = self._last_at - self._first_at
        return (self._n_completion - 1) / elapsed if elapsed > 0 else None

    # -- ends from outside ---------------------------------------------------------------------

    def cancel(self) -> None:
        """End with ``finish_reason="cancelled"`` at the next step; from any thread."""
        self._cancelled = True

    def abandon(self) -> None:
        """End without touching the engine: the session is closed, and the next step says so."""
        self._abandoned = True
        self._release()

    def close(self) -> None:
        """End the decode; what was shown is resident, the session is free. Idempotent.

        While another thread is taking a step, that step ends the decode as `cancel` does.
        """
        self._cancelled = True
        if self.finished:
            return
        try:
            with self._session.shared.gate, self._session.gate:
                self._close_held()
        except SessionBusyError:
            self._leave_owed()

    def _close_held(self) -> None:
        try:
            self._session.in_call = True
            with self._session.fatal_for_good():
                self._resident.settle()
                self._settle()
        finally:
            self._session.in_call = False
            self._release()

    def _leave_owed(self) -> None:
        """Where another session has the context just now, let the next call of this one settle."""
        if self._session.shared.is_shared and not self._session.in_call:
            if self._pending is not None:
                self._session.parts.n_generated += 1
                self._resident.owe(self._pending.token)
            self._release()

    def _release(self) -> None:
        self.finished = True
        self._pending = None
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "finished", True) or sys.is_finalizing():
            return
        try:
            self.close()
        except InferCoreError:  # the session is closed, failed or busy: nothing is left to free
            self.finished = True
