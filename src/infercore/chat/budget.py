"""Ends a thought that has taken its share of tokens."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

import numpy as np

from infercore.chat.raw import RawText
from infercore.chat.reasoning import ReasoningReader

if TYPE_CHECKING:
    import numpy.typing as npt

    from infercore.chat.reasoning import ReasoningFormat
    from infercore.protocols.public import Tokenizer


class ThoughtBudget:
    """A processor that writes the closing mark once a thought has ``limit`` tokens.

    Called with all ids so far, int32 [n], and the logits, float32 [n_vocab]; serves one decode.
    ``n_prompt`` of them are the prompt: an answer that goes on in another process begins with more.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        form: ReasoningFormat,
        limit: int,
        *,
        inside: bool,
        n_prompt: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self._closing = tokenizer.encode(f"\n{form.close}\n", add_special=False)
        self._n_seen = n_prompt
        self._n_thought = 0
        self._forced = 0
        self._reader = ReasoningReader(form, inside=inside, is_control=self._is_control)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def _is_control(self, mark: str) -> bool:
        tokens = self._tokenizer.encode(mark, add_special=False)
        return bool(tokens) and self._tokenizer.is_control(tokens[0])

    def __call__(
        self, input_ids: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        """Return the logits, of which only the next token of the mark is left where it is due."""
        for token in input_ids[self._n_seen :].tolist():
            self._see(token)
        self._n_seen = len(input_ids)
        kept = self._due
        if kept is None:
            return logits
        only = np.full_like(logits, -np.inf)
        only[kept] = max(float(logits[kept]), 0.0)
        return only

    @property
    def _due(self) -> int | None:
        """The next token of the mark, where it has to come now."""
        is_closing = 0 < self._forced < len(self._closing)
        if is_closing or (self._reader.inside and self._n_thought >= self._limit):
            return self._closing[self._forced]
        return None

    def _see(self, token: int) -> None:
        self._forced += self._due is not None
        text = self._utf8.decode(self._tokenizer.token_bytes(token))
        flag = "1" if self._tokenizer.is_control(token) else "0"
        was_inside = self._reader.inside
        for _ in self._reader.push(RawText(text, flag * len(text))):
            pass
        self._n_thought += was_inside
        if self._reader.inside != was_inside:
            self._n_thought = 0
            self._forced = 0 if self._reader.inside else self._forced  # the next one has its own
