"""Wrong backends over real attention: what was set, what the files say, aborts, encoders."""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs
import numpy as np

from conformance.mutants import around, breaks, result
from infercore.errors import DecodeAbortedError, UnsupportedFeatureError
from infercore.testing import llama, reference_settings, reference_tokenizer
from infercore.testing.bert import Bert
from infercore.testing.reference_base import Base
from infercore.testing.reference_context import ReferenceContext
from infercore.testing.reference_encoder import EncoderContext
from infercore.testing.reference_model import Loaded, ReferenceEncoder
from infercore.testing.reference_sampler import ReferenceSampler
from infercore.testing.reference_sequences import Sequences

real = {"base": "reference"}


# -- aborts ----------------------------------------------------------------------------------------


@breaks("CANCEL-14", **real)
def the_engine_is_deaf_to_its_own_abort(m: Any) -> None:
    def check(old: Any, self: Any, n_resident: int) -> None:
        if self._ask is not None:
            old(self, n_resident)

    around(m, Base, "_check_abort", check)


@breaks("CANCEL-14", **real)
def what_clears_an_abort_clears_the_callback(m: Any) -> None:
    def clear(old: Any, self: Any) -> None:
        old(self)
        self._ask = None

    around(m, Base, "clear_abort", clear)


@breaks("CANCEL-15", **real)
def the_callback_is_asked_in_the_first_step(m: Any) -> None:
    def decode(old: Any, self: Any, *args: Any) -> None:
        self._is_first = True
        old(self, *args)

    def step(old: Any, self: Any, *args: Any) -> Any:
        ask = self._ask
        if not self._is_first:
            self._ask = None
        self._is_first = False
        try:
            return old(self, *args)
        finally:
            self._ask = ask

    around(m, ReferenceContext, "decode_batch", decode)
    around(m, ReferenceContext, "_step", step)


@breaks("CANCEL-15", **real)
def vectors_ask_the_callback_before_them_alone(m: Any) -> None:
    def vectors(old: Any, self: Any, *args: Any) -> None:
        ask, self._ask = self._ask, None
        try:
            if ask is not None and ask():
                message = "aborted"
                raise DecodeAbortedError(message, resident_tokens=0)
            old(self, *args)
        finally:
            self._ask = ask

    around(m, ReferenceContext, "decode_vectors", vectors)


# -- what is held ----------------------------------------------------------------------------------


@breaks("DEC-28", **real)
def the_fourth_sequence_is_where_the_third_is(m: Any) -> None:
    def decode(old: Any, self: Any, tokens: Any, positions: Any, seq_ids: Any, wanted: Any) -> None:
        places = np.array(positions)
        if len({ids[0] for ids in seq_ids}) == len(tokens):
            places[3:] = places[2:3]
        old(self, tokens, places, seq_ids, wanted)

    around(m, ReferenceContext, "decode_batch", decode)


@breaks("KV-28", **real)
def a_copy_of_more_than_256_cells_has_one_twice(m: Any) -> None:
    def copy(old: Any, self: Any, src: int, dst: int, p0: int, p1: int) -> None:
        old(self, src, dst, p0, p1)
        own = self.sequences[dst]
        if len(own.tokens) > 256:
            v = own.v.copy()
            v[:, 256] = v[:, 255]
            self.sequences[dst] = attrs.evolve(own, v=v)

    around(m, Sequences, "seq_copy", copy)


@breaks("STATE-28", **real)
def state_saved_after_a_shift_is_that_of_before(m: Any) -> None:
    def shift(old: Any, self: Any, seq_id: int, p0: int, p1: int, delta: int) -> None:
        self._was = {seq_id: self.sequences[seq_id].positions}
        old(self, seq_id, p0, p1, delta)

    def save(old: Any, self: Any, seq_id: int) -> Any:
        now = self.sequences[seq_id]
        was = getattr(self, "_was", {}).get(seq_id, now.positions)
        if len(was) == len(now.tokens):
            self.sequences[seq_id] = now.moved(was)
        try:
            return old(self, seq_id)
        finally:
            self.sequences[seq_id] = now

    around(m, Sequences, "seq_shift", shift)
    around(m, Sequences, "save_sequence", save)


