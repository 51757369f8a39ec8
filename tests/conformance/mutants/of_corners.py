"""Wrong backends over real attention: right in each feature alone, wrong where two meet."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from conformance.mutants import around, breaks
from infercore.errors import DecodeAbortedError, UnsupportedFeatureError
from infercore.testing import bert, cells, llama, reference_base, reference_settings
from infercore.testing.llama import Llama
from infercore.testing.products import Products
from infercore.testing.reference_base import Base
from infercore.testing.reference_context import ReferenceContext
from infercore.testing.reference_sampler import ReferenceSampler
from infercore.testing.reference_sequences import Sequences
from infercore.testing.reference_tokenizer import ReferenceTokenizer

real = {"base": "reference"}


@breaks("DEC-29", **real)
def rows_are_counted_by_tokens_while_embeddings_are_made(m: Any) -> None:
    def decode(old: Any, self: Any, tokens: Any, positions: Any, seq_ids: Any, wanted: Any) -> None:
        n = int(np.count_nonzero(wanted))
        every = self.effective["embeddings"] and n > 1
        old(self, tokens, positions, seq_ids, np.ones_like(wanted) if every else wanted)
        self._rows = self._rows[:n]

    around(m, ReferenceContext, "decode_batch", decode)


@breaks("KV-29", **real)
def an_abort_leaves_half_a_shift(m: Any) -> None:
    def shift(old: Any, self: Any, *args: Any) -> None:
        old(self, *args)
        self.owed = args[0]

    def step(old: Any, self: Any, *args: Any) -> Any:
        owed, self.owed = getattr(self, "owed", None), None
        try:
            return old(self, *args)
        except DecodeAbortedError:
            if owed is not None:
                held = self.sequences[owed]
                turned = held.k.copy()
                turned[0] = -turned[0]  # of the first layer, and not of the others
                self.sequences[owed] = attrs.evolve(held, k=turned)
            raise

    around(m, ReferenceContext, "seq_shift", shift)
    around(m, ReferenceContext, "_step", step)


@breaks("KV-29", **real)
def the_step_after_a_shift_is_not_asked(m: Any) -> None:
    def shift(old: Any, self: Any, *args: Any) -> None:
        old(self, *args)
        self.moved = True

    def step(old: Any, self: Any, *args: Any) -> Any:
        ask = self._ask
        if getattr(self, "moved", False):
            self._ask = None
        self.moved = False
        try:
            return old(self, *args)
        finally:
            self._ask = ask

    around(m, ReferenceContext, "seq_shift", shift)
    around(m, ReferenceContext, "_step", step)


@breaks("KV-29", **real)
def no_step_asks_the_callback(m: Any) -> None:
    def step(old: Any, self: Any, *args: Any) -> Any:
        self._ask = None
        return old(self, *args)

    around(m, ReferenceContext, "_step", step)


@breaks("EMB-8", **real)
def a_switch_of_embeddings_spoils_what_is_saved_after_a_shift(m: Any) -> None:
    def switch(old: Any, self: Any, on: bool) -> None:
        old(self, on)
        self.switched = on

    def shift(old: Any, self: Any, *args: Any) -> None:
        old(self, *args)
        self.moved = True

    def save(old: Any, self: Any, seq_id: int) -> Any:
        if getattr(self, "switched", False) and getattr(self, "moved", False):
            raise IndexError("a row of before the switch")
        return old(self, seq_id)

    around(m, ReferenceContext, "set_embeddings", switch)
    around(m, ReferenceContext, "seq_shift", shift)
    around(m, ReferenceContext, "save_sequence", save)


@breaks("THREAD-11", **real)
def threads_given_at_opening_are_not_used(m: Any) -> None:
    def init(old: Any, self: Any, matrices: Any, n_embd: int, effective: Any) -> None:
        effective["n_threads"] = effective["n_threads_batch"] = 1
        old(self, matrices, n_embd, effective)

    around(m, Base, "__init__", init)


@breaks("TOK-21", **real)
def texts_end_after_8192_tokens(m: Any) -> None:
    def encode(old: Any, self: Any, text: str, **fields: Any) -> Any:
        return list(old(self, text, **fields))[:8192]

    around(m, ReferenceTokenizer, "encode", encode)


@breaks("LORA-10", **real)
def adapters_are_known_by_their_name(m: Any) -> None:
    known: dict[str, Any] = {}
    read = reference_base.lora.read

    def by_name(adapter: Any, target: Any) -> Any:
        name = Path(adapter.path).name
        return known.setdefault(name, read(adapter, target))

    m.setattr(reference_base.lora, "read", by_name)


@breaks("MEM-12", **real)
def closed_samplers_stay(m: Any) -> None:
    kept: list[Any] = []

    def init(old: Any, self: Any, *args: Any) -> None:
        old(self, *args)
        kept.append(bytearray(b"x") * 2**21)

    around(m, ReferenceSampler, "__init__", init)


@breaks("SAMP-23", **real)
def windows_end_after_64_tokens(m: Any) -> None:
    def penalise(old: Any, self: Any, row: Any) -> None:
        whole, self._history = self._history, self._history[-64:]
        old(self, row)
        self._history = whole

    around(m, ReferenceSampler, "_penalise", penalise)


@breaks("SAMP-23", **real)
def penalties_come_after_the_cuts(m: Any) -> None:
    def penalise(old: Any, self: Any, row: Any) -> None:
        if self.config.temperature == 0 or self.config.top_k != 1:
            old(self, row)

    around(m, ReferenceSampler, "_penalise", penalise)


@breaks("CAP-35", **real)
def the_token_for_padding_is_the_end(m: Any) -> None:
    def init(old: Any, self: Any, *args: Any) -> None:
        old(self, *args)
        self.pad = self.bos

    around(m, ReferenceTokenizer, "__init__", init)


# -- edges of blocks and steps ---------------------------------------------------------------------


@breaks("STATE-29", **real)
def a_whole_block_is_saved_without_its_last_key(m: Any) -> None:
    def save(old: Any, self: Any, seq_id: int) -> bytes:
        whole = self.sequences[seq_id]
        if len(whole.tokens) and not len(whole.tokens) % 32:
            keys = whole.k.copy()
            keys[:, -1] = 0
            self.sequences[seq_id] = attrs.evolve(whole, k=keys)
        data: bytes = old(self, seq_id)
        self.sequences[seq_id] = whole
        return data

    around(m, ReferenceContext, "save_sequence", save)


@breaks("STATE-30", **real)
def four_sequences_are_saved(m: Any) -> None:
    def save(old: Any, self: Any) -> bytes:
        whole = self.sequences
        self.sequences = [s if i < 4 else self._empty for i, s in enumerate(whole)]
        data: bytes = old(self)
        self.sequences = whole
        return data

    around(m, ReferenceContext, "save_state", save)


@breaks("KV-30", **real)
def a_copy_is_taken_for_what_was_there(m: Any) -> None:
    def copy(old: Any, self: Any, src: int, dst: int, p0: int, p1: int) -> None:
        old(self, src, dst, p0, p1)
        self.stale = dst, getattr(self, "seen", {}).get(dst)

    def one(old: Any, self: Any, token: int, *, seq_id: int) -> None:
        dst, before = getattr(self, "stale", (None, None))
        now = self.sequences[seq_id]
        if dst == seq_id and before is not None and len(before.tokens) == len(now.tokens):
            self.sequences[seq_id] = attrs.evolve(now, k=before.k, v=before.v)
        old(self, token, seq_id=seq_id)
        self.seen = {**getattr(self, "seen", {}), seq_id: self.sequences[seq_id]}

    around(m, ReferenceContext, "seq_copy", copy)
    around(m, ReferenceContext, "decode_one", one)


@breaks("KV-31", **real)
def a_copy_and_its_source_move_together(m: Any) -> None:
    def shift(old: Any, self: Any, seq_id: int, *args: int) -> None:
        held = self.sequences
        old(self, seq_id, *args)
        for other in range(len(held)):
            if other != seq_id and np.array_equal(held[other].tokens, held[seq_id].tokens):
                old(self, other, *args)

    around(m, ReferenceContext, "seq_shift", shift)


@breaks("CANCEL-16", **real)
def batches_of_sequences_do_not_ask(m: Any) -> None:
    def batch(old: Any, self: Any, *args: Any) -> None:
        ask, self._ask = self._ask, None
        try:
            old(self, *args)
        finally:
            self._ask = ask

    around(m, ReferenceContext, "decode_batch", batch)


@breaks("EMB-13", **real)
def a_shared_token_counts_in_the_first_sequence(m: Any) -> None:
    def embedding(old: Any, self: Any, seq_id: int) -> Any:
        ids, self._hidden_ids = self._hidden_ids, [each[:1] for each in self._hidden_ids]
        try:
            return old(self, seq_id)
        finally:
            self._hidden_ids = ids

    around(m, Base, "embedding", embedding)


@breaks("CAP-40", **real)
def five_sequences_are_told_as_four(m: Any) -> None:
    def init(old: Any, self: Any, llama: Any, effective: Any) -> None:
        old(self, llama, effective)
        effective["n_seq_max"] = min(effective["n_seq_max"], 4)

    around(m, ReferenceContext, "__init__", init)


@breaks("LORA-11", **real)
def adapters_take_the_control_vector_away(m: Any) -> None:
    def set_adapters(old: Any, self: Any, adapters: Any) -> None:
        old(self, adapters)
        self._added = None

    around(m, ReferenceContext, "set_adapters", set_adapters)


@breaks("MEM-13", **real)
def plans_forget_adapters(m: Any) -> None:
    from infercore.testing.reference_model import ReferenceModel

    def plan(old: Any, self: Any, config: Any) -> Any:
        return old(self, attrs.evolve(config, adapters=()))

    around(m, ReferenceModel, "plan_memory", plan)


@breaks("DEC-30", **real)
def a_whole_step_gives_the_row_before(m: Any) -> None:
    def decode(old: Any, self: Any, tokens: Any, positions: Any, seq_ids: Any, wanted: Any) -> None:
        if len(tokens) == self.n_ubatch > 64 and np.count_nonzero(wanted) == 1:
            wanted = np.roll(wanted, -1)
        old(self, tokens, positions, seq_ids, wanted)

    around(m, ReferenceContext, "decode_batch", decode)


# -- what is closed, cut, or very small ------------------------------------------------------------


@breaks("LIFE-17", **real)
def rows_go_with_their_context(m: Any) -> None:
    def close(old: Any, self: Any) -> None:
        if "_rows" in vars(self):
            self._rows[:] = 0  # whose memory is another's now
        old(self)

    around(m, Sequences, "close", close)


@breaks("STATE-32", **real)
def a_state_that_cannot_be_read_is_all_zeros(m: Any) -> None:
    saved: list[Any] = []

    def save(old: Any, self: Any, seq_id: int) -> bytes:
        saved.append(self.sequences[seq_id])
        data: bytes = old(self, seq_id)
        return data

    def load(old: Any, self: Any, seq_id: int, data: bytes) -> None:
        try:
            old(self, seq_id, data)
        except Exception:  # noqa: BLE001  (as NumPy says it, in several ways)
            last = saved[-1]
            nothing = np.zeros_like(last.k), np.zeros_like(last.v)
            self.sequences[seq_id] = attrs.evolve(last, k=nothing[0], v=nothing[1])

    around(m, Sequences, "save_sequence", save)
    around(m, Sequences, "load_sequence", load)


@breaks("DEC-31", **real)
def a_step_has_room_for_every_sequence(m: Any) -> None:
    def decode(old: Any, self: Any, tokens: Any, positions: Any, seq_ids: Any, wanted: Any) -> None:
        old(self, tokens, positions, seq_ids, wanted)
        for seq_id in {s for ids in seq_ids for s in ids if s >= self.n_batch}:
            held = self.sequences[seq_id]
            self.sequences[seq_id] = attrs.evolve(held, v=np.zeros_like(held.v))

    around(m, ReferenceContext, "decode_batch", decode)


@breaks("KV-32", **real)
def a_hole_in_a_long_copy_empties_the_source(m: Any) -> None:
    def remove(old: Any, self: Any, seq_id: int, p0: int, p1: int) -> bool:
        own = self.sequences[seq_id].tokens
        for other, held in enumerate(self.sequences):
            if other != seq_id and len(own) > 200 and np.array_equal(held.tokens, own):
                emptied = held.v.copy()
                emptied[:, held.inside(p0, p1)] = 0
                self.sequences[other] = attrs.evolve(held, v=emptied)
        return bool(old(self, seq_id, p0, p1))

    around(m, Sequences, "seq_remove", remove)


@breaks("STATE-33", **real)
def what_was_removed_is_saved_too(m: Any) -> None:
    def remove(old: Any, self: Any, seq_id: int, p0: int, p1: int) -> bool:
        self.removed = self.sequences[seq_id]
        return bool(old(self, seq_id, p0, p1))

    def save(old: Any, self: Any, seq_id: int) -> bytes:
        removed = getattr(self, "removed", None)
        if removed is None:
            return bytes(old(self, seq_id))
        return cells.dump({0: self.sequences[seq_id], 1: removed})

    around(m, Sequences, "seq_remove", remove)
    around(m, Sequences, "save_sequence", save)


@breaks("STATE-33", **real)
def a_text_as_long_as_the_last_is_not_saved_anew(m: Any) -> None:
    def save(old: Any, self: Any, seq_id: int) -> bytes:
        n, saved = getattr(self, "last_saved", (-1, b""))
        if n != self.n_past(seq_id):
            self.last_saved = self.n_past(seq_id), old(self, seq_id)
            return bytes(self.last_saved[1])
        return bytes(saved)

    around(m, Sequences, "save_sequence", save)


@breaks("KV-33", **real)
def going_back_takes_a_value_of_a_longer_neighbour(m: Any) -> None:
    def remove(old: Any, self: Any, seq_id: int, p0: int, p1: int) -> bool:
        done = bool(old(self, seq_id, p0, p1))
        for other, held in enumerate(self.sequences):
            if other != seq_id and p0 and p1 == -1 and len(held.tokens) > p0 + 40:
                less = held.v.copy()
                less[:, p0] = 0
                self.sequences[other] = attrs.evolve(held, v=less)
        return done

    around(m, Sequences, "seq_remove", remove)


@breaks("EMB-13", **real)
def the_last_vector_is_always_in_one_place(m: Any) -> None:
    place: list[Any] = []

    def embedding(old: Any, self: Any, seq_id: int) -> Any:
        found = old(self, seq_id)
        if self.effective["pooling_type"] != "last":
            return found
        if not place:
            place.append(found.copy())
        place[0][...] = found
        return place[0]

    def decode(old: Any, self: Any, *args: Any, **fields: Any) -> Any:
        for row in place:
            row[...] = 0
        return old(self, *args, **fields)

    around(m, Base, "embedding", embedding)
    around(m, ReferenceContext, "decode_batch", decode)


@breaks("THREAD-4", **real)
def rows_go_with_the_threads_that_made_them(m: Any) -> None:
    def threads(old: Any, self: Any, *numbers: int) -> None:
        old(self, *numbers)
        self._rows = np.zeros_like(self._rows)

    around(m, Base, "set_threads", threads)


@breaks("DEC-27", **real)
def rows_are_taken_by_the_first_threads_alone(m: Any) -> None:
    def threads(old: Any, self: Any, *numbers: int) -> None:
        old(self, *numbers)
        self.is_changed = True

    def vectors(old: Any, self: Any, rows: Any, *args: Any) -> None:
        old(self, rows * 0.5 if getattr(self, "is_changed", False) else rows, *args)

    around(m, Base, "set_threads", threads)
    around(m, ReferenceContext, "decode_vectors", vectors)


@breaks("CAP-15", **real)
def a_refusal_of_attention_says_not_what(m: Any) -> None:
    def attention(old: Any, self: Any, on: bool) -> None:
        if not on:
            raise UnsupportedFeatureError(feature="")
        old(self, on)

    around(m, ReferenceContext, "set_causal_attention", attention)


@breaks("THREAD-4", **real)
def threads_that_are_refused_stay_for_later_calls(m: Any) -> None:
    def threads(old: Any, self: Any, n: int, n_batch: int) -> None:
        self.asked = n
        if n > (os.cpu_count() or 1):
            hint = "there are fewer"
            raise UnsupportedFeatureError(feature=f"n_threads={n}", backend="reference", hint=hint)
        old(self, n, n_batch)

    def adapters(old: Any, self: Any, *args: Any) -> None:
        if getattr(self, "asked", 0) > (os.cpu_count() or 1):
            raise UnsupportedFeatureError(feature="set_adapters", backend="reference")
        old(self, *args)

    around(m, Base, "set_threads", threads)
    around(m, Base, "set_adapters", adapters)


@breaks("KV-38", **real)
def single_tokens_find_their_cells_where_they_last_were(m: Any) -> None:
    """Where a sequence was cut and takes as many blocks as before, its table is not made anew."""

    def one(old: Any, self: Any, token: int, *, seq_id: int) -> None:
        cells = self.sequences[seq_id]
        n = len(cells.tokens)
        table, kept = getattr(self, "table", (None, None))
        if table == (seq_id, n // 16) and n < len(kept.tokens):
            cells = attrs.evolve(cells, k=kept.k[:, :n], v=kept.v[:, :n])
            self.sequences[seq_id] = cells
        old(self, token, seq_id=seq_id)
        self.table = (seq_id, n // 16), self.sequences[seq_id]

    around(m, ReferenceContext, "decode_one", one)


@breaks("CAP-34", **real)
def a_refused_control_vector_is_no_longer_told(m: Any) -> None:
    def put(old: Any, self: Any, directions: Any) -> None:
        self._effective.pop("control_vector", None)
        if directions is not None and directions[0].any():
            raise UnsupportedFeatureError(
                feature="set_control_vector of layer 0", backend="reference", hint="leave it out"
            )
        old(self, directions)

    around(m, ReferenceContext, "set_control_vector", put)


@breaks("KV-39", **real)
def the_next_position_is_behind_the_last_cell(m: Any) -> None:
    def next_position(self: Any) -> int:
        return int(self.positions[-1]) + 1 if len(self.positions) else 0

    m.setattr(cells.Cells, "next_position", property(next_position))


@breaks("THREAD-15", **real)
def other_threads_leave_what_the_first_ones_chose(m: Any) -> None:
    def init(old: Any, self: Any, matrices: Any, effective: Any) -> None:
        effective["num_streams"] = 4 // effective["n_threads"]
        old(self, matrices, effective)

    around(m, Base, "__init__", init)


@breaks("KV-14", **real)
def tokens_cannot_be_moved_under_another_base(m: Any) -> None:
    def init(old: Any, self: Any, llama: Any, effective: Any) -> None:
        old(self, llama, effective)
        if effective["rope_freq_base"] != llama.shape.rope_theta:
            self.capabilities = attrs.evolve(self.capabilities, kv_shift=False)

    around(m, ReferenceContext, "__init__", init)


@breaks("DEC-34", **real)
def rows_go_to_the_request_that_ran_last(m: Any) -> None:
    def decode(old: Any, self: Any, tokens: Any, *, seq_id: int, logits: str) -> None:
        old(self, tokens, seq_id=seq_id, logits=logits)
        self.ran = seq_id

    def vectors(old: Any, self: Any, rows: Any, positions: Any, seq_ids: Any, wanted: Any) -> None:
        its_own = np.asarray(seq_ids) == getattr(self, "ran", seq_ids[0])
        old(self, np.where(its_own[:, None], rows, 0), positions, seq_ids, wanted)
        self.ran = seq_ids[-1]

    around(m, ReferenceContext, "decode", decode)
    around(m, ReferenceContext, "decode_vectors", vectors)


@breaks("LORA-12", **real)
def adapters_never_reach_the_output(m: Any) -> None:
    def logits(old: Any, self: Any, hidden: Any, product: Any) -> Any:
        return old(self, hidden, Products(product._workers, ()))

    around(m, Llama, "logits", logits)


@breaks("CAP-39", **real)
def one_activation_stands_for_each(m: Any) -> None:
    old = bert._check_plain
    m.setattr(bert, "_check_plain", lambda config: old({**config, "hidden_act": "gelu_new"}))


@breaks("KV-39", **real)
def cells_are_sorted_by_position_without_their_keys(m: Any) -> None:
    def moved(old: Any, self: Any, positions: Any) -> Any:
        found, order = old(self, positions), np.argsort(positions, kind="stable")
        return attrs.evolve(found, tokens=found.tokens[order], positions=found.positions[order])

    around(m, cells.Cells, "moved", moved)


@breaks("CAP-34", **real)
def a_vector_is_told_without_its_layers(m: Any) -> None:
    def put(old: Any, self: Any, directions: Any) -> None:
        old(self, directions)
        if directions is not None:
            self._effective["control_vector"] = directions[directions.any(axis=1)].tobytes().hex()

    around(m, ReferenceContext, "set_control_vector", put)


@breaks("CAP-40", **real)
def steps_are_told_larger_than_calls(m: Any) -> None:
    def sizes(old: Any, config: Any) -> Any:
        found = old(config)
        return {**found, "n_ubatch": config.n_ubatch or found["n_ubatch"]}

    around(m, reference_settings, "_sizes", sizes)


@breaks("THREAD-5", **real)
def room_for_activations_is_shared_by_contexts(m: Any) -> None:
    rooms: dict[Any, Any] = {}

    def silu(x: Any) -> Any:
        room = rooms.setdefault(x.shape, np.empty_like(x))
        np.multiply(x, np.float32(0.5), out=room)
        time.sleep(0)  # another thread may run here, as it does in a longer computation
        return room * (1 + np.tanh(room))

    m.setattr(llama, "_silu", silu)
