"""Makes a session's sequence hold given tokens, evaluating only what is missing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import attrs

from infercore.errors import (
    ContextOverflowError,
    SnapshotError,
    UnsupportedFeatureError,
)
from infercore.session.true_tape import TrueTape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infercore.protocols.guarded import WhichRows
    from infercore.protocols.spi import FloatArray


@attrs.frozen(kw_only=True)
class Outcome:
    """Tokens that were found resident, evaluated, and dropped to make room."""

    reused: int
    prefilled: int
    dropped: int
    shared: int = 0
    restored: int = 0


_SEAM_TOKENS = 8


class Resident(TrueTape):
    """One sequence of a context and its tape, and what a session does with them.

    Where the engine cannot remove tokens from the end, checkpoints are kept and gone back to;
    without one the sequence is evaluated anew.
    """

    # -- questions -----------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Tokens that still fit behind what the engine holds; asked without waiting."""
        return int(self.context.look_free(self.seq_id))

    def capacity(self, target: Sequence[int]) -> int:
        """Tokens that fit beside the other sequences once only ``target`` is held here."""
        keep = self.tape.common(target)
        if keep < len(self.tape) and self._checkpoints.needed:
            keep = 0  # a state that is gone back to takes new cells
        return keep + int(self.context.n_free(self.seq_id, keep=keep))

    def available(self) -> int:
        """Tokens that fit behind the logical context; asked without waiting."""
        logical = self.n_wanted if self.is_paged else self.tape.logical
        if self.context.n_seq_max == 1:
            return int(self.context.n_ctx_seq) - logical
        return int(self.context.look_free(self.seq_id, logical))

    def has_logits(self) -> bool:
        """Whether the context's outputs are those at the end of the logical context."""
        n = self.tape.logical
        return n > 0 and self._logits_at(n)

    def _logits_at(self, n: int) -> bool:
        return n == len(self.tape) and self._outputs_of == self.context.output_serial

    def check_fits(
        self, target: Sequence[int], *, stage: str, resident: int, more: int = 0
    ) -> None:
        """Raise `ContextOverflowError` unless ``target`` and ``more`` tokens can be held."""
        needed = len(target) + more
        if needed > self.capacity(target):
            raise ContextOverflowError(
                stage=stage,
                resident_tokens=resident,
                additional_tokens=needed - resident,
                n_ctx=self.context.n_ctx_seq,
            )

    # -- changes -------------------------------------------------------------------------------

    def hold(self, target: Sequence[int], *, need_logits: bool) -> Outcome:
        """Make the tape start with ``target`` and count it as the logical context.

        Raises what `Context.decode` raises; the tape then says what is held, and the logical
        context is what it was, as far as it still stands.
        """
        target = list(target)
        again = need_logits and not self._logits_at(len(target))
        plan = self.tape.plan(target, last_again=again)
        kept, held, n_evaluated = plan.keep, len(self.tape), 0
        if plan.tokens:
            try:
                kept = self._shorten(plan.keep, target, need_logits=need_logits)
                n_evaluated = self._append(target[kept:])
            except BaseException:
                self._recover()
                raise
        self.tape.logical = len(target)
        self.owed = []
        dropped = max(0, held - kept) if plan.tokens else 0
        found = self.page.found if self.page is not None and plan.tokens else (0, 0)
        return Outcome(
            reused=len(target) - n_evaluated,
            prefilled=n_evaluated,
            dropped=dropped,
            shared=found[0],
            restored=found[1],
        )

    @property
    def goes_back_freely(self) -> bool:
        """Whether the engine can remove tokens from the end, so that no states are kept."""
        return not self._checkpoints.needed

    def hold_prefix(self, target: list[int], need_logits: bool = False) -> Outcome:  # noqa: FBT001, FBT002
        """Hold a prefix; without logits, unless they are needed.

        Where the engine cannot go back, a state shortly before the end is kept too: the next text
        may take the place of a few tokens at the seam.
        """
        early = len(target) - _SEAM_TOKENS
        goes_back = self.context.capabilities.max_rollback >= _SEAM_TOKENS
        held = self.tape.common(target) >= early
        if held or goes_back or self.goes_back_freely:
            return self.hold(target, need_logits=need_logits)
        first = self.hold(target[:early], need_logits=False)
        self.checkpoint()
        second = self.hold(target, need_logits=need_logits)
        prefilled = min(len(target), first.prefilled + second.prefilled)
        return Outcome(
            reused=len(target) - prefilled,  # the rest may come from elsewhere too
            prefilled=prefilled,
            dropped=first.dropped + second.dropped,
            shared=first.shared + second.shared,
            restored=first.restored + second.restored,
        )

    def go_on(self, more: Sequence[int] = ()) -> Outcome:
        """Hold the whole logical context and ``more`` behind it, with the logits there.

        Where it fails, what was lost of the logical context is owed.
        """
        before = self.wanted()
        target = [*before, *more]
        try:
            if self.tape.is_cut:
                return self._go_on_behind_cut(target)
            return self.hold(target, need_logits=True)
        except BaseException:
            self.owed = before[self.tape.logical :]
            raise

    def _go_on_behind_cut(self, target: list[int]) -> Outcome:
        """Keep what was moved: it is the logical context, though no cold run would give it."""
        if len(target) == self.tape.logical and self.has_logits():
            return Outcome(reused=len(target), prefilled=0, dropped=0)
        keep, held = min(self.tape.logical, len(target) - 1), len(self.tape)
        try:
            self._shorten(keep, target, need_logits=True)
            n_evaluated = self._append(target[keep:])
        except BaseException:
            self._recover()
            raise
        self.tape.logical = len(target)
        self.owed = []
        reused = len(target) - n_evaluated
        return Outcome(reused=reused, prefilled=n_evaluated, dropped=held - keep)

    def append_one(self, token: int) -> None:
        """Add one token; there must be no warm tail. Where it fails, the token is owed."""
        n = self.tape.logical
        try:
            self.own_context.decode_one(token, seq_id=self.seq_id)
            self.tape.extend((token,))
            self.tape.logical = n + 1
            self._outputs_of = self.context.output_serial
        except BaseException:
            self._lost([*self.tape.tokens(0, n), token])
            raise

    def append_ahead(self, tokens: list[int], *, logits: WhichRows) -> None:
        """Evaluate ``tokens`` in one call; only the first one joins the logical context.

        There must be no warm tail; the rest becomes one. Where it fails, the first is owed.
        """
        n = self.tape.logical
        try:
            self.context.decode(tokens, seq_id=self.seq_id, logits=logits)
            self.tape.extend(tokens)
            self.tape.logical = n + 1
            self._outputs_of = self.context.output_serial
        except BaseException:
            self._lost([*self.tape.tokens(0, n), tokens[0]])
            raise

    def take_ahead(self, token: int) -> None:
        """Count ``token``, which was evaluated ahead, as part of the logical context."""
        self.owe(token)
        if self.owed:  # the warm tail was lost since
            self.go_on()

    def _lost(self, logical: list[int]) -> None:
        """After a failure: count what is held of ``logical``, and owe the rest."""
        self._recover()
        self.tape.logical = self.tape.held_of(logical)
        self.owed = logical[self.tape.logical :]

    def drop_ahead(self, n_kept: int) -> None:
        """Remove what lies more than ``n_kept`` tokens beyond the logical context."""
        n = self.tape.logical + n_kept
        if len(self.tape) > n:
            wanted = self.wanted()
            try:
                self._shorten(n, self.tape.tokens(0, n), need_logits=False)
            except BaseException:
                self._lost(wanted)
                raise

    def evaluate_anew(self, target: list[int], each: Callable[[int, FloatArray], object]) -> None:
        """Hold ``target``, all of it evaluated now; ``each`` gets a place and its row of logits.

        Where it fails, what is not held of it is owed.
        """
        try:
            self.clear()
            for start in range(0, len(target), self.rows_at_once):
                chunk = target[start : start + self.rows_at_once]
                self.n_pending = len(target) - start
                self._append_chunk(chunk, "all")
                for i, row in enumerate(self.own_context.logits_all()):
                    each(start + i, row)
            self.tape.logical = len(target)
            self.owed = []
        except BaseException:
            self._lost(target)
            raise
        finally:
            self.n_pending = 0

    @property
    def rows_at_once(self) -> int:
        """How many tokens are evaluated in one call where each has its row."""
        return min(64, int(self.context.n_batch))

    def put_back(self, tokens: list[int]) -> None:
        """Let ``tokens`` be the logical context again, without calling the engine."""
        self.tape.logical = self.tape.held_of(tokens)
        self.owed = tokens[self.tape.logical :]

    def way_back(self, *, shifts: bool) -> Callable[[], object]:
        """Return what makes the logical context of now that again, after decodes from here.

        Where these may ``shift_out`` tokens, those of now are kept, or else evaluated anew.
        """
        tokens, cut = self.wanted(), self.tape.cut
        if not shifts:
            return partial(self.put_back, tokens)
        if not self.context.capabilities.sequence_state:
            return partial(self.hold, tokens, need_logits=True)
        data = self.context.save_sequence(self.seq_id)
        return partial(self._load_back, data, len(tokens), cut)

    def _load_back(self, data: bytes, logical: int, cut: int | None) -> None:
        try:
            self.load(data, logical, cut)
        except BaseException:
            self.clear()  # what is held was moved, though the tokens may look the same
            raise

    def forget_logits(self) -> None:
        """Let the logits be made anew."""
        self._outputs_of = None

    def checkpoint(self) -> None:
        """Keep the state at the end of the logical context, where it cannot be come back to."""
        if self._checkpoints.needed and not self.tape.warm_tail:
            tokens = self.tape.tokens(0, self.tape.logical)
            self._checkpoints.take(tokens, has_logits=self.has_logits())

    def can_shift_out(self, start: int, end: int) -> bool:
        """Return whether `shift_out` makes room: cells that another session shares stay taken."""
        room = int(self.context.n_free(self.seq_id, keep=start))
        return room > self.tape.logical - end

    def shift_out(self, start: int, end: int) -> list[int]:
        """Remove the tokens in [start, end) and move the rest into their place; return them.

        Tokens that another session shares cannot be moved: they are evaluated anew. The
        context's outputs are gone afterwards.
        """
        wanted, gone = self.wanted(), self.tape.tokens(start, end)
        try:
            self.tape.begin_cut(start)
            self.context.seq_remove(self.seq_id, start, end)
            self._move_down(start, end)
        except BaseException:
            self._recover()
            self.owed = wanted[self.tape.logical :]
            raise
        return gone

    def cut_out(self, start: int, end: int) -> bool:
        """Take the tokens in [start, end) out and move the rest into their place.

        False where the rest is to be evaluated anew, which a pool leaves to others.
        """
        if self.page is None:
            self.shift_out(start, end)
            return True
        has_moved = self.page.cut_out(start, end)
        self.cut_wanted(start, end)
        self.settle()
        return has_moved

    def _move_down(self, start: int, end: int) -> None:
        try:
            self.own_context.seq_shift(self.seq_id, end, -1, start - end)
        except UnsupportedFeatureError:
            rest = self.tape.tokens(end)
            self.context.seq_remove(self.seq_id, end, -1)
            self.tape.truncate(start)
            self._append(rest)
            self.tape.logical = len(self.tape)
        else:
            self.tape.cut_out(start, end)

    def _shorten(self, n: int, target: list[int], *, need_logits: bool) -> int:
        """Make the engine hold at most ``n`` tokens, a beginning of ``target``; return how many."""
        if n == len(self.tape):
            return n
        if self.context.seq_remove(self.seq_id, n, -1):
            self.tape.truncate(n)
            return n
        return self._go_back(target, need_logits=need_logits)

    def _go_back(self, target: list[int], *, need_logits: bool) -> int:
        best = self._checkpoints.best(target, need_logits=need_logits)
        while best is not None:
            try:
                self.context.load_sequence(self.seq_id, best.data)
            except SnapshotError:  # refused, so an older one, or none, has to do
                self._checkpoints.drop(best)
                best = self._checkpoints.best(target, need_logits=need_logits)
                continue
            self.tape.replace(best.tokens, min(self.tape.logical, len(best.tokens)))
            self._outputs_of = self._serial() if best.has_logits else None
            return len(best.tokens)
        if not self.context.seq_remove(self.seq_id):
            raise UnsupportedFeatureError(
                feature="kv_remove", hint="this context cannot even remove a whole sequence"
            )
        self.tape.replace((), 0)
        return 0

    def _append(self, tokens: list[int]) -> int:
        """Evaluate in the context's own chunks, looking for a cancel between them.

        Returns how many tokens the engine evaluated for that.
        """
        n_batch, n_evaluated = self.context.n_batch, 0
        try:
            for start in range(0, len(tokens), n_batch):
                self.n_pending = len(tokens) - start
                n_evaluated += self._append_chunk(tokens[start : start + n_batch])
        finally:
            self.n_pending = 0
        return n_evaluated

    def _append_chunk(self, chunk: list[int], logits: WhichRows | None = None) -> int:
        self.check_not_cancelled()
        mode = logits or ("last" if len(chunk) == self.n_pending else "none")
        # A pool's context knows better: some tokens may come from elsewhere, or be lost since.
        n_evaluated = self.context.decode(chunk, seq_id=self.seq_id, logits=mode)
        self.tape.extend(chunk)
        self._outputs_of = self.context.output_serial
        return len(chunk) if n_evaluated is None else n_evaluated
