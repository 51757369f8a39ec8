from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import infercore as ic
from infercore.session.pieces import Pieces


def test_each_token_is_asked_once() -> None:
    asked: list[int] = []

    def token_bytes(token: int) -> bytes:
        asked.append(token)
        return bytes([token])

    tokenizer: Any = SimpleNamespace(
        token_bytes=token_bytes, is_control=lambda t: t == 1, is_eog=lambda t: t == 2
    )
    pieces = Pieces(tokenizer)
    for _ in range(3):
        assert pieces[1] == (b"\1", True, False)
        assert pieces[2] == (b"\2", False, True)
    assert asked == [1, 2]


def test_a_token_outside_the_vocabulary_is_refused_each_time(toy: Any) -> None:
    pieces = Pieces(toy.tokenizer)
    for bad in (-1, toy.tokenizer.n_vocab, toy.tokenizer.n_vocab):
        with pytest.raises(ic.InvalidTokenError):
            pieces[bad]
    assert len(pieces) == 0
