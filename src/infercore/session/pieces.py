"""What a decode asks of each token, kept once it was asked."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

from infercore.sampling.per_tokenizer import PerTokenizer

if TYPE_CHECKING:
    from infercore.protocols.public import Tokenizer


class Piece(NamedTuple):
    """A token's bytes and kind."""

    data: bytes
    is_control: bool
    is_eog: bool


class Pieces(dict[int, Piece]):
    """The pieces of a vocabulary by token, filled as they are looked up; threads may share it.

    Asking the tokenizer takes three checked calls, and a decode asks once a token. Raises
    `InvalidTokenError` for an id outside the vocabulary. Whoever uses it keeps the tokenizer, which
    it does not.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = weakref.proxy(tokenizer)
        self.strips: bool | None = None
        """Whether the vocabulary puts a space before each text; None where nobody asked yet."""
        self._splits: dict[int, bool] = {}

    def __missing__(self, token: int) -> Piece:
        ask = self._tokenizer
        piece = Piece(ask.token_bytes(token), ask.is_control(token), ask.is_eog(token))
        self[token] = piece
        return piece

    def shown(self, token: int, previous: int | None) -> bytes:
        """Return the bytes that `Tokenizer.decode` shows of ``token`` behind ``previous``.

        Vocabularies that put a space before each text put one behind each token that splits it,
        and take it away again.
        """
        data = self[token].data
        if previous is None or self.strips is False or not data.startswith(b" "):
            return data
        if self.strips is None:
            self.strips = self._text(token) != data.decode("utf-8", "replace")
        if previous not in self._splits:
            behind = self._text(previous) + data[1:].decode("utf-8", "replace")
            self._splits[previous] = self._text(previous, token) == behind
        return data[1:] if self._splits[previous] else data

    def _text(self, *tokens: int) -> str:
        text: str = self._tokenizer.decode(tokens)
        return text


pieces_of = PerTokenizer(Pieces)
"""The pieces that all sessions of a tokenizer share."""
