"""Text to token ids and back, as the model's own vocabulary has it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from infercore_llamacpp.library import api
from infercore_llamacpp.settings import refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

_KINDS = (
    (api.LLAMA_TOKEN_ATTR_UNKNOWN, "unknown"),
    (api.LLAMA_TOKEN_ATTR_UNUSED, "unused"),
    (api.LLAMA_TOKEN_ATTR_CONTROL, "control"),
    (api.LLAMA_TOKEN_ATTR_USER_DEFINED, "user_defined"),
    (api.LLAMA_TOKEN_ATTR_BYTE, "byte"),
)
_SCORED = (api.LLAMA_VOCAB_TYPE_SPM, api.LLAMA_VOCAB_TYPE_UGM)
_SPLIT_TEXT = (
    api.LLAMA_TOKEN_ATTR_CONTROL | api.LLAMA_TOKEN_ATTR_USER_DEFINED | api.LLAMA_TOKEN_ATTR_UNKNOWN
)


class LlamaTokenizer:
    """The tokenizer of one loaded model. May be used from many threads."""

    def __init__(self, vocab: int, chat_template: str | None) -> None:
        self._vocab = vocab
        self.pair_middle: list[int] | None = None  # what ends a text
        self._pieces: dict[int, bytes] = {}
        self.n_vocab: int = api.llama_vocab_n_tokens(vocab)
        self.bos = self._special(api.llama_vocab_bos)
        self.eos = self._special(api.llama_vocab_eos)
        self.eot = self._special(api.llama_vocab_eot)
        self.sep = self._special(api.llama_vocab_sep)
        self.pad = self._special(api.llama_vocab_pad)
        self.add_bos: bool = api.llama_vocab_get_add_bos(vocab)
        self.chat_template = chat_template
        self._has_no_text: bool = api.llama_vocab_type(vocab) == api.LLAMA_VOCAB_TYPE_NONE
        self._has_scores: bool = api.llama_vocab_type(vocab) in _SCORED

    def _special(self, getter: Any) -> int | None:
        token: int = getter(self._vocab)
        return token if 0 <= token < self.n_vocab else None

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the ids of ``text`` (may be empty or hold NUL)."""
        if self._has_no_text:
            raise refuse("encode", "this model's file holds no vocabulary")
        data = text.encode()
        room = len(data) + 8
        while True:  # a vocabulary may spell one character out as many, which take more room
            tokens = (ctypes.c_int32 * room)()
            n: int = api.llama_tokenize(
                self._vocab, data, len(data), tokens, room, add_special, parse_special
            )
            if n >= 0:
                ids: list[int] = tokens[:n]
                return ids
            room = -n

    def separate_pairs(self) -> None:
        """Put the separator between the texts of a pair, behind what ends the first.

        What begins a text is left out by the core.
        """
        around = self.encode("", add_special=True, parse_special=False)
        self.pair_middle = [*around, *([] if self.sep is None else [self.sep])]

    def token_bytes(self, token: int) -> bytes:
        """Return the exact bytes of one token; of a control token its text."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._read_piece(token)
        return piece

    def _read_piece(self, token: int) -> bytes:
        if self._has_no_text:
            return b""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n: int = api.llama_token_to_piece(self._vocab, token, buffer, size, 0, True)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def is_eog(self, token: int) -> bool:
        """Return whether ``token`` ends a generation."""
        found: bool = not self._has_no_text and api.llama_vocab_is_eog(self._vocab, token)
        return found

    def is_control(self, token: int) -> bool:
        """Return whether ``token`` is a control token, that is: no text."""
        found: bool = not self._has_no_text and api.llama_vocab_is_control(self._vocab, token)
        return found

    def token_kind(self, token: int) -> str:
        """Return the kind of a token, as the file has it."""
        if self._has_no_text:
            return "unused"
        attribute = api.llama_vocab_get_attr(self._vocab, token)
        return next((kind for flag, kind in _KINDS if attribute & flag), "normal")

    def token_score(self, token: int) -> float | None:
        """Return the score of a token; vocabularies without scores have zeros in their files."""
        score: float | None = (
            api.llama_vocab_get_score(self._vocab, token) if self._has_scores else None
        )
        return score


class SpacePrefixTokenizer(LlamaTokenizer):
    """The tokenizer of a vocabulary that puts a space before each text (SentencePiece)."""

    def decode(self, tokens: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of ``tokens`` without the spaces that `encode` adds.

        The engine adds one at the start and after each token that splits the text.
        """
        pieces = []
        at_start = True
        for token in tokens:
            piece = self.token_bytes(token)
            if api.llama_vocab_get_attr(self._vocab, token) & _SPLIT_TEXT:
                at_start = True
                if skip_special and self.is_control(token):
                    continue
            elif at_start:
                piece = piece.removeprefix(b" ")
                at_start = False
            pieces.append(piece)
        return b"".join(pieces).decode("utf-8", "replace")


def open_tokenizer(vocab: int, chat_template: str | None) -> LlamaTokenizer:
    """Return the tokenizer of ``vocab``, of the kind that gives back the text it was given."""
    tokenizer = LlamaTokenizer(vocab, chat_template)
    if api.llama_vocab_type(vocab) == api.LLAMA_VOCAB_TYPE_NONE:
        return tokenizer
    pieces = map(
        tokenizer.token_bytes, tokenizer.encode("a", add_special=False, parse_special=False)
    )
    if b"".join(pieces).startswith(b" "):
        return SpacePrefixTokenizer(vocab, chat_template)
    return tokenizer
