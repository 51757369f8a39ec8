"""How many tokens still fit into the window that is enforced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infercore.engine.arguments import MAX_POSITION
from infercore.errors import ContextOverflowError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.engine.cells import CellMap
    from infercore.engine.window import Window


class Room:
    """The window, of all sequences or of each, and what of it is taken."""

    def __init__(self, window: Window, cells: CellMap) -> None:
        self._cells = cells
        self.is_shared = window.shared
        self._n_ctx = window.n_ctx if window.shared else window.n_ctx_seq

    def free(self, seq_id: int, keep: int | None = None) -> int:
        """Return how many tokens fit; ``keep``: once those from that position on were removed."""
        taken = self._cells.n_cells if self.is_shared else self._cells.length(seq_id)
        given_back = 0 if keep is None else self.given_back(seq_id, keep)
        return self._n_ctx - taken + given_back

    def taken(self) -> tuple[int, int]:
        """Return how many cells are taken by all sequences, and how many of them by several.

        Where sequences have caches of their own, a copy takes cells of its own.
        """
        cells = self._cells
        if self.is_shared:
            return cells.n_cells, cells.n_shared()
        return sum(map(cells.length, range(cells.n_seq_max))), 0

    def given_back(self, seq_id: int, p0: int) -> int:
        """Return the room that removing the sequence's tokens from ``p0`` on would give."""
        if self.is_shared:
            return self._cells.unshared(seq_id, p0, MAX_POSITION)
        return self._cells.holds(seq_id, p0, MAX_POSITION)

    def check(self, seq_id: int, n_tokens: int) -> None:
        """Raise `ContextOverflowError` unless ``n_tokens`` more fit."""
        room = self.free(seq_id)
        if n_tokens > room:
            raise ContextOverflowError(
                stage="decode",
                resident_tokens=self._n_ctx - room,
                additional_tokens=n_tokens,
                n_ctx=self._n_ctx,
            )

    def check_each(self, n_tokens: dict[int, int], n_cells: int) -> None:
        """Raise unless each sequence has room for its tokens, all of which take ``n_cells``."""
        if self.is_shared:
            self.check(0, n_cells)
            return
        for seq_id, n in n_tokens.items():
            self.check(seq_id, n)

    def check_restored(self, n_cells: int, sequences: Sequence[dict[str, Any]]) -> None:
        """Raise `ContextOverflowError` (stage "restore") unless that much can be held."""
        longest = max((len(sequence["tokens"]) for sequence in sequences), default=0)
        needed = n_cells if self.is_shared else longest
        if needed > self._n_ctx:
            raise ContextOverflowError(
                stage="restore", resident_tokens=0, additional_tokens=needed, n_ctx=self._n_ctx
            )
