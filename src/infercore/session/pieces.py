"""What a decode asks of each token, kept once it was asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from infercore.protocols.public import Tokenizer


class Piece(NamedTuple):
    """A token's bytes and kind."""

    data: bytes
    is_control: bool
    is_eog: bool


class Pieces(dict[int, Piece]):
    """The pieces of a vocabulary by token, filled as they are looked up.

    Asking the tokenizer takes three checked calls, and a decode asks once a token. Raises
    `InvalidTokenError` for an id outside the vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> Piece:
        ask = self._tokenizer
        piece = Piece(ask.token_bytes(token), ask.is_control(token), ask.is_eog(token))
        self[token] = piece
        return piece
