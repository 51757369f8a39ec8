"""The iterator that decodes: every end is defined, and the session is free again after each."""

from __future__ import annotations

import contextlib
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from infercore.errors import CallTimeoutError, DecodeAbortedError, InferCoreError, SessionBusyError
from infercore.sampling.logprobs import raw_logprobs
from infercore.session.observer import stream_begins, stream_ended
from infercore.session.parts import DECODED, PREFIXED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from infercore.protocols.spi import FloatArray
    from infercore.session.generation import Generation
    from infercore.session.resident import Resident
    from infercore.values.session import StreamChunk, TokenLogprob


class DecodeStream:
    """An iterator of `StreamChunk`; a context manager that closes itself.

    A token is shown as soon as it is chosen and made resident before the next one is; closing
    or dropping the iterator makes the last one resident too.
    """

    def __init__(
        self,
        session: Any,
        generation: Generation,
        dropped: Sequence[int] = (),
        *,
        started: float | None = None,
    ) -> None:
        self._session = session
        self._resident: Resident = session.resident
        self._generation = generation
        generation.shifted = list(dropped)
        self._cancelled = False
        self._begun = False
        self._abandoned = False
        self._n_prompt = 0
        self._n_cached = 0
        self._n_again = 0
        self._started = time.perf_counter() if started is None else started
        timeout = generation.config.timeout
        self._deadline = None if timeout is None else self._started + timeout
        self._n_free = 0  # tokens that surely fit yet
        self.finished = False

    def __repr__(self) -> str:
        return repr(self._generation).replace(">", " finished>" if self.finished else ">")

    def __iter__(self) -> DecodeStream:
        return self

    def __next__(self) -> StreamChunk:
        if self.finished and not self._abandoned:
            raise StopIteration
        session = self._session
        try:
            with session.gate:
                if self.finished:  # by a call that came first
                    raise StopIteration
                try:
                    session.in_call = True
                    return self._next_chunk()
                except BaseException as error:
                    self._failed(error)
                    raise
                finally:
                    session.in_call = False
        except SessionBusyError:
            if self._cancelled:  # the call that is inside ends it
                raise StopIteration from None
            raise

    def drain(self) -> list[StreamChunk]:
        """Return all chunks; for a call that holds the session itself."""
        chunks = []
        try:
            while not self.finished:
                chunks.append(self._next_chunk())
        except BaseException as error:
            self._failed(error)
            raise
        return chunks

    def _next_chunk(self) -> StreamChunk:
        """Take steps until there is something to show."""
        if not self._begun:
            self._begin()
        generation, resident = self._generation, self._resident
        while True:
            has_row = generation.pending is not None and self._settle()
            reason = self._end_reached()
            if reason is not None:
                return self._finish(reason)
            if not (has_row or generation.is_ahead or resident.has_logits()):
                resident.go_on()
            token = generation.choose(resident.context, -1)
            shown = None if token is None else generation.show(token)
            if generation.reason is not None:
                self._session.parts.ended_by = generation.ended_by
                self._settle()
                return self._finish(generation.reason)
            if shown is not None:
                return shown.chunk()

    def _failed(self, error: BaseException) -> None:
        try:
            self._session.judge(error)
        except BaseException as judged:
            error = judged
            raise
        finally:
            if self._begun and not self.finished:
                stream_ended(self._started, None, error)
            self._release()

    def _begin(self) -> None:
        """Prime the sampler and see to it that the logits are those of the last token."""
        self._begun = True
        stream_begins()
        try:
            self._hold_prompt()
        except DecodeAbortedError:
            if not self._is_cancelled():
                raise
            self._cancelled = True  # the stream ends so, at its first step

    def _hold_prompt(self) -> None:
        if self._generation.is_native and not self._session.context.n_engine_outputs:
            self._resident.forget_logits()  # they were restored: no row for an engine's sampler
        with self._resident.limited(self._generation.config.timeout, self._started):
            self._n_prompt, self._n_cached = begin(self._session)
            self._look_at_prompt()
        tape = self._resident.tape
        self._generation.prime(tape.tokens(0, tape.logical))

    def _look_at_prompt(self) -> None:
        resident = self._resident
        prompt = resident.tape.tokens(0, resident.tape.logical)
        if look_at_prompt(self._generation, prompt, partial(resident.evaluate_anew, prompt)):
            self._n_again, self._n_cached = self._n_cached, 0

    def _settle(self) -> bool:
        """Make the token that was shown last resident, after any that a failure took.

        True where the engine's row is that behind it now.
        """
        generation, resident = self._generation, self._resident
        chosen = generation.pending
        if chosen is None:
            return False
        n_before = resident.tape.logical + len(resident.owed)
        self._session.parts.n_generated += 1
        try:
            if chosen.held:
                generation.pending = None
                resident.take_ahead(chosen.token)
            elif generation.looks_ahead and not generation.rests():
                self._evaluate()
            else:
                generation.pending = None
                resident.append_one(chosen.token)
                self._n_free -= 1
                return True
            self._n_free = 0
        except BaseException as error:
            self._generation.pending = None
            if resident.n_wanted == n_before:
                resident.owe(chosen.token)
            if not (isinstance(error, DecodeAbortedError) and self._is_cancelled()):
                raise
            resident.cancelled, self._cancelled = False, True
            with contextlib.suppress(DecodeAbortedError):  # cancelled again: it stays owed
                resident.go_on()
        return False

    def _evaluate(self) -> None:
        """Make the pending token resident, with what can be evaluated in the same call."""
        generation, resident = self._generation, self._resident
        tape = resident.tape
        # The token chosen behind the last guess takes room too.
        ahead = generation.ahead(lambda: tape.tokens(0, tape.logical), resident.free - 2)
        if len(ahead.tokens) == 1:
            resident.append_one(ahead.tokens[0])
            return
        resident.append_ahead(ahead.tokens, logits=ahead.logits)
        if ahead.n_guessed:
            resident.drop_ahead(generation.verify(resident.context, ahead.tokens[1:]))

    def _is_cancelled(self) -> bool:
        return self._cancelled or self._resident.cancelled

    def _end_reached(self) -> str | None:
        if self._cancelled or self._resident.cancelled:
            return "cancelled"
        generation = self._generation
        if self._deadline is not None and time.perf_counter() > self._deadline:
            return self._out_of_time()
        if generation.n_completion >= generation.most:
            return "length"
        if self._n_free < 1:
            self._n_free = self._look_free()
            if self._n_free < 1 and not (generation.is_held_ahead or self._make_room()):
                return "context"
        return None

    def _look_free(self) -> int:
        """Return how many tokens fit: without asking again, as long as nobody else takes room."""
        free = self._resident.free
        return free if self._resident.context.n_seq_max == 1 else min(free, 1)

    def _out_of_time(self) -> str:
        if self._generation.n_completion:
            return "timeout"
        raise CallTimeoutError(
            elapsed_ms=(time.perf_counter() - self._started) * 1e3,
            resident_tokens=self._resident.tape.logical,
        )

    def _make_room(self) -> bool:
        """Drop the older half of what follows the prefix, where that was asked for."""
        start = self._session.parts.n_prefix
        end = start + (self._resident.tape.logical - start) // 2
        if self._session.overflow != "shift" or end <= start:
            return False
        if not self._resident.can_shift_out(start, end):
            return False
        self._generation.shifted += self._resident.shift_out(start, end)
        parts = self._session.parts
        parts.n_generated = min(parts.n_generated, self._resident.tape.logical - start)
        parts.plain = False
        self._resident.go_on()
        return True

    def _finish(self, reason: str) -> StreamChunk:
        chunk = self._generation.finish(
            reason,
            started=self._started,
            prompt_tokens=self._n_prompt,
            cached_tokens=self._n_cached,
            reevaluated_tokens=self._n_again,
        )
        self._release()
        stream_ended(self._started, chunk.usage)
        return chunk

    # -- ends from outside ---------------------------------------------------------------------

    def cancel(self) -> None:
        """End with ``finish_reason="cancelled"`` at the next step; from any thread."""
        self._cancelled = True

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled

    def end(self) -> None:
        """End the decode for a call that holds the session; what was shown is resident."""
        self._close_held()

    def abandon(self) -> None:
        """End without touching the engine: the session is closed, and the next step says so."""
        self._abandoned = True
        if self._begun and not self.finished:
            stream_ended(self._started, None)
        self._release()

    def close(self) -> None:
        """End the decode; what was shown is resident, the session is free. Idempotent.

        While another thread is taking a step, that step ends the decode as `cancel` does.
        """
        self._cancelled = True
        if self.finished:
            return
        try:
            with self._session.gate:
                if not self.finished:
                    self._close_held()
        except SessionBusyError:
            return

    def _close_held(self) -> None:
        try:
            self._session.in_call = True
            with self._session.fatal_for_good():
                self._resident.settle()
                self._settle()
        finally:
            self._session.in_call = False
            self._owe_pending()
            if self._begun and not self.finished:
                stream_ended(self._started, None)
            self._release()

    def _owe_pending(self) -> None:
        """Leave what was shown last to the next call, where an interruption came before it."""
        pending = self._generation.pending
        if pending is not None:
            self._generation.pending = None
            self._session.parts.n_generated += 1
            self._resident.owe(pending.token)

    def _release(self) -> None:
        if not self.finished:
            sample_s, masks_s = self._generation.times()
            self._session.context.count_time("sample", sample_s)
            self._session.context.count_time("grammar", masks_s)
        self.finished = True
        self._generation.pending = None
        self._generation.close()

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


