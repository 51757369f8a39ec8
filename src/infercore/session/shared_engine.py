"""The one context that the sessions of a pool share, and what it can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from infercore.errors import UnsupportedFeatureError
from infercore.session.tape import common_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from infercore.protocols.guarded import SessionContext
    from infercore.session.sequence import Sequence

_CELLS_A_TOKEN = 512
"""About so many cells are copied in the time in which a token is evaluated."""


class SharedEngine:
    """A context that is opened anew where it can no longer be trusted.

    ``n_places`` sequences may be evaluated at the same time, ``n_sequences`` of them in one call.
    With ``multiple`` a sequence is evaluated in calls that end at its multiples, and alone.
    """

    def __init__(
        self,
        open_context: Callable[[], SessionContext],
        *,
        n_parallel: int,
        multiple: int | None = None,
        one_a_call: bool = False,
        context: SessionContext | None = None,
    ) -> None:
        self._open = open_context
        self.context = open_context() if context is None else context
        kinds = self.context.capabilities
        self.can_truncate = kinds.kv_remove in ("any", "suffix")
        self.multiple = multiple
        self.n_places: int = min(n_parallel, self.context.n_seq_max)
        batches = kinds.multi_sequence and self.context.n_seq_max > 1
        self.n_sequences = 1 if one_a_call or not batches else self.n_places
        self.is_shared = self.context.n_seq_max == 1 or self.context.n_ctx_seq == self.context.n_ctx
        """Whether all sequences count together in one window."""
        self.copies_caches = kinds.kv_copy == "full" and self.can_truncate and not self.is_shared
        """Whether each sequence has a cache of its own, which is copied as a whole."""
        window = int(self.context.n_ctx_seq)
        self.n_least_copied = max(1, window // _CELLS_A_TOKEN) if self.copies_caches else 1
        """Fewer tokens are evaluated sooner than the cache that holds them is copied."""

    def reopen(self) -> None:
        """Put a fresh context in place of the one there is, which holds nothing any more."""
        self.context.close()
        self.context = self._open()

    def n_free(self, sequence: Sequence) -> int:
        """Return how many tokens more fit behind ``sequence``."""
        return int(self.context.look_free(sequence.own_id))

    def trim(self, sequence: Sequence) -> None:
        """Remove from the engine what is not wanted any more."""
        if sequence.seq_id is None or sequence.n_cells <= sequence.n_held:
            return
        if self.context.seq_remove(sequence.seq_id, sequence.n_held, -1):
            sequence.n_cells = sequence.n_held
        else:
            self.empty(sequence)

    def empty(self, sequence: Sequence) -> None:
        """Remove all that ``sequence`` holds."""
        if sequence.n_cells:
            self.context.seq_remove(sequence.own_id)
        sequence.n_held = sequence.n_cells = 0

    def cut_out(self, sequence: Sequence, start: int, end: int) -> bool:
        """Take the tokens in [start, end) out; those behind, if held, move up and go on to count.

        The row behind the last one is gone. False where those behind are to be evaluated anew: they
        share cells with another sequence, and cannot move.
        """
        n_held, n_moved = sequence.n_held, 0
        try:
            if sequence.seq_id is not None and n_held > start:
                self.trim(sequence)
                self.context.seq_remove(sequence.seq_id, start, min(end, n_held))
                n_moved = self._move_down(sequence.seq_id, start, end, n_held)
        except BaseException:
            self.look_at((sequence,))
            raise
        sequence.cut_out(start, end, n_moved)
        return n_moved > 0 or n_held <= end

    def _move_down(self, seq_id: int, start: int, end: int, n_held: int) -> int:
        if n_held <= end:
            return 0
        try:
            self.context.seq_shift(seq_id, end, -1, start - end)
        except UnsupportedFeatureError:  # of shared cells
            self.context.seq_remove(seq_id, end, -1)
            return 0
        return n_held - end

    def take_row(self, sequence: Sequence) -> None:
        """Take the logits that came back with a sequence, if it had any."""
        index = self.context.row_of(sequence.own_id)  # the rows of others stay beside it
        row = None if index is None else np.array(self.context.logits(index), dtype=np.float32)
        sequence.set_row(row)

    def look_at(self, sequences: Iterable[Sequence]) -> None:
        """Take what the engine holds for what is held: after a call that failed."""
        context = self.context
        for sequence in sequences:
            if sequence.seq_id is None:
                continue
            held = context.tokens(sequence.seq_id)
            past, n = context.n_past(sequence.seq_id), context.n_resident(sequence.seq_id)
            if not len(held) == past == n:
                context.seq_remove(sequence.seq_id)
                held = []
            sequence.n_cells = len(held)
            sequence.n_held = common_prefix(held, sequence.tokens)
