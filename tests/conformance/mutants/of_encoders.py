"""Wrong encoders."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from conformance.full_toy import ENCODES, EncoderContext
from conformance.mutants import around, breaks, instead, nothing
from infercore.engine.appending import Appending
from infercore.engine.context import GuardedContext
from infercore.engine.model import GuardedModel
from infercore.errors import InvalidInputError, InvalidTokenError, OutputNotAvailableError
from infercore.testing import engine_of, reference_model


@breaks("ENC-1")
def an_encoder_that_promises_to_save_state(m: Any) -> None:
    for name in ("save_state", "load_state"):
        m.setattr(EncoderContext, name, lambda *_: b"", raising=False)
    m.setattr(EncoderContext, "capabilities", attrs.evolve(ENCODES, state=True))


@breaks("ENC-2")
def a_vector_depends_on_the_text_before(m: Any) -> None:
    def encode(old: Any, self: Any, tokens: Any) -> None:
        before = self.vectors.get(0)
        old(self, tokens)
        if before is not None:
            self.vectors[0] = self.vectors[0] + before.mean()

    around(m, EncoderContext, "encode", encode)


@breaks("ENC-2", "ENC-3")
def the_first_token_alone_counts(m: Any) -> None:
    around(m, EncoderContext, "encode", lambda old, self, tokens: old(self, tokens[:1]))


@breaks("ENC-3")
def cls_and_last_are_exchanged(m: Any) -> None:
    def embedding(old: Any, self: Any, seq_id: int) -> Any:
        kind = self.effective["pooling_type"]
        return self.vectors[seq_id][-1] if kind == "cls" else old(self, seq_id)

    around(m, EncoderContext, "embedding", embedding)


@breaks("ENC-4", "ENC-9")
def texts_side_by_side_are_one(m: Any) -> None:
    def decode_batch(_: Any, self: Any, tokens: Any, positions: Any, ids: Any, want: Any) -> None:
        del positions, want
        vector = self.text(tokens)
        self.vectors = {s: vector for found in ids for s in found}

    around(m, EncoderContext, "decode_batch", decode_batch)


@breaks("ENC-5")
def a_long_text_is_cut(m: Any) -> None:
    def encode(old: Any, self: Any, tokens: Any) -> None:
        old(self, tokens[: self.n_ubatch])

    around(m, GuardedContext, "encode", encode)


@breaks("ENC-5")
def a_refused_text_takes_the_vector_along(m: Any) -> None:
    def encode(old: Any, self: Any, tokens: Any) -> None:
        try:
            old(self, tokens)
        except InvalidInputError:
            self._results.forget()
            raise

    around(m, GuardedContext, "encode", encode)


@breaks("ENC-5")
def a_refused_text_spoils_the_next(m: Any) -> None:
    def encode(old: Any, self: Any, tokens: Any) -> None:
        inner = engine_of(self)
        try:
            old(self, tokens)
        except InvalidInputError:
            inner.spoiled = True
            raise
        if hasattr(inner, "spoiled"):
            inner.vectors = {0: inner.vectors[0] + 1}

    around(m, GuardedContext, "encode", encode)


@breaks("ENC-6")
def an_encoder_makes_up_logits(m: Any) -> None:
    zeros = np.zeros(4, np.float32)
    instead(m, GuardedContext, "logits", OutputNotAvailableError, lambda _: zeros)


@breaks("ENC-6")
def an_encoder_decodes(m: Any) -> None:
    nothing(m, Appending, "_need_logits")


@breaks("ENC-7")
def a_session_opens_on_an_encoder(m: Any) -> None:
    around(m, GuardedModel, "new_session", lambda _, self, *__, **fields: self.new_context())


@breaks("ENC-8", base="reference")
def positions_are_left_out(m: Any) -> None:
    from infercore.testing.bert import Bert

    def init(old: Any, self: Any, *args: Any) -> None:
        old(self, *args)
        self._positions = np.zeros_like(self._positions)

    around(m, Bert, "__init__", init)


def _cut(model: Any, text: str, _number: int, _n_ctx: int) -> list[int]:
    return model.tokenizer.encode(text)[:200]


@breaks("ENC-9")
def long_texts_are_let_through(m: Any) -> None:
    m.setattr("infercore.embedding._encode", _cut)


@breaks("ENC-10")
def every_token_is_one(m: Any) -> None:
    instead(m, GuardedContext, "encode", InvalidTokenError, lambda _: None)


@breaks("ENC-10")
def a_vector_is_made_of_nothing(m: Any) -> None:
    def embedding(old: Any, self: Any, seq_id: int = 0) -> Any:
        self._note_embedded({0}, 1)
        return old(self, seq_id)

    nothing(m, EncoderContext, "embedding", np.zeros(8, np.float32))
    around(m, GuardedContext, "embedding", embedding)


@breaks("ENC-17", base="reference")
def positions_behind_padding_are_counted_from_the_first(m: Any) -> None:
    kinds = {**reference_model.KINDS, "roberta": reference_model.KINDS["bert"]}
    m.setattr(reference_model, "KINDS", kinds)
