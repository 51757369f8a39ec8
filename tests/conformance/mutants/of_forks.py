"""Wrong backends over real attention: right alone, wrong beside forks, saved state and threads."""

from __future__ import annotations

import time
from typing import Any

import attrs
import numpy as np

from conformance.full_toy import NativeSampler
from conformance.mutants import around, breaks
from infercore.testing.reference_base import Base
from infercore.testing.reference_context import ReferenceContext
from infercore.testing.reference_sequences import Sequences

real = {"base": "reference"}


@breaks("KV-35", **real)
def who_goes_back_writes_into_the_other_s_cells(m: Any) -> None:
    def copy(old: Any, self: Any, src: int, dst: int, p0: int, p1: int) -> None:
        old(self, src, dst, p0, p1)
        self.forks = {**getattr(self, "forks", {}), src: dst}

    def remove(old: Any, self: Any, seq_id: int, p0: int, p1: int) -> bool:
        done = bool(old(self, seq_id, p0, p1))
        fork = getattr(self, "forks", {}).get(seq_id)
        if fork is not None and p0 > 0 and p1 == -1:
            held = self.sequences[fork]
            v = held.v.copy()
            v[:, held.positions >= p0] = 0
            self.sequences[fork] = attrs.evolve(held, v=v)
        return done

    around(m, Sequences, "seq_copy", copy)
    around(m, Sequences, "seq_remove", remove)


@breaks("KV-36", **real)
def a_hole_of_whole_blocks_takes_slots_for_positions(m: Any) -> None:
    def remove(old: Any, self: Any, seq_id: int, p0: int, p1: int) -> bool:
        held = self.sequences[seq_id]
        if p1 > p0 > 0 and p0 % 32 == p1 % 32 == 0 and len(held.tokens) >= p1:
            stays = np.ones(len(held.tokens), bool)
            stays[p0:p1] = False
            removed = held.where(stays)
            kept = held.positions[~held.inside(p0, p1)]
            if len(kept) == len(removed.positions):
                self.sequences[seq_id] = removed.moved(kept)
                return True
        return bool(old(self, seq_id, p0, p1))

    around(m, Sequences, "seq_remove", remove)


@breaks("KV-37", **real)
def after_other_threads_the_third_fork_has_no_values(m: Any) -> None:
    def threads(old: Any, self: Any, *numbers: int) -> None:
        old(self, *numbers)
        self.is_changed = True

    def copy(old: Any, self: Any, src: int, dst: int, p0: int, p1: int) -> None:
        old(self, src, dst, p0, p1)
        if getattr(self, "is_changed", False) and dst > 2:
            held = self.sequences[dst]
            self.sequences[dst] = attrs.evolve(held, v=np.zeros_like(held.v))

    around(m, Base, "set_threads", threads)
    around(m, Sequences, "seq_copy", copy)


@breaks("EMB-14", **real)
def saving_spoils_the_vectors_of_the_last_call(m: Any) -> None:
    def save(old: Any, self: Any, seq_id: int) -> bytes:
        self.has_saved = True
        return bytes(old(self, seq_id))

    def embedding(old: Any, self: Any, seq_id: int) -> Any:
        found = old(self, seq_id)
        return found + 1 if getattr(self, "has_saved", False) else found

    around(m, Sequences, "save_sequence", save)
    around(m, Base, "embedding", embedding)


@breaks("SAMP-29")
def the_engine_s_sampler_takes_the_first_row(m: Any) -> None:
    around(m, NativeSampler, "sample", lambda old, self, context, _: old(self, context, 0))


@breaks("DEC-33", **real)
def a_row_of_a_shared_token_is_the_next_ones(m: Any) -> None:
    def decode(old: Any, self: Any, tokens: Any, positions: Any, seq_ids: Any, wanted: Any) -> None:
        old(self, tokens, positions, seq_ids, wanted)
        rows = np.flatnonzero(wanted)
        if len(tokens) > self.n_ubatch and len(rows) > 1 and len(seq_ids[int(rows[0])]) > 1:
            self._rows = self._rows[::-1]

    around(m, ReferenceContext, "decode_batch", decode)


@breaks("THREAD-12", **real)
def all_contexts_save_into_one_buffer(m: Any) -> None:
    buffer = bytearray()

    def save(old: Any, self: Any, seq_id: int) -> bytes:
        buffer[:] = old(self, seq_id)
        time.sleep(0.001)  # as an engine that copies without the interpreter's lock
        return bytes(buffer)

    around(m, Sequences, "save_sequence", save)


@breaks("THREAD-13", **real)
def what_closes_takes_the_workers_of_those_who_changed_theirs(m: Any) -> None:
    changed: list[Any] = []

    def threads(old: Any, self: Any, *numbers: int) -> None:
        if hasattr(self, "workers"):
            changed.append(self)
        old(self, *numbers)

    def close(old: Any, self: Any) -> None:
        old(self)
        for other in changed:
            other.has_lost = True

    def logits(old: Any, self: Any, i: int) -> Any:
        row = old(self, i)
        return np.zeros_like(row) if getattr(self, "has_lost", False) else row

    around(m, Base, "set_threads", threads)
    around(m, Base, "close", close)
    around(m, ReferenceContext, "logits", logits)
