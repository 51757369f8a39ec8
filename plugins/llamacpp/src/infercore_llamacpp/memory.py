"""What a context holds, by sequence and position."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from infercore import UnsupportedFeatureError
from infercore_llamacpp.library import api, bind_quick

if TYPE_CHECKING:
    from infercore_llamacpp.traits import Traits

SHIFTS, COPIES = 1, 2

# A look into a table, once a sequence and step: to give up the interpreter for it takes far longer.
_pos_max = bind_quick("llama_memory_seq_pos_max", ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)


class Memory:
    """The sequences of one context. All their positions come from the engine."""

    def __init__(self, context: int, chosen: dict[str, Any], traits: Traits) -> None:
        # None for an encoder, which keeps nothing; the engine's functions accept that.
        self.handle: int | None = api.llama_get_memory(context)
        self._n_seq_max: int = chosen["n_seq_max"]
        self._whole_only = traits.is_recurrent
        self._window = traits.info.sliding_window
        # Only keys and values lie in streams: a recurrent state is copied at once.
        is_split = self._n_seq_max > 1 and not chosen.get("kv_unified")
        self._has_streams = is_split and not traits.is_recurrent
        self.n_streams: int = self._n_seq_max if is_split else 1
        # What the engine has put off until it next decodes. Before that nothing may read or write
        # the cells: it would copy a stream over what was loaded meanwhile, also after a clear.
        self.pending = 0
        self._copied_from: set[int] = set()  # sequences of the copies among that
        self._copied_to: set[int] = set()
        # Cells keep their bits when they are given free, and a masked NaN still poisons sums.
        self.may_hold_nan = False
        self._pos_max = _pos_max

    @property
    def whole_only(self) -> bool:
        """Whether a sequence can only be removed whole."""
        return self._whole_only

    def pos_min(self, seq_id: int) -> int:
        """Return the first position held, -1 when empty."""
        position: int = api.llama_memory_seq_pos_min(self.handle, seq_id)
        return position

    def pos_max(self, seq_id: int) -> int:
        """Return the last position held, -1 when empty."""
        position: int = self._pos_max(self.handle, seq_id)
        return position

    @property
    def is_empty(self) -> bool:
        """Whether no sequence holds anything."""
        return all(self.pos_max(seq_id) < 0 for seq_id in range(self._n_seq_max))

    def remove(self, seq_id: int, p0: int, p1: int) -> bool:
        """Remove positions [p0, p1); False, and nothing changed, where that cannot be."""
        if not self._may_remove(seq_id, p0, p1):
            return False
        removed: bool = api.llama_memory_seq_rm(self.handle, seq_id, p0, p1)
        if self.may_hold_nan and self.is_empty:
            self.clear()
        return removed

    def _may_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        """Refuse what the engine says it did, but does wrongly.

        Cells that a sliding window has passed are gone; going back needs those that the next token
        there reads, and the engine computes without them. Of a recurrent state the core asks for
        whole sequences alone.
        """
        if p0 == 0 or 0 <= p1 <= self.pos_max(seq_id):
            return True
        return self._has_window(seq_id, p0)

    def _has_window(self, seq_id: int, end: int) -> bool:
        """Whether all that a token at ``end`` reads is there in all layers.

        Also where each layer has room for all tokens (``swa_full``), the engine gives cells that a
        window has passed to others: to those of another sequence, or of this one after a shift. It
        then lets all go that lies before them, and its first position says so; also of saved state,
        which has of sliding layers the window alone.
        """
        if self._window is None:
            return True
        return self.pos_min(seq_id) <= max(0, end + 1 - self._window)

    def seq_for_scratch(self) -> int:
        """Return a sequence for a token that is removed again: an empty one, if there is one.

        A recurrent state cannot give back a part, and so has no copies that are put off.
        """
        return next((s for s in range(self._n_seq_max) if self.pos_max(s) < 0), 0)

    def take_back(self, seq_id: int, end: int) -> None:
        """Remove what a scratch token left from ``end`` on; also where that is interrupted."""
        try:
            api.llama_memory_seq_rm(self.handle, seq_id, end, -1)
        except BaseException:
            api.llama_memory_seq_rm(self.handle, seq_id, end, -1)
            raise

    def copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Let ``dst`` hold what ``src`` holds in [p0, p1).

        Raises `UnsupportedFeatureError` for a part whose end lacks what a window has passed.
        """
        if 0 <= p1 <= self.pos_max(src) and not self._has_window(src, p1):
            raise UnsupportedFeatureError(
                feature="kv_copy",
                backend="llamacpp",
                hint="the sliding window has passed what this part needs; copy the whole sequence",
            )
        api.llama_memory_seq_cp(self.handle, src, dst, p0, p1)
        if self._has_streams:
            if not self.pending & COPIES:
                self._copied_from.clear()
                self._copied_to.clear()
            self._copied_from.add(src)
            self._copied_to.add(dst)
            self.pending |= COPIES

    def may_read(self, seq_id: int) -> bool:
        """Whether nothing that is or was put off writes the cells of a sequence."""
        return not (self.pending & SHIFTS or seq_id in self._copied_to)

    def may_write(self, seq_id: int) -> bool:
        """Whether nothing that is or was put off reads or writes the cells of a sequence."""
        return self.may_read(seq_id) and seq_id not in self._copied_from

    def shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add ``delta`` to the positions in [p0, p1)."""
        api.llama_memory_seq_add(self.handle, seq_id, p0, p1, delta)
        self.pending |= SHIFTS

    def divide(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions in [p0, p1) by ``d``.

        By shifts, from the lowest position up: ``llama_memory_seq_div`` turns the keys the other
        way round (measured), so that what is decoded next reads them at wrong distances.
        """
        for position in range(p0, p1):
            delta = position // d - position
            api.llama_memory_seq_add(self.handle, seq_id, position, position + 1, delta)
        self.pending |= SHIFTS

    def clear(self) -> None:
        """Remove everything."""
        api.llama_memory_clear(self.handle, self.may_hold_nan)
        self.pending &= COPIES
        self.may_hold_nan = False
