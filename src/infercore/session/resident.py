"""Makes a session's sequence hold given tokens, evaluating only what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import (
    ContextOverflowError,
    DecodeAbortedError,
    InferCoreError,
    SnapshotError,
    UnsupportedFeatureError,
)
from infercore.session.tape import Tape, common_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence


@attrs.frozen(kw_only=True)
class Outcome:
    """Tokens that were found resident, evaluated, and dropped to make room."""

    reused: int
    prefilled: int
    dropped: int


@attrs.frozen(kw_only=True)
class Checkpoint:
    """The state of a sequence that cannot be shortened, at the end of ``tokens``."""

    tokens: list[int]
    data: bytes = attrs.field(repr=False)


class Resident:
    """One sequence of a context and its tape, kept equal to what the engine holds.

    Where the engine cannot remove tokens from the end, checkpoints are kept and gone back to;
    without one the sequence is evaluated anew.
    """

    def __init__(self, context: Any, seq_id: int = 0) -> None:
        self.context = context
        self.seq_id = seq_id
        self.tape = Tape()
        self._checkpoints: list[Checkpoint] = []
        self._outputs_of: int | None = None
        self.cancelled = False
        capabilities = context.capabilities
        self._keeps_checkpoints = (
            capabilities.kv_remove in ("none", "rollback") and capabilities.sequence_state
        )

    # -- questions -----------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Tokens that still fit behind what the engine holds."""
        return int(self.context.n_free(self.seq_id))

    @property
    def capacity(self) -> int:
        """Tokens that this sequence can hold beside the others of its context."""
        return len(self.tape) + self.free

    def has_logits(self) -> bool:
        """Whether the context's outputs are those at the end of the logical context."""
        return len(self.tape) > 0 and self._logits_at(self.tape.logical)

    def check_fits(self, n_tokens: int, *, stage: str, resident: int) -> None:
        """Raise `ContextOverflowError` unless the sequence can hold ``n_tokens``."""
        if n_tokens > self.capacity:
            raise ContextOverflowError(
                stage=stage,
                resident_tokens=resident,
                additional_tokens=n_tokens - resident,
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
        if not plan.tokens:
            self.tape.logical = len(target)
            return Outcome(reused=len(target), prefilled=0, dropped=0)
        held = len(self.tape)
        kept = self._shorten(plan.keep, target)
        if kept == len(target):  # a checkpoint of just this text came back, logits included
            self.tape.logical = kept
            return Outcome(reused=kept, prefilled=0, dropped=0)
        self._append(target[kept:])
        self.tape.logical = len(target)
        return Outcome(
            reused=kept, prefilled=len(target) - kept, dropped=max(0, held - kept)
        )

    def _logits_at(self, n: int) -> bool:
        return n == len(self.tape) and self._outputs_of == self.context.output_serial

    def append(self, tokens: Sequence[int]) -> None:
        """Drop the warm tail and add ``tokens`` to the logical context."""
        if self.tape.warm_tail:
            self._shorten(self.tape.logical, self.tape.tokens(0, self.tape.logical))
        self._append(list(tokens))
        self.tape.logical = len(self.tape)

    def append_one(self, token: int) -> None:
        """Add one token; there must be no warm tail."""
        try:
            self.context.decode_one(token, seq_id=self.seq_id)
        except BaseException:
            self._resync([token])
            self.tape.logical = len(self.tape)
            raise
        self.tape.extend((token,))
        self.tape.logical = len(self.tape)
        self._outputs_of = self.context.output_serial

    def append_ahead(self, tokens: list[int], *, logits: str) -> None:
        """Evaluate ``tokens`` in one call; only the first one joins the logical context.

        There must be no warm tail; the rest becomes one.
        """
        logical = self.tape.logical
        try:
            self._append_chunk(tokens, logits)
        finally:
            self.tape.logical = min(logical + 1, len(self.tape))

    def drop_ahead(self, n_kept: int) -> None:
        """Remove what lies more than ``n_kept`` tokens beyond the logical context."""
        n = self.tape.logical + n_kept
        if len(self.tape) > n:
            self._shorten(n, self.tape.tokens(0, n))

    def renew_logits(self) -> int:
        """Make the logits at the end of the logical context; return the tokens evaluated."""
        if self.has_logits():
            return 0
        logical = self.tape.tokens(0, self.tape.logical)
        if not self.tape.is_cut:
            return self.hold(logical, need_logits=True).prefilled
        self._shorten(len(logical) - 1, logical)
        self._append(logical[-1:])
        self.tape.logical = len(logical)
        return 1

    def checkpoint(self) -> None:
        """Keep the state at the end of the logical context, where it cannot be come back to."""
        tokens = self.tape.tokens(0, self.tape.logical)
        if not self._keeps_checkpoints or not tokens or self.tape.warm_tail:
            return
        if any(saved.tokens == tokens for saved in self._checkpoints):
            return
        data = self.context.save_sequence(self.seq_id)
        fresh = Checkpoint(tokens=tokens, data=data)
        kept = [c for c in self._checkpoints if common_prefix(c.tokens, tokens) == len(c.tokens)]
        self._checkpoints = [*kept[-2:], fresh]

    def shift_out(self, start: int, end: int) -> list[int]:
        """Remove the tokens in [start, end) and move the rest into their place; return them.

        The context's outputs are gone afterwards. Raises `UnsupportedFeatureError` where the
        engine cannot, unchanged.
        """
        if not (self.context.capabilities.kv_remove == "any" and self.context.capabilities.kv_shift):
            raise UnsupportedFeatureError(
                feature="overflow='shift'", hint="this context cannot move tokens; use 'error'"
            )
        self.context.seq_remove(self.seq_id, start, end)
        self.context.seq_shift(self.seq_id, end, -1, start - end)
        self._checkpoints = [c for c in self._checkpoints if len(c.tokens) <= start]
        return self.tape.cut_out(start, end)

    def load(self, data: bytes, logical: int) -> None:
        """Hold what ``data`` (of `Context.save_sequence`) holds; ``logical`` tokens count.

        Raises `SnapshotError`; where the engine refused it, nothing is held any more.
        """
        try:
            self.context.load_sequence(self.seq_id, data)
        except SnapshotError as error:
            if error.state_after == "cleared":
                self._forget()
            raise
        self._forget()
        self.tape.replace(self.context.tokens(self.seq_id), logical)
        self._outputs_of = self._serial()

    def _forget(self) -> None:
        self._checkpoints.clear()
        self._outputs_of = None
        self.tape.replace((), 0)

    def adopt(self, other: Resident) -> None:
        """Take over the books of ``other``, whose sequence was copied into this one."""
        self.tape.replace(other.tape.tokens(), other.tape.logical)
        self._checkpoints = list(other._checkpoints)  # noqa: SLF001
        same_context = self.context is other.context
        self._outputs_of = other._outputs_of if same_context else self._serial()  # noqa: SLF001

    def _serial(self) -> int | None:
        """The number of the context's outputs, None where it has none."""
        return self.context.output_serial if self.context.n_outputs else None

    def clear(self) -> int:
        """Remove everything; return how many tokens that were."""
        n = len(self.tape)
        if n:
            self.context.seq_remove(self.seq_id)
        self._forget()
        return n

    def _shorten(self, n: int, target: list[int]) -> int:
        """Make the engine hold at most ``n`` tokens, a beginning of ``target``; return how many."""
        if n == len(self.tape):
            return n
        if self.context.seq_remove(self.seq_id, n, -1):
            self.tape.truncate(n)
            return n
        return self._go_back(n, target)

    def _go_back(self, n: int, target: list[int]) -> int:
        usable = [c for c in self._checkpoints if c.tokens == target[: len(c.tokens)]]
        if usable:
            best = max(usable, key=lambda c: len(c.tokens))
            self.context.load_sequence(self.seq_id, best.data)
            self.tape.replace(best.tokens, min(self.tape.logical, len(best.tokens)))
            self._outputs_of = self._serial()
            return len(best.tokens)
        if not self.context.seq_remove(self.seq_id):
            raise UnsupportedFeatureError(
                feature="kv_remove", hint="this context cannot even remove a whole sequence"
            )
        self.tape.replace((), 0)
        return 0

    def _append(self, tokens: list[int]) -> None:
        """Evaluate in the context's own chunks, looking for a cancel between them."""
        n_batch = self.context.n_batch
        for start in range(0, len(tokens), n_batch):
            chunk = tokens[start : start + n_batch]
            if self.cancelled:
                raise DecodeAbortedError(
                    f"cancelled with {len(self.tape)} tokens resident; ask again to go on",
                    resident_tokens=len(self.tape),
                )
            self._append_chunk(chunk, "last" if start + n_batch >= len(tokens) else "none")

    def _append_chunk(self, chunk: list[int], logits: str) -> None:
        try:
            self.context.decode(chunk, seq_id=self.seq_id, logits=logits)
        except BaseException:
            self._resync(chunk)
            raise
        self.tape.extend(chunk)
        self._outputs_of = self.context.output_serial

    def _resync(self, tokens: list[int]) -> None:
        """After a failed call: take the engine's count of what it kept."""
        self._outputs_of = None
        try:
            kept = self.context.n_resident(self.seq_id) - len(self.tape)
        except InferCoreError:  # closed or failed: the caller's error says so
            return
        self.tape.extend(tokens[: max(0, kept)])
