"""Wrong backends over real attention that say or accept what is not so."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from conformance.mutants import around, breaks, result, told
from infercore import loading
from infercore.engine.context import GuardedContext
from infercore.engine.model import GuardedModel
from infercore.engine.tokenizer import GuardedTokenizer
from infercore.errors import UnsupportedFeatureError
from infercore.testing import (
    dry,
    kv_formats,
    reference_model,
    reference_sampler,
    reference_sequences,
    reference_settings,
    reference_tokenizer,
    truncation,
)
from infercore.testing.cells import Cells
from infercore.testing.faults import FaultyModel
from infercore.testing.mirostat import Mirostat
from infercore.testing.reference_base import Base
from infercore.testing.reference_context import ReferenceContext
from infercore.testing.reference_model import Loaded, ReferenceModel
from infercore.testing.reference_sampler import ReferenceSampler
from infercore.testing.reference_sequences import Sequences
from infercore.testing.reference_tokenizer import ReferenceTokenizer

real = {"base": "reference"}


@breaks("CAP-22", **real)
def the_shape_is_of_another_model(m: Any) -> None:
    result(m, Loaded, "_info", lambda info: attrs.evolve(info, n_head_kv=info.n_head))


@breaks("CAP-22", **real)
def numbers_that_are_no_weights_are_counted(m: Any) -> None:
    result(m, Loaded, "_info", lambda info: attrs.evolve(info, n_params=info.n_params + 16))


@breaks("MEM-2", **real)
def a_state_that_sums_up_is_planned_and_not_told(m: Any) -> None:
    told(
        m, ReferenceModel, "plan_memory", kv_bytes_by_kind=lambda plan: {"recurrent": plan.kv_bytes}
    )


@breaks("CAP-23", **real)
def the_base_of_rope_is_not_used(m: Any) -> None:
    def rope(old: Any, self: Any, llama: Any, effective: Any) -> None:
        old(self, llama, effective)
        self._rope = attrs.evolve(self._rope, theta=llama.shape.rope_theta)

    around(m, ReferenceContext, "__init__", rope)


@breaks("CAP-24", **real)
def attention_is_always_causal(m: Any) -> None:
    def attend(old: Any, self: Any, *args: Any) -> Any:
        kept, self._effective = self._effective, {**self._effective, "attention_type": "causal"}
        try:
            return old(self, *args)
        finally:
            self._effective = kept

    around(m, ReferenceContext, "_attend", attend)


@breaks("CAP-24", **real)
def all_contexts_have_the_attention_of_the_last(m: Any) -> None:
    last = {}

    def opened(old: Any, self: Any, *args: Any, **fields: Any) -> None:
        old(self, *args, **fields)
        last["attention_type"] = self._effective["attention_type"]

    def attend(old: Any, self: Any, *args: Any) -> Any:
        kept, self._effective = self._effective, {**self._effective, **last}
        try:
            return old(self, *args)
        finally:
            self._effective = kept

    around(m, ReferenceContext, "__init__", opened)
    around(m, ReferenceContext, "_attend", attend)


@breaks("CAP-25", **real)
def values_are_kept_as_keys_are(m: Any) -> None:
    def kinds(old: Any, self: Any, llama: Any, effective: Any) -> None:
        old(self, llama, {**effective, "type_v": effective["type_k"]})
        self._effective["type_v"] = effective["type_v"]

    around(m, ReferenceContext, "__init__", kinds)


@breaks("CAP-26", **real)
def options_of_models_are_not_looked_at(m: Any) -> None:
    m.setattr(reference_settings, "check_model", lambda config: None)


@breaks("CAP-27", **real)
def the_tolerance_is_said_to_be_none(m: Any) -> None:
    def told(old: Any, self: Any, llama: Any, effective: Any) -> None:
        old(self, llama, effective)
        self.tolerance = 0.0

    around(m, ReferenceContext, "__init__", told)


@breaks("CAP-28", **real)
def the_digest_is_of_the_names(m: Any) -> None:
    m.setattr(GuardedModel, "digest", property(lambda self: "ab" * 32))


@breaks("MEM-7", **real)
def the_plan_forgets_the_values(m: Any) -> None:
    def half(plan: Any) -> Any:
        return attrs.evolve(plan, kv_bytes=plan.kv_bytes // 2, kv_bytes_by_kind={})

    result(m, ReferenceModel, "plan_memory", half)


@breaks("MEM-8", **real)
def a_model_keeps_its_file_open(m: Any) -> None:
    kept: list[Any] = []

    def opened(old: Any, self: Any, *args: Any) -> None:
        old(self, *args)
        kept.append(os.open(self.files[1], os.O_RDONLY))

    around(m, Loaded, "__init__", opened)


@breaks("CANCEL-12", **real)
def single_tokens_do_not_ask(m: Any) -> None:
    def one(old: Any, self: Any, token: int, *, seq_id: int) -> None:
        kept, self._ask = self._ask, None
        try:
            old(self, token, seq_id=seq_id)
        finally:
            self._ask = kept

    around(m, ReferenceContext, "decode_one", one)


@breaks("THREAD-9", **real)
def only_its_own_thread_may_close(m: Any) -> None:
    owners: dict[int, int] = {}

    def born(old: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        old(self, *args, **kwargs)
        owners[id(self)] = threading.get_ident()

    def close(old: Any, self: Any) -> None:
        if owners.get(id(self)) == threading.get_ident():
            old(self)

    around(m, GuardedContext, "__init__", born)
    around(m, GuardedContext, "close", close)


@breaks("SAMP-22", **real)
def a_clone_shares_its_chance(m: Any) -> None:
    m.setattr(ReferenceSampler, "clone", lambda self: self)


@breaks("SAMP-23", **real)
def penalties_forget_the_window(m: Any) -> None:
    def penalise(old: Any, self: Any, row: Any) -> None:
        kept, self.config = self.config, attrs.evolve(self.config, penalty_last_n=-1)
        try:
            old(self, row)
        finally:
            self.config = kept

    around(m, ReferenceSampler, "_penalise", penalise)


@breaks("MEM-10", **real)
def what_was_saved_is_kept(m: Any) -> None:
    kept: list[bytes] = []

    def save(old: Any, self: Any, seq_id: int) -> Any:
        kept.append(bytes(2**18) + old(self, seq_id))
        return kept[-1][2**18 :]

    around(m, Sequences, "save_sequence", save)


@breaks("SAMP-27", **real)
def min_p_comes_before_top_p(m: Any) -> None:
    old = reference_sampler.truncated

    def truncated(left: Any, config: Any, source: Any) -> Any:
        left = truncation.min_p(left, config.min_p, max(1, config.min_keep))
        return old(left, attrs.evolve(config, min_p=0.0), source)

    m.setattr(reference_sampler, "truncated", truncated)


@breaks("SAMP-23", **real)
def a_bias_counts_in_whole_numbers(m: Any) -> None:
    def new(old: Any, self: Any, *args: Any) -> None:
        old(self, *args)
        bias = {t: round(b) if abs(b) < 2**20 else b for t, b in self.config.logit_bias.items()}
        self.config = attrs.evolve(self.config, logit_bias=bias)

    around(m, ReferenceSampler, "__init__", new)


@breaks("SAMP-27", **real)
def min_keep_is_not_used(m: Any) -> None:
    old = reference_sampler.truncated
    m.setattr(
        reference_sampler,
        "truncated",
        lambda left, config, source: old(left, attrs.evolve(config, min_keep=0), source),
    )


@breaks("TOK-15", **real)
def all_but_the_first_three_control_tokens_can_be_typed(m: Any) -> None:
    def encode(old: Any, self: Any, text: str, *, add_special: bool, parse_special: bool) -> Any:
        last = max(self._control)
        if not parse_special and self._control[last] in text:
            parse_special = True
        return old(self, text, add_special=add_special, parse_special=parse_special)

    around(m, ReferenceTokenizer, "encode", encode)


class Endless:
    """A tokenizer that does not know the last of the model's ends."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def is_eog(self, token: int) -> bool:
        return token == self._inner.eos