def look_at_prompt(
    generation: Generation,
    prompt: Sequence[int],
    evaluate_anew: Callable[[Callable[[int, FloatArray], object]], object],
) -> bool:
    """Evaluate ``prompt`` anew for the log-probabilities of its tokens; False: nobody asked."""
    wanted, found = generation.config.prompt_logprobs, list["TokenLogprob"]()
    if wanted is None:
        return False

    def look(place: int, row: FloatArray) -> None:
        if place + 1 < len(prompt):
            found.append(raw_logprobs(row, prompt[place + 1], wanted))

    evaluate_anew(look)
    generation.prompt_logprobs = tuple(found)
    return True


def begin(session: Any) -> tuple[int, int]:
    """Hold the whole logical context with its logits, and be in the state of a decode.

    Returns how many tokens of a prompt that are, and how many had not been evaluated since the
    decode before.
    """
    resident, parts = session.resident, session.parts
    if session.state == PREFIXED:
        evaluated = resident.hold(parts.prefix_ids, need_logits=True).prefilled
        parts.n_prefix = resident.tape.logical
    else:
        evaluated = resident.go_on().prefilled
    parts.ended_by = None
    n_prompt = resident.tape.logical
    n_cached = max(0, n_prompt - parts.n_evaluated - evaluated)
    parts.n_evaluated = 0
    session.enter(DECODED, parts)
    return n_prompt, n_cached
