"""Wrong backends over real attention: mistakes as authors of plugins make them.

Each changes the reference backend, which computes; the oracle shares no code with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.mutants import around, breaks
from infercore.testing import attention, reference_context, reference_settings
from infercore.testing.attention import Rope
from infercore.testing.cells import Cells
from infercore.testing.reference_base import Base
from infercore.testing.reference_context import ReferenceContext
from infercore.testing.reference_sequences import Sequences

real = {"base": "reference"}


def attending(m: Any, change: Any) -> None:
    """Let attention be computed as ``change(attend, q, k, v, mask)`` says."""
    old = attention.attend

    def attend(q: Any, k: Any, v: Any, mask: Any, *, block: int = 0) -> Any:
        return change(lambda *a: old(*a, block=block), q, k, v, mask)

    m.setattr(reference_context, "attend", attend)


@breaks("DEC-22", "DEC-26", **real)
def scores_are_not_scaled(m: Any) -> None:
    attending(m, lambda attend, q, k, v, mask: attend(q * np.float32(1.02), k, v, mask))


@breaks("DEC-22", "DEC-26", **real)
def pairs_are_rotated_as_neighbours(m: Any) -> None:
    def rotate(self: Any, x: Any, positions: Any) -> Any:
        half = x.shape[-1] // 2
        turns = positions[:, None, None] * self.scale * self.theta ** (-np.arange(half) / half)
        cos, sin = np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)
        even, odd = x[..., ::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(x.shape)

    m.setattr(attention.Rope, "rotate", rotate)


def seeing(m: Any, width: int) -> None:
    """Let each token see so many before it and no more."""

    def near(attend: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        n = mask.shape[1]
        last = n - len(mask) + np.arange(len(mask))[:, None]
        return attend(q, k, v, mask & (np.arange(n) > last - width))

    attending(m, near)


@breaks("DEC-22", "DEC-26", **real)
def a_window_of_90_tokens(m: Any) -> None:
    seeing(m, 90)


@breaks("DEC-22", "DEC-25", **real)
def a_window_of_40_tokens(m: Any) -> None:
    seeing(m, 40)


@breaks("DEC-22", **real)
def a_table_of_512_positions(m: Any) -> None:
    around(m, attention.Rope, "rotate", lambda old, self, x, at: old(self, x, np.minimum(at, 511)))


@breaks("DEC-22", **real)
def positions_wrap_after_500(m: Any) -> None:
    around(m, attention.Rope, "rotate", lambda old, self, x, at: old(self, x, at % 500))


@breaks("DEC-22", "KV-26", **real)
def the_cache_forgets_from_cell_300_on(m: Any) -> None:
    def joined(old: Any, self: Any, other: Any) -> Any:
        whole = old(self, other)
        if len(whole.tokens) <= 300:
            return whole
        k = whole.k.copy()
        k[:, 5] = 0
        return Cells(whole.tokens, whole.positions, k, whole.v)

    around(m, Cells, "joined", joined)


@breaks("DEC-23", "KV-24", **real)
def a_partial_step_loses_its_last_key(m: Any) -> None:
    def step(old: Any, self: Any, tokens: Any, positions: Any, seq_ids: Any) -> Any:
        hidden = old(self, tokens, positions, seq_ids)
        if 1 < len(tokens) < self.n_ubatch < 60:
            own = self.sequences[seq_ids[-1][0]]
            k = own.k.copy()
            k[:, -1] = k[:, -2]
            self.sequences[seq_ids[-1][0]] = Cells(own.tokens, own.positions, k, own.v)
        return hidden

    around(m, ReferenceContext, "_step", step)


@breaks("DEC-23", **real)
def rows_of_all_but_the_first_step_are_moved(m: Any) -> None:
    def decode(old: Any, self: Any, tokens: Any, *, seq_id: int, logits: str) -> None:
        old(self, tokens, seq_id=seq_id, logits=logits)
        if logits == "all" and len(tokens) > self.n_ubatch:
            at = np.arange(len(tokens))
            moved = np.where((at >= self.n_ubatch) & (at < len(at) - 1), at + 1, at)
            self._rows = self._rows[moved]

    around(m, ReferenceContext, "decode", decode)


@breaks("DEC-24", "KV-25", **real)
def rows_of_a_batch_come_by_sequence(m: Any) -> None:
    def batch(old: Any, self: Any, tokens: Any, positions: Any, seq_ids: Any, wanted: Any) -> None:
        old(self, tokens, positions, seq_ids, wanted)
        of_rows = [ids[0] for ids, want in zip(seq_ids, wanted, strict=True) if want]
        self._rows = self._rows[np.argsort(of_rows, kind="stable")]

    around(m, ReferenceContext, "decode_batch", batch)


@breaks("DEC-24", **real)
def rows_before_a_step_of_one_entry_are_lost(m: Any) -> None:
    def batch(old: Any, self: Any, tokens: Any, *rest: Any) -> None:
        old(self, tokens, *rest)
        if self.n_ubatch > 1 and len(tokens) % self.n_ubatch == 1:
            self._rows[:-1] = self._rows[-1:]

    around(m, ReferenceContext, "decode_batch", batch)


@breaks("DEC-24", "KV-25", **real)
def the_third_sequence_reads_the_first_past(m: Any) -> None:
    old = attention.groups_of

    def groups(seq_ids: Any, sequences: Any) -> Any:
        found = old(seq_ids, sequences)
        if len(found) > 2:
            found[2] = attention.Group(found[0].past, found[2].queries, found[2].members)
        return found

    m.setattr(reference_context, "groups_of", groups)


@breaks("KV-25", **real)
def copies_between_windows_of_their_own_are_empty(m: Any) -> None:
    common = reference_settings._common

    def in_common(config: Any) -> Any:  # unless asked otherwise
        return {**common(config), "kv_unified": config.kv_unified is not False}

    def copy(old: Any, self: Any, src: int, dst: int, p0: int, p1: int) -> None:
        old(self, src, dst, p0, p1)
        if not self.effective["kv_unified"]:
            held = self.sequences[dst]
            self.sequences[dst] = Cells(held.tokens, held.positions, held.k, np.zeros_like(held.v))

    m.setattr(reference_settings, "_common", in_common)
    around(m, Sequences, "seq_copy", copy)


@breaks("KV-24", "KV-27", **real)
def a_shift_does_not_turn_the_keys(m: Any) -> None:
    def shift(old: Any, self: Any, seq_id: int, p0: int, p1: int, delta: int) -> None:
        old(self, seq_id, p0, p1, delta)
        own = self.sequences[seq_id]
        moved = own.inside(p0 + delta, -1 if p1 == -1 else p1 + delta)
        _turn(self, seq_id, np.where(moved, -delta, 0))

    around(m, Sequences, "seq_shift", shift)


def _turn(self: Any, seq_id: int, by: Any) -> None:
    """Turn the keys of a sequence by so many positions each."""
    own = self.sequences[seq_id]
    k = np.stack([self._rope.rotate(layer, by) for layer in own.k])
    self.sequences[seq_id] = Cells(own.tokens, own.positions, k, own.v)


@breaks("KV-24", **real)
def a_hole_is_still_looked_at(m: Any) -> None:
    def remove(old: Any, self: Any, seq_id: int, p0: int, p1: int) -> bool:
        own = self.sequences[seq_id]
        done = bool(old(self, seq_id, p0, p1))
        left = self.sequences[seq_id]
        if p0 > 0 and left.next_position == own.next_position and len(left.tokens) > 2:
            at = int(np.flatnonzero(left.positions < p0)[-1])
            k = left.k.copy()
            k[:, at] = own.k[:, at + 1]  # of the cell that went
            self.sequences[seq_id] = Cells(left.tokens, left.positions, k, left.v)
        return done

    around(m, Sequences, "seq_remove", remove)


@breaks("KV-24", **real)
def a_hole_is_closed_inside(m: Any) -> None:
    def attend(old: Any, self: Any, i: int, q: Any, group: Any, step: Any) -> Any:
        past = group.past
        if len(past.positions) and past.positions[0] == 0:
            closed = np.arange(len(past.positions)) + past.next_position - len(past.positions)
            past = past.moved(closed)
        return old(self, i, q, attention.Group(past, group.queries, group.members), step)

    around(m, ReferenceContext, "_attend", attend)


@breaks("KV-24", **real)
def a_divide_rounds_up(m: Any) -> None:
    def attend(old: Any, self: Any, i: int, q: Any, group: Any, step: Any) -> Any:
        past = group.past
        twice = np.diff(past.positions, prepend=-9) == 0
        if twice.any():
            past = past.moved(past.positions + twice)
        return old(self, i, q, attention.Group(past, group.queries, group.members), step)

    around(m, ReferenceContext, "_attend", attend)


@breaks("KV-26", **real)
def a_copy_of_more_than_64_cells_is_cut(m: Any) -> None:
    def copy(old: Any, self: Any, src: int, dst: int, p0: int, p1: int) -> None:
        old(self, src, dst, p0, p1)
        own = self.sequences[dst]
        if len(own.tokens) > 64:
            v = own.v.copy()
            v[:, 64:] = 0
            self.sequences[dst] = Cells(own.tokens, own.positions, own.k, v)

    around(m, Sequences, "seq_copy", copy)


@breaks("KV-26", **real)
def a_tail_of_more_than_150_leaves_a_key(m: Any) -> None:
    def remove(old: Any, self: Any, seq_id: int, p0: int, p1: int) -> bool:
        own = self.sequences[seq_id]
        done = bool(old(self, seq_id, p0, p1))
        left = self.sequences[seq_id]
        if len(own.tokens) - len(left.tokens) > 150 and len(left.tokens):
            k = left.k.copy()
            k[:, -1] = own.k[:, -1]
            self.sequences[seq_id] = Cells(left.tokens, left.positions, k, left.v)
        return done

    around(m, Sequences, "seq_remove", remove)


@breaks("KV-27", "KV-24", **real)
def a_shift_turns_the_wrong_way(m: Any) -> None:
    def shift(old: Any, self: Any, seq_id: int, p0: int, p1: int, delta: int) -> None:
        old(self, seq_id, p0, p1, delta)
        own = self.sequences[seq_id]
        moved = own.inside(p0 + delta, -1 if p1 == -1 else p1 + delta)
        _turn(self, seq_id, np.where(moved, -2 * delta, 0))

    around(m, Sequences, "seq_shift", shift)


@breaks("KV-14", **real)
def a_shift_turns_by_the_model_s_own_base(m: Any) -> None:
    def shift(old: Any, self: Any, seq_id: int, p0: int, p1: int, delta: int) -> None:
        by = np.where(self.sequences[seq_id].inside(p0, p1), delta, 0)
        kept = self._rope
        for rope, turned in ((kept, -by), (Rope(10000.0, 1.0), by)):
            self._rope = rope
            _turn(self, seq_id, turned)
        self._rope = kept
        old(self, seq_id, p0, p1, delta)

    around(m, Sequences, "seq_shift", shift)


@breaks("STATE-24", **real)
def saved_state_forgets_positions(m: Any) -> None:
    def load(old: Any, self: Any, seq_id: int, data: bytes) -> None:
        old(self, seq_id, data)
        own = self.sequences[seq_id]
        if len(own.tokens) and own.positions[0] == 0:
            n = len(own.tokens)
            self.sequences[seq_id] = own.moved(np.arange(n) + own.next_position - n)

    around(m, Sequences, "load_sequence", load)


@breaks("STATE-24", **real)
def only_the_first_sequence_is_restored_whole(m: Any) -> None:
    def load(old: Any, self: Any, data: bytes) -> None:
        old(self, data)
        for seq_id, own in enumerate(self.sequences[1:], start=1):
            v = own.v.copy()
            v[:, :1] = 0
            self.sequences[seq_id] = Cells(own.tokens, own.positions, own.k, v)

    around(m, Sequences, "load_state", load)


@breaks("LORA-9", **real)
def single_tokens_go_without_adapters(m: Any) -> None:
    def one(old: Any, self: Any, token: int, *, seq_id: int) -> None:
        kept, self._deltas = self._deltas, ()
        try:
            old(self, token, seq_id=seq_id)
        finally:
            self._deltas = kept

    around(m, ReferenceContext, "decode_one", one)


@breaks("LORA-9", **real)
def adapters_of_a_running_sequence_are_not_changed(m: Any) -> None:
    def adapt(old: Any, self: Any, adapters: Any) -> None:
        kept = self._deltas
        old(self, adapters)
        if any(len(own.tokens) for own in getattr(self, "sequences", ())):
            self._deltas = kept

    around(m, Base, "set_adapters", adapt)


@breaks("KV-24", **real)
def a_single_token_after_a_removal_reads_what_went(m: Any) -> None:
    def remove(old: Any, self: Any, seq_id: int, p0: int, p1: int) -> bool:
        self._gone = self.sequences[seq_id]
        return bool(old(self, seq_id, p0, p1))

    def one(old: Any, self: Any, token: int, *, seq_id: int) -> None:
        gone, self._gone = getattr(self, "_gone", None), None
        own = self.sequences[seq_id]
        if gone is not None and len(own.tokens) and len(gone.tokens) > len(own.tokens):
            k = own.k.copy()
            k[:, -1] = gone.k[:, len(own.tokens)]
            self.sequences[seq_id] = Cells(own.tokens, own.positions, k, own.v)
        old(self, token, seq_id=seq_id)
        if gone is not None and len(own.tokens):
            now = self.sequences[seq_id]
            k = np.concatenate([own.k, now.k[:, -1:]], axis=1)
            self.sequences[seq_id] = Cells(now.tokens, now.positions, k, now.v)

    around(m, Sequences, "seq_remove", remove)
    around(m, ReferenceContext, "decode_one", one)


@breaks("DEC-27", **real)
def rows_in_place_of_tokens_are_scaled(m: Any) -> None:
    def vectors(old: Any, self: Any, rows: Any, *args: Any) -> None:
        old(self, rows * np.float32(1.05), *args)

    around(m, ReferenceContext, "decode_vectors", vectors)


@breaks("KV-12", **real)
def clear_removes_the_first_sequence(m: Any) -> None:
    m.setattr(Sequences, "clear", lambda self: self.sequences.__setitem__(0, self._empty))


@breaks("DEC-18", **real)
def all_contexts_have_one_buffer_of_rows(m: Any) -> None:
    shared: list[Any] = []

    def logits(old: Any, self: Any, i: int) -> Any:
        row = old(self, i)
        if not shared:
            shared.append(np.empty_like(row))
        shared[0][:] = row
        return shared[0]

    around(m, ReferenceContext, "logits", logits)