@breaks("TOK-16", **real)
def one_end_is_forgotten(m: Any) -> None:
    told = property(lambda self: Endless(self._inner.tokenizer))  # not of the oracle's model
    m.setattr(FaultyModel, "tokenizer", told, raising=False)


@breaks("TOK-17", **real)
def runs_of_blanks_become_one(m: Any) -> None:
    def encode(old: Any, self: Any, text: str, **how: Any) -> Any:
        return old(self, text.replace("    ", " "), **how)

    around(m, ReferenceTokenizer, "encode", encode)


@breaks("CAP-29", **real)
def half_precision_keeps_five_bits(m: Any) -> None:
    half = kv_formats.KV_FORMATS["f16"]
    rough = attrs.evolve(half, pack=lambda x: (np.rint(x * 8) / 8).astype(np.float16))
    m.setattr(reference_sequences, "KV_FORMATS", {**kv_formats.KV_FORMATS, "f16": rough})


@breaks("CAP-29", **real)
def half_precision_is_told_as_coarse_as_four_bits(m: Any) -> None:
    coarse = attrs.evolve(kv_formats.KV_FORMATS["f16"], tolerance=1.5)
    m.setattr(reference_sequences, "KV_FORMATS", {**kv_formats.KV_FORMATS, "f16": coarse})


