"""A tape that is kept equal to what the engine holds, whatever fails, and wherever."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from infercore.errors import (
    CallTimeoutError,
    DecodeAbortedError,
    InferCoreError,
    SessionClosedError,
    SessionFatalError,
)
from infercore.session.checkpoints import Checkpoints
from infercore.session.tape import Tape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    from infercore.protocols.guarded import SequenceContext, SequencePage, SessionContext


class TrueTape:
    """One sequence of a context and its tape.

    ``owed`` are tokens of the logical context that the engine lost in a failure, or was not
    given yet; whatever goes on from here evaluates them first. ``n_pending`` counts those that
    the call which runs has still to evaluate.
    """

    def __init__(self, context: SequenceContext, seq_id: int = 0) -> None:
        self.context = context
        self.own_context = cast("SessionContext", context)
        """The context, where it is no page, with all that such a one can do."""
        self.seq_id = seq_id
        self.tape = Tape()
        self.owed: list[int] = []
        self.cancelled = False
        self.n_pending = 0
        self._checkpoints = Checkpoints(context, seq_id)
        self._outputs_of: int | None = None
        self._in_doubt = False
        self._late = False
        self._deadline: float | None = None
        self.fatal_cause: BaseException | None = None
        self.page = _page(context)
        """The context, where it keeps what it holds as a value, paged in and out of cells."""

    def wanted(self) -> list[int]:
        """Return the logical context, with what of it is owed."""
        return self.tape.tokens(0, self.tape.logical) + self.owed

    @property
    def n_wanted(self) -> int:
        """How long the logical context is, with what of it is owed."""
        return self.tape.logical + len(self.owed)

    def owe(self, token: int) -> None:
        """Let ``token`` be the next one of the logical context, without calling the engine."""
        if not self.owed and self.tape.next_is(token):
            self.tape.logical += 1
        else:
            self.owed.append(token)

    @contextmanager
    def limited(self, timeout: float | None, started: float | None = None) -> Iterator[None]:
        """Raise `CallTimeoutError` where what runs within is not done after ``timeout`` seconds.

        These count from ``started`` (`time.perf_counter`), the beginning of the call; None: now.
        """
        if timeout is None:
            yield
            return
        now = time.perf_counter()
        started = now if started is None else started
        deadline = started + float(timeout)  # locks take no number of NumPy's
        page = self.page
        if page is not None:
            page.called_at, page.deadline = started, deadline
            try:
                yield
            finally:
                page.called_at = page.deadline = None
            return
        timer = threading.Timer(max(0.0, deadline - now), self._run_out)
        timer.daemon = True
        try:
            timer.start()
            self._deadline = deadline
            yield
        except DecodeAbortedError as error:
            if not self._late:
                raise
            raise CallTimeoutError(
                elapsed_ms=(time.perf_counter() - started) * 1e3, resident_tokens=len(self.tape)
            ) from error
        finally:
            timer.cancel()
            if timer.ident is not None:  # else it could not be started
                timer.join()
            self._deadline = None
            if self._late:
                self._late = self.cancelled = False

    @contextmanager
    def cold(self) -> Iterator[None]:
        """Let what is evaluated within have nothing of what other sequences hold or left."""
        page = self.page
        if page is None:
            yield
            return
        page.is_cold = True
        try:
            yield
        finally:
            page.is_cold = False

    @property
    def was_cancelled(self) -> bool:
        """Whether somebody cancelled the call, and not the clock."""
        return self.cancelled and not self._late

    def _run_out(self) -> None:
        self._late = self.cancelled = True
        self.context.abort()

    def look_whether_wanted(self) -> None:
        """While the engine is not called: raise what ended the call meanwhile, if anything did."""
        now, page = time.perf_counter(), self.page
        if page is not None and page.deadline is not None and now >= page.deadline:
            elapsed_s = now - (page.called_at or now)
            raise CallTimeoutError(elapsed_ms=elapsed_s * 1e3, resident_tokens=len(self.tape))
        if self.context.closed:
            raise SessionClosedError("the engine was closed meanwhile; open a new one")
        self.check_not_cancelled()

    def check_not_cancelled(self) -> None:
        """Before the engine is called: raise `DecodeAbortedError` where nobody waits for it.

        The timer's thread may not have had its turn yet, and the next look may be a whole call on.
        """
        if self._deadline is not None and time.perf_counter() >= self._deadline:
            self._late = self.cancelled = True
        if self.cancelled:
            raise DecodeAbortedError(
                f"cancelled with {len(self.tape)} tokens resident; call again to continue",
                resident_tokens=len(self.tape),
            )

    def cut_wanted(self, start: int, end: int) -> None:
        """Take the tokens in [start, end) out of the logical context; the engine did so already."""
        wanted, cut = self.wanted(), self.tape.cut
        del wanted[start:end]
        if cut is None or cut >= start:
            cut = start if len(wanted) > start else None
        self.tape.replace(wanted[:start], start, cut)
        self.owed = wanted[start:]

    def doubt(self) -> None:
        """Let the next call ask the engine what is held."""
        self._in_doubt = True

    def settle(self) -> None:
        """Before a call: see to it that the tape is what the context holds.

        They differ after a failure in mid-change, and where another session's failure emptied
        the context that both share. What was lost of the logical context is owed then.
        """
        held, past = self.context.n_resident(self.seq_id), self.context.n_past(self.seq_id)
        if not self._in_doubt and held == past == len(self.tape):
            return
        wanted = self.wanted()
        self._recover()
        if self._in_doubt:
            self._wipe()
        if self.tape.is_cut:  # what a pool moved goes on to count
            self.tape.logical = self.tape.held_of(wanted)
        self.owed = wanted[self.tape.logical :]

    def _wipe(self) -> None:
        """Hold nothing, where engine and books do not agree on what is held."""
        if self.context.n_seq_max == 1:
            self.context.clear()
        else:
            self.context.seq_remove(self.seq_id)
        self._forget()

    def _recover(self) -> None:
        """After a failure at any point: take the context's books for the tape's."""
        self._outputs_of = None
        self._in_doubt = True
        try:
            held = self.context.tokens(self.seq_id)
            counts = {self.context.n_past(self.seq_id), self.context.n_resident(self.seq_id)}
        except SessionFatalError as error:
            self.fatal_cause = error.cause
            return
        except InferCoreError:  # closed, or in use: the next call looks again
            return
        self.tape.sync(held)
        if self.page is not None and self.page.cut is not None:  # its reader may not know it yet
            self.tape.begin_cut(self.page.cut)
        self._in_doubt = counts != {len(held)}

    def load(self, data: bytes, logical: int, cut: int | None) -> None:
        """Hold what ``data`` (of `Context.save_sequence`) holds; ``logical`` tokens count.

        Raises `SnapshotError`; where the engine refused it, nothing is held any more.
        """
        try:
            if self.page is None:
                self.context.load_sequence(self.seq_id, data)
            else:
                self.page.load_sequence(self.seq_id, data, cut=cut)
            # What is paged may have lost its cells again.
            held = self.context.tokens if self.page is None else self.page.wanted
            self.tape.replace(held(self.seq_id), logical, cut)
        except BaseException:
            self._recover()
            raise
        self._checkpoints.clear()
        self.owed = []
        self._outputs_of = self._serial()

    def _forget(self) -> None:
        self._checkpoints.clear()
        self._outputs_of = None
        self._in_doubt = False
        self.tape.replace((), 0)

    def adopt(self, other: Self, *, anew: bool) -> None:
        """Take over the books of ``other``, whose tokens were copied, or evaluated ``anew``."""
        cut = None if anew else other.tape.cut
        self.tape.replace(other.tape.tokens(), other.tape.logical, cut)
        self._checkpoints.adopt(other._checkpoints)
        same_context = self.context is other.context
        self._outputs_of = other._outputs_of if same_context else self._serial()

    def move_to(self, context: SequenceContext, *, has_logits: bool) -> None:
        """Work on ``context`` from now on, which holds the same tokens in its only sequence."""
        self.context, self.seq_id = context, 0
        self.own_context = cast("SessionContext", context)
        self.page = _page(context)
        self._checkpoints.move_to(context)
        self._outputs_of = self._serial() if has_logits else None

    @property
    def is_paged(self) -> bool:
        """Whether the context is a page of a pool's."""
        return self.page is not None

    def _serial(self) -> int | None:
        """The number of the context's outputs, None where it has none."""
        return self.context.output_serial if self.context.n_outputs else None

    def clear(self) -> int:
        """Remove everything; return how many tokens that were."""
        n = len(self.tape)
        if n:
            try:
                self.context.seq_remove(self.seq_id)
            except BaseException:
                self._recover()
                raise
        self._forget()
        return n


def _page(context: SequenceContext) -> SequencePage | None:
    return cast("SequencePage", context) if getattr(context, "is_paged", False) else None
