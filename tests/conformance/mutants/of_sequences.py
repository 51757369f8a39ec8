"""Wrong removing, copying, moving and restoring."""

from __future__ import annotations

from typing import Any

from conformance.full_toy import FullContext
from conformance.mutants import around, breaks, instead, nothing, result
from infercore.engine import blob
from infercore.engine.context import GuardedContext
from infercore.engine.room import Room
from infercore.engine.saving import Saving
from infercore.engine.sequences import Sequences
from infercore.errors import InvalidSequenceError


@breaks("KV-1", "KV-22")
def a_trim_is_off_by_one(m: Any) -> None:
    def remove(old: Any, self: Any, seq_id: int, p0: int, p1: int) -> bool:
        return bool(old(self, seq_id, p0 + 1 if p0 > 0 else p0, p1))

    around(m, FullContext, "seq_remove", remove)


@breaks("KV-1", "KV-3", "KV-22")
def a_trim_does_nothing(m: Any) -> None:
    nothing(m, FullContext, "seq_remove", value=True)


@breaks("KV-1", "KV-22", "REUSE-3", "REUSE-4", "REUSE-5", "REUSE-9", "REUSE-19")
def a_trim_damages_what_it_leaves(m: Any) -> None:
    def remove(old: Any, self: Any, seq_id: int, p0: int, p1: int) -> bool:
        old(self, seq_id, p0, p1)
        self.cells[seq_id] = [(at, (token + at) % 250) for at, token in self.cells[seq_id]]
        return True

    around(m, FullContext, "seq_remove", remove)


@breaks("KV-2", "KV-13")
def a_hole_takes_the_rest(m: Any) -> None:
    around(m, FullContext, "seq_remove", lambda old, self, s, p0, _: old(self, s, p0, -1))