@breaks("MEM-11", **real)
def closed_models_stay_in_memory(m: Any) -> None:
    kept = []

    def init(old: Any, self: Any, *args: Any) -> None:
        old(self, *args)
        kept.append(self.tensors)

    around(m, Loaded, "__init__", init)


# -- what was set, and what the files say ----------------------------------------------------------


@breaks("CAP-38", **real)
def a_clear_takes_the_control_vector_away(m: Any) -> None:
    def clear(old: Any, self: Any) -> None:
        old(self)
        self._added = None

    around(m, Sequences, "clear", clear)


@breaks("CAP-39", **real)
def every_config_is_a_plain_llamas(m: Any) -> None:
    m.setattr(llama, "_check_plain", lambda *_: None)


@breaks("TOK-20", **real)
def a_generation_config_is_not_read(m: Any) -> None:
    read = reference_tokenizer.json_object

    def other(folder: str, name: str, default: str | None = "{}") -> Any:
        return {} if name == "generation_config.json" else read(folder, name, default)

    m.setattr(reference_tokenizer, "json_object", other)


# -- encoders --------------------------------------------------------------------------------------


@breaks("ENC-4", **real)
def an_encoder_s_texts_stand_one_behind_the_other(m: Any) -> None:
    def batch(_: Any, self: Any, tokens: Any, positions: Any, seq_ids: Any, wanted: Any) -> None:
        del positions, wanted
        sizes = Counter(s for ids in seq_ids for s in ids).values()
        parts = np.split(tokens, np.cumsum([*sizes])[:-1])
        self._hidden = np.concatenate([self._text(part) for part in parts])
        self._hidden_ids = seq_ids

    around(m, EncoderContext, "decode_batch", batch)


@breaks("ENC-12", **real)
def an_encoder_pads_long_texts(m: Any) -> None:
    loaded = []  # the rig's own; the oracle comes later

    def init(old: Any, self: Any, *args: Any) -> None:
        old(self, *args)
        loaded.append(self)

    def text(old: Any, self: Any, tokens: Any) -> Any:
        if self._bert is loaded[0] and len(tokens) > 64:
            padded = np.concatenate([tokens, np.zeros(-len(tokens) % 8, np.int32)])
            return old(self, padded)[: len(tokens)]
        return old(self, tokens)

    around(m, Bert, "__init__", init)
    around(m, EncoderContext, "_text", text)


@breaks("ENC-13", **real)
def an_encoder_always_says_that_flash_is_off(m: Any) -> None:
    settings = ("auto", "on", "off")
    m.setitem(reference_settings._ENCODER_VALUES, "flash_attn", settings)
    kinds = attrs.evolve(ReferenceEncoder.capabilities, flash_attention=settings)
    for cls in (ReferenceEncoder, EncoderContext):
        m.setattr(cls, "capabilities", kinds)


@breaks("ENC-14", **real)
def an_encoder_plans_a_part_of_its_weights(m: Any) -> None:
    def part(plan: Any) -> Any:
        return attrs.evolve(plan, weights_bytes=plan.weights_bytes // 4)

    result(m, ReferenceEncoder, "plan_memory", part)


@breaks("ENC-15", **real)
def an_encoder_asks_for_ever(m: Any) -> None:
    def give(old: Any, self: Any, callback: Any) -> None:
        if callback is not None:
            old(self, callback)

    around(m, EncoderContext, "set_abort_callback", give)


@breaks("EMB-5", **real)
def pooling_makes_no_vectors_unasked(m: Any) -> None:
    old = reference_settings.resolve

    def resolve(config: Any, shape: Any) -> Any:
        return old(config, shape) | {"embeddings": config.embeddings is True}

    m.setattr(reference_settings, "resolve", resolve)


# -- what is honoured no more ----------------------------------------------------------------------


@breaks("CAP-41", **real)
def steps_of_another_size_are_refused(m: Any) -> None:
    m.setitem(reference_settings._CONTEXT_VALUES, "n_ubatch", (64, 512))


@breaks("CAP-41", **real)
def its_own_sampler_refuses_mirostat(m: Any) -> None:
    def opened(old: Any, self: Any, config: Any, *args: Any) -> None:
        if config.mirostat:
            raise UnsupportedFeatureError(feature=f"mirostat={config.mirostat}")
        old(self, config, *args)

    around(m, ReferenceSampler, "__init__", opened)