@breaks("STATE-25", **real)
def a_narrow_cache_comes_back_without_its_first_value(m: Any) -> None:
    def load(old: Any, self: Any, seq_id: int, data: bytes) -> None:
        old(self, seq_id, data)
        own = self.sequences[seq_id]
        if len(own.tokens) and own.v.dtype != np.float32:
            v = own.v.copy()
            v[:, :1] = np.zeros((), v.dtype)
            self.sequences[seq_id] = Cells(own.tokens, own.positions, own.k, v)

    around(m, Sequences, "load_sequence", load)


@breaks("CAP-30", **real)
def progress_is_never_told(m: Any) -> None:
    m.setattr(loading._Progress, "tell", lambda self, fraction: None)


@breaks("CAP-42", **real)
def a_config_alone_is_claimed(m: Any) -> None:
    m.setattr(reference_model, "match", lambda path: float(Path(path, "config.json").is_file()))


@breaks("CAP-42", **real)
def any_folder_is_claimed(m: Any) -> None:
    old = reference_model.match
    m.setattr(reference_model, "match", lambda path: old(path) or float(Path(path).is_dir()))


@breaks("ENC-16", **real)
def a_piece_loses_what_it_begins_with(m: Any) -> None:
    m.setattr(reference_tokenizer, "_word_piece", lambda piece: piece[2:].encode())


@breaks("BAD-16", **real)
def a_refusal_names_nothing(m: Any) -> None:
    def refuse(config: Any, honoured: Any, *, backend: str) -> None:
        del backend
        for name, values in honoured.items():
            if values is not None and getattr(config, name) not in (None, *values):
                raise UnsupportedFeatureError(feature="an option")

    m.setattr(reference_settings, "refuse_unhonoured", refuse)


@breaks("BAD-17", **real)
def files_are_thought_to_be_whole(m: Any) -> None:
    def read(folder: str, name: str, default: Any = "{}") -> Any:
        return json.loads(reference_tokenizer._read(folder, name, default))

    m.setattr(reference_tokenizer, "json_object", read)


@breaks("TOK-18", **real)
def the_vocabulary_is_known_by_its_size(m: Any) -> None:
    m.setattr(GuardedTokenizer, "digest", property(lambda self: f"{self.n_vocab:064x}"))


@breaks("EMB-11", **real)
def vectors_are_twice_their_size(m: Any) -> None:
    result(m, Base, "embeddings", lambda rows: rows * 2)
    result(m, Base, "embedding", lambda row: row * 2)


