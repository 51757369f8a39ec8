"""Wrong backends over real attention that only rows, state and files made for it show."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from functools import partial
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from conformance.mutants import around, breaks, nothing, result
from infercore.conformance import Rig
from infercore.conformance.reference import announce
from infercore.errors import ContextOverflowError, InvalidInputError, ModelFormatError
from infercore.testing import (
    mirostat,
    reference_model,
    reference_settings,
    reference_tokenizer,
    truncation,
)
from infercore.testing.attention import OnlineSoftmax
from infercore.testing.kv_formats import KvFormat
from infercore.testing.products import Workers
from infercore.testing.reference_context import ReferenceContext
from infercore.testing.reference_model import ReferenceEncoder, ReferenceModel
from infercore.testing.reference_sequences import Sequences
from infercore.testing.reference_tokenizer import ReferenceTokenizer
from infercore.testing.truncation import probabilities
from infercore.weight_files import safetensors

real = {"base": "reference"}


@breaks("SAMP-28", **real)
def top_p_goes_on_where_it_is_reached(m: Any) -> None:
    def top_p(left: Any, p: float, keep: int) -> Any:
        n = 1 + sum(total <= p for total in accumulate(probabilities(left)))
        return left[: max(n, keep)]

    m.setattr(truncation, "top_p", top_p)


@breaks("SAMP-28", **real)
def mirostat_looks_at_99_tokens(m: Any) -> None:
    m.setattr(mirostat, "N_ESTIMATED", 99)


@breaks("LORA-2", **real)
def large_scores_overflow(m: Any) -> None:
    def add(old: Any, self: Any, scores: Any, values: Any) -> None:
        del old
        weights = np.exp(scores)
        self._total = self._total + weights.sum(axis=-1, keepdims=True)
        self._sum = self._sum + weights @ values

    around(m, OnlineSoftmax, "add", add)


@breaks("MEM-11", **real)
def closed_models_keep_their_weights(m: Any) -> None:
    nothing(m, ReferenceModel, "close")


@breaks("MEM-7", **real)
def blocks_are_planned_as_values(m: Any) -> None:
    m.setattr(KvFormat, "n_bytes", lambda self, n_values: n_values * self.dtype.itemsize)


@breaks("ENC-13", **real)
def an_encoder_passes_over_options(m: Any) -> None:
    old = reference_settings._check

    def check(config: Any, values: Any) -> None:
        if values is not reference_settings._ENCODER_VALUES:
            old(config, values)

    m.setattr(reference_settings, "_check", check)


@breaks("BAD-16", **real)
def an_encoder_refuses_without_facts(m: Any) -> None:
    old = reference_settings.resolve_encoder

    def resolve(*args: Any) -> Any:
        try:
            return old(*args)
        except InvalidInputError as error:
            raise InvalidInputError(str(error)) from error

    m.setattr(reference_settings, "resolve_encoder", resolve)


@breaks("CAP-39", **real)
def the_pooling_of_the_files_is_not_read(m: Any) -> None:
    m.setattr(reference_model, "_pooling_of", lambda path: "mean")


@breaks("CAP-39", **real)
def models_with_the_same_tensors_are_llamas(m: Any) -> None:
    def read(old: Any, config: Any, path: str) -> Any:
        return old({**config, "model_type": "llama"}, path)

    m.setitem(reference_model.KINDS, "granite", ReferenceModel)
    around(m, reference_model.llama.Shape, "from_config", read)


@breaks("CAP-39", **real)
def the_pooling_is_no_part_of_the_digest(m: Any) -> None:
    m.setattr(ReferenceEncoder, "files", property(own_files, keep_three), raising=False)


def own_files(self: Any) -> Any:
    return self._three


def keep_three(self: Any, files: Any) -> None:
    self._three = files[:3]


@breaks("BAD-17", **real)
def what_is_said_of_pooling_is_thought_to_be_whole(m: Any) -> None:
    def read(old: Any, folder: str, name: str, default: str = "{}") -> Any:
        if name == reference_model._POOLING_JSON:
            return json.loads(reference_tokenizer._read(folder, name, default))
        return old(folder, name, default)

    around(m, reference_model, "json_object", read)


@breaks("STATE-31", **real)
def a_forged_sequence_takes_its_neighbours_along(m: Any) -> None:
    def load(old: Any, self: Any, seq_id: int, data: bytes) -> None:
        try:
            old(self, seq_id, data)
        except Exception:
            self.clear()
            raise

    around(m, Sequences, "load_sequence", load)


@breaks("STATE-34", **real)
def long_texts_are_restored_without_a_value(m: Any) -> None:
    def load(old: Any, self: Any, seq_id: int, data: bytes) -> None:
        old(self, seq_id, data)
        held = self.sequences[seq_id]
        if len(held.tokens) > 512:
            less = held.v.copy()
            less[:, 0] = 0
            self.sequences[seq_id] = attrs.evolve(held, v=less)

    around(m, Sequences, "load_sequence", load)


@breaks("STATE-34", **real)
def what_was_refused_leaves_less_room(m: Any) -> None:
    def load(old: Any, self: Any, seq_id: int, data: bytes) -> None:
        try:
            old(self, seq_id, data)
        except Exception:
            self.has_less = True
            raise

    def decode(old: Any, self: Any, tokens: Any, **kwargs: Any) -> Any:
        if getattr(self, "has_less", False) and len(tokens) >= 250:
            raise ContextOverflowError(
                stage="engine", resident_tokens=0, additional_tokens=1, n_ctx=len(tokens)
            )
        return old(self, tokens, **kwargs)

    around(m, Sequences, "load_sequence", load)
    around(m, ReferenceContext, "decode", decode)


@breaks("CAP-43", **real)
def weights_in_parts_are_met_by_a_mistake(m: Any) -> None:
    old = safetensors.read

    def read(path: str) -> Any:
        if not Path(path).is_file():
            raise KeyError(path)
        return old(path)

    m.setattr(safetensors, "read", read)


@breaks("CAP-42", **real)
def any_release_of_the_engine_is_taken(m: Any) -> None:
    m.setattr(sys, "path", [*sys.path])  # where it is announced
    announce()
    m.setattr(metadata, "requires", lambda _: ["numpy>=1.26"])

    def begin(old: Any, self: Any, name: str, seed: int) -> None:
        old(self, name, seed)
        self.engine = "numpy"

    around(m, Rig, "begin", begin)


@breaks("TOK-22", **real)
def long_tokens_are_cut(m: Any) -> None:
    result(m, ReferenceTokenizer, "token_bytes", lambda data: data[:64])


@breaks("TOK-22", **real)
def pieces_are_always_of_the_alphabet(m: Any) -> None:
    def token_bytes(old: Any, self: Any, token: int) -> bytes:
        if self._parsing.id_to_token(token) == "\u65e5":
            raise KeyError("\u65e5")
        found: bytes = old(self, token)
        return found

    around(m, ReferenceTokenizer, "token_bytes", token_bytes)


@breaks("TOK-22", **real)
def added_tokens_that_are_not_special_are_of_the_alphabet(m: Any) -> None:
    def token_bytes(old: Any, self: Any, token: int) -> bytes:
        text = self._added.get(token, "\0")
        if token in self._control or not self._alphabet.keys() >= set(text):
            found: bytes = old(self, token)
            return found
        return bytes(self._alphabet[character] for character in text)

    around(m, ReferenceTokenizer, "token_bytes", token_bytes)


@breaks("TOK-22", **real)
def pieces_of_words_lose_every_mark(m: Any) -> None:
    def of_word(piece: str) -> bytes:
        return piece.lstrip("#").encode() if piece[:2] == "##" else b" " + piece.encode()

    m.setattr(reference_tokenizer, "_word_piece", of_word)


@breaks("TOK-11", **real)
def where_a_text_begins_is_kept_in_the_tokenizer(m: Any) -> None:
    def decode(_: Any, self: Any, tokens: Any, *, skip_special: bool) -> str:
        self.at_start, pieces = True, []
        for token in tokens:
            time.sleep(0)  # gives way, as a call of a library may
            piece = b"" if skip_special and self.is_control(token) else self.token_bytes(token)
            pieces.append(piece.removeprefix(b" ") if self.at_start else piece)
            self.at_start = False
        return b"".join(pieces).decode("utf-8", errors="replace")

    around(m, ReferenceTokenizer, "decode", decode)


@breaks("TOK-20", **real)
def a_template_in_the_config_comes_before_its_file(m: Any) -> None:
    def template(old: Any, folder: str) -> Any:
        named = reference_tokenizer.json_object(folder, "tokenizer_config.json")
        found = named.get("chat_template")
        return found if isinstance(found, str) else old(folder)

    own = ReferenceTokenizer._template
    m.setattr(ReferenceTokenizer, "_template", staticmethod(partial(template, own)))


@breaks("LIFE-16", **real)
def what_a_handler_raises_is_lost(m: Any) -> None:
    def opened(old: Any, self: Any, config: Any) -> Any:
        with contextlib.suppress(Exception):
            logging.getLogger("infercore.reference").info("a context is opened")
        return old(self, config)

    around(m, ReferenceModel, "new_context", opened)


@breaks("LIFE-16", **real)
def a_hook_of_the_interpreter_is_left_behind(m: Any) -> None:
    def opened(old: Any, self: Any, config: Any) -> Any:
        m.setattr(sys, "unraisablehook", lambda _: None)
        return old(self, config)

    around(m, ReferenceModel, "new_context", opened)


@breaks("LIFE-16", **real)
def what_a_handler_raises_in_a_step_is_lost(m: Any) -> None:
    def decode(old: Any, self: Any, *args: Any, **fields: Any) -> Any:
        with contextlib.suppress(Exception):
            logging.getLogger("infercore.reference").info("a step")
        return old(self, *args, **fields)

    around(m, ReferenceContext, "decode", decode)


@breaks("LIFE-16", **real)
def a_broken_off_batch_spoils_the_second_sequence(m: Any) -> None:
    def decode_batch(old: Any, self: Any, *args: Any) -> None:
        try:
            old(self, *args)
        except BaseException:
            held = self.sequences[1]
            self.sequences[1] = attrs.evolve(held, k=-held.k)
            raise

    around(m, ReferenceContext, "decode_batch", decode_batch)


@breaks("THREAD-4", **real)
def rows_that_no_thread_has_are_left_out(m: Any) -> None:
    def product(old: Any, self: Any, x: Any, weight: Any) -> Any:
        found = old(self, x, weight)
        found[:, len(weight) // self.n_threads * self.n_threads :] = 0
        return found

    around(m, Workers, "product", product)


@breaks("CAP-26", **real)
def infinite_weights_are_taken(m: Any) -> None:
    def check(tensors: Any, path: str) -> None:
        if any(np.isnan(tensor).any() for tensor in tensors.values()):
            raise ModelFormatError(path, path=path)

    m.setattr(reference_model, "_check_finite", check)


@breaks("LIFE-16", **real)
def signals_are_lost_in_a_step(m: Any) -> None:
    def decode(old: Any, self: Any, *args: Any, **fields: Any) -> Any:
        found = old(self, *args, **fields)
        with contextlib.suppress(Exception):
            time.sleep(0.05)
        return found

    around(m, ReferenceContext, "decode", decode)