@breaks("KV-5")
def removing_nothing_fails(m: Any) -> None:
    def remove(old: Any, self: Any, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        return p0 < self.n_past(max(seq_id, 0)) and bool(old(self, seq_id, p0, p1))

    around(m, GuardedContext, "seq_remove", remove)


@breaks("KV-6")
def a_removal_says_no_and_does_it(m: Any) -> None:
    result(m, GuardedContext, "seq_remove", lambda _: False)


@breaks("KV-6")
def a_removal_that_is_refused_takes_the_end(m: Any) -> None:
    def remove(old: Any, self: Any, seq_id: int, p0: int, p1: int) -> bool:
        return bool(old(self, seq_id, p0, p1)) and p0 == 0 and p1 == -1

    around(m, FullContext, "seq_remove", remove)


@breaks("KV-7", "KV-8")
def a_copy_shares_its_buffer(m: Any) -> None:
    def copy(_: Any, self: Any, src: int, dst: int, p0: int, p1: int) -> None:
        del p0, p1
        self.cells[dst] = self.cells[src]

    around(m, FullContext, "seq_copy", copy)


@breaks("KV-9", "KV-20")
def the_second_sequence_is_never_removed(m: Any) -> None:
    def remove(old: Any, self: Any, seq_id: int, p0: int, p1: int) -> bool:
        return seq_id == 1 or bool(old(self, seq_id, p0, p1))

    around(m, FullContext, "seq_remove", remove)


@breaks("KV-10")
def a_part_is_the_whole(m: Any) -> None:
    around(m, FullContext, "seq_copy", lambda old, self, s, d, _, __: old(self, s, d, 0, -1))


@breaks("KV-11")
def the_wrong_sequence_is_kept(m: Any) -> None:
    around(m, GuardedContext, "seq_keep", lambda old, self, _: old(self, 0))


@breaks("KV-12", "OVER-6")
def clear_leaves_the_cells(m: Any) -> None:
    nothing(m, FullContext, "clear")


@breaks("KV-13", "KV-14")
def a_shift_is_off_by_one(m: Any) -> None:
    around(m, FullContext, "seq_shift", lambda old, self, s, p0, p1, d: old(self, s, p0, p1, d + 1))


@breaks("KV-15")
def a_shift_onto_others_is_done(m: Any) -> None:
    nothing(m, Sequences, "_check_shift")


@breaks("KV-16")
def positions_are_divided_by_another_number(m: Any) -> None:
    around(
        m, FullContext, "seq_divide", lambda old, self, s, p0, p1, d: old(self, s, p0, p1, d + 1)
    )


@breaks("KV-23")
def what_was_divided_is_computed_otherwise(m: Any) -> None:
    def divide(old: Any, self: Any, seq_id: int, p0: int, p1: int, d: int) -> None:
        old(self, seq_id, p0, p1, d)
        (position, token), *rest = self.cells[seq_id]
        self.cells[seq_id] = [(position, token + 1), *rest]

    around(m, FullContext, "seq_divide", divide)


@breaks("KV-17")
def an_empty_sequence_begins_at_0(m: Any) -> None:
    result(m, GuardedContext, "seq_pos_min", lambda first: max(0, first))


@breaks("KV-18", "OVER-12")
def there_is_always_one_more_place(m: Any) -> None:
    result(m, GuardedContext, "n_free", lambda n: n + 1)


@breaks("KV-19")
def all_sequences_are_the_first_one(m: Any) -> None:
    def remove(old: Any, self: Any, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        return bool(old(self, max(seq_id, 0), p0, p1))

    around(m, GuardedContext, "seq_remove", remove)


@breaks("KV-21")
def removed_cells_are_only_hidden(m: Any) -> None:
    def remove(old: Any, self: Any, seq_id: int, p0: int, p1: int) -> bool:
        n = len(self.cells[seq_id])
        old(self, seq_id, p0, p1)
        gone = n - len(self.cells[seq_id])
        self.cells[seq_id] = [(-1, 0)] * gone + self.cells[seq_id]
        return True

    around(m, FullContext, "seq_remove", remove)


@breaks("BAD-2")
def an_unknown_sequence_is_the_first(m: Any) -> None:
    instead(m, GuardedContext, "n_past", InvalidSequenceError, lambda _: 0)


# -- state -----------------------------------------------------------------------------------------


def _changed(cells: list[Any]) -> list[Any]:
    return [(cells[0][0], (cells[0][1] + 1) % 200), *cells[1:]] if cells else cells


@breaks("STATE-1", "STATE-3", "STATE-4", "STATE-13", "STATE-15")
def a_restored_token_is_another(m: Any) -> None:
    def load(old: Any, self: Any, seq_id: int, data: bytes) -> None:
        old(self, seq_id, data)
        self.cells[seq_id] = _changed(self.cells[seq_id])

    around(m, FullContext, "load_sequence", load)


@breaks("STATE-2")
def the_logits_do_not_come_back(m: Any) -> None:
    def load(old: Any, self: Any, seq_id: int, data: bytes) -> None:
        old(self, seq_id, data)
        self._results.forget()

    around(m, GuardedContext, "load_sequence", load)


@breaks("STATE-3")
def a_restore_appends(m: Any) -> None:
    def load(old: Any, self: Any, seq_id: int, data: bytes) -> None:
        before = self.cells[seq_id]
        old(self, seq_id, data)
        self.cells[seq_id] = before + self.cells[seq_id]

    around(m, FullContext, "load_sequence", load)


@breaks("STATE-4")
def a_restore_always_goes_to_the_first_sequence(m: Any) -> None:
    around(m, FullContext, "load_sequence", lambda old, self, _, data: old(self, 0, data))


@breaks("STATE-5", "STATE-17")
def damage_is_not_seen(m: Any) -> None:
    m.setattr(blob, "_checksum", lambda *_: bytes(4))


@breaks("STATE-6", "STATE-12")
def any_state_is_taken(m: Any) -> None:
    m.setattr(blob, "require", lambda *_: None)


@breaks("STATE-7")
def only_the_first_sequence_comes_back(m: Any) -> None:
    def load(old: Any, self: Any, data: bytes) -> None:
        old(self, data)
        self.cells = [_changed(self.cells[0]), *self.cells[1:]]

    around(m, FullContext, "load_state", load)


@breaks("STATE-8", "STATE-18")
def a_restore_does_not_look_at_the_window(m: Any) -> None:
    nothing(m, Room, "check_restored")


@breaks("STATE-9")
def what_was_restored_cannot_be_shortened(m: Any) -> None:
    def load(old: Any, self: Any, seq_id: int, data: bytes) -> None:
        old(self, seq_id, data)
        self.fixed = True

    def remove(old: Any, self: Any, seq_id: int, p0: int, p1: int) -> bool:
        return hasattr(self, "fixed") or bool(old(self, seq_id, p0, p1))

    around(m, FullContext, "load_sequence", load)
    around(m, FullContext, "seq_remove", remove)


@breaks("STATE-10")
def saving_takes_the_last_token_away(m: Any) -> None:
    def save(old: Any, self: Any, seq_id: int) -> bytes:
        data = old(self, seq_id)
        self.cells[seq_id] = self.cells[seq_id][:-1]
        return bytes(data)

    around(m, FullContext, "save_sequence", save)


@breaks("STATE-11")
def an_empty_sequence_restores_nothing(m: Any) -> None:
    nothing(m, Saving, "_load_sequence")