@breaks("REUSE-20", **real)
def what_is_left_is_evaluated_anew(m: Any) -> None:
    def remove(old: Any, self: Any, seq_id: int, p0: int, p1: int) -> bool:
        done = bool(old(self, seq_id, p0, p1))
        left = self.sequences[seq_id].tokens
        if len(left):
            self.sequences[seq_id] = self._empty
            self.decode(left, seq_id=seq_id, logits="none")
        return done

    around(m, Sequences, "seq_remove", remove)


@breaks("SAMP-25", **real)
def a_clone_shares_its_surprise(m: Any) -> None:
    def clone(old: Any, self: Any) -> Any:
        twin = old(self)
        twin._mirostat = self._mirostat
        return twin

    around(m, ReferenceSampler, "clone", clone)


@breaks("MEM-7", **real)
def the_plan_is_of_ten_times_as_much(m: Any) -> None:
    def large(plan: Any) -> Any:
        return attrs.evolve(plan, kv_bytes=plan.kv_bytes * 10, kv_bytes_by_kind={})

    result(m, ReferenceModel, "plan_memory", large)


@breaks("EMB-11", **real)
def two_texts_of_a_call_are_pooled_as_one(m: Any) -> None:
    around(m, Base, "embedding", lambda old, self, seq_id: self._hidden.mean(axis=0))


@breaks("SAMP-23", **real)
def dry_sees_no_repetition_of_a_repetition(m: Any) -> None:
    old = dry._n_common
    m.setattr(dry, "_n_common", lambda *args: min(old(*args), 2))


@breaks("SAMP-24", **real)
def mirostat_never_adapts(m: Any) -> None:
    def choose(old: Any, self: Any, *args: Any, **how: Any) -> Any:
        kept = self._allowed
        token = old(self, *args, **how)
        self._allowed = kept
        return token

    around(m, Mirostat, "choose", choose)


@breaks("CAP-47", **real)
def models_of_one_layer_restore_no_values(m: Any) -> None:
    def load(old: Any, self: Any, seq_id: int, data: bytes) -> None:
        old(self, seq_id, data)
        cells = self.sequences[seq_id]
        if len(cells.k) == 1:
            self.sequences[seq_id] = attrs.evolve(cells, v=np.zeros_like(cells.v))

    around(m, Sequences, "load_sequence", load)


@breaks("CAP-47", **real)
def keys_of_models_of_one_layer_are_turned_by_halves(m: Any) -> None:
    def shift(old: Any, self: Any, seq_id: int, p0: int, p1: int, delta: int) -> None:
        one = len(self.sequences[seq_id].k) == 1
        old(self, seq_id, p0, p1, delta // 2 if one else delta)

    around(m, Sequences, "seq_shift", shift)


@breaks("KV-34", **real)
def other_threads_drop_the_last_sequence_s_values(m: Any) -> None:
    def threads(old: Any, self: Any, n: int, n_batch: int) -> None:
        old(self, n, n_batch)
        held = getattr(self, "sequences", ())
        last = max((s for s, cells in enumerate(held) if len(cells.positions)), default=0)
        if last > 1:
            cells = held[last]
            self.sequences[last] = attrs.evolve(cells, v=np.zeros_like(cells.v))

    around(m, Base, "set_threads", threads)


@breaks("STATE-28", **real)
def saved_copies_are_as_long_as_the_last(m: Any) -> None:
    def save(old: Any, self: Any) -> bytes:
        whole = self.sequences
        last = next((cells for cells in whole[::-1] if len(cells.tokens)), whole[0])
        n = len(last.tokens)
        self.sequences = [
            attrs.evolve(
                cells, v=np.where(np.arange(len(cells.tokens))[:, None, None] < n, cells.v, 0)
            )
            if np.array_equal(cells.tokens[:n], last.tokens)
            else cells
            for cells in whole
        ]
        try:
            return bytes(old(self))
        finally:
            self.sequences = whole

    around(m, Sequences, "save_state", save)
