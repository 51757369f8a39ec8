from __future__ import annotations

import gc
import random
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest

import infercore as ic
import pack
from infercore.session.pieces import Pieces, pieces_of


def test_each_token_is_asked_once() -> None:
    asked: list[int] = []

    def token_bytes(token: int) -> bytes:
        asked.append(token)
        return bytes([token])

    class Asked(SimpleNamespace):  # it can be referred to weakly
        pass

    tokenizer: Any = Asked(
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


def test_sessions_of_a_model_share_what_they_asked(toy: Any) -> None:
    with toy.new_session(n_ctx=16) as one, toy.new_session(n_ctx=16) as two:
        assert one.pieces is two.pieces
        one.ensure_prefix("a")
        list(one.decode(max_tokens=2))
        assert two.pieces


def test_no_tokenizer_is_kept_by_what_was_asked() -> None:
    tokenizer = SpacePrefix()
    gone = ref(tokenizer)
    assert pieces_of(tokenizer)[1] == pieces_of(tokenizer)[1]
    del tokenizer
    gc.collect()
    assert gone() is None


class SpacePrefix:
    """The tokenizer of a vocabulary that puts a space behind each token that splits a text."""

    TEXTS = ("a", " th", "<s>", "     th", " ", "<u>")

    def token_bytes(self, token):
        return self.TEXTS[token].encode()

    def is_control(self, token):
        return self.TEXTS[token] == "<s>"

    def is_eog(self, token):
        return False

    def decode(self, tokens, *, skip_special=False):
        shown, at_start = [], True
        for token in tokens:
            text = self.TEXTS[token]
            if text in {"<s>", "<u>"}:
                at_start = True
                if skip_special and text == "<s>":
                    continue
            elif at_start:
                text, at_start = text.removeprefix(" "), False
            shown.append(text)
        return "".join(shown)


@pytest.mark.parametrize("skip_special", [True, False])
def test_a_stream_shows_what_decode_says(skip_special):
    tokenizer = SpacePrefix()
    pieces, generator = Pieces(tokenizer), random.Random(0)
    for _ in range(300):
        tokens = [0, *(generator.randrange(len(tokenizer.TEXTS)) for _ in range(6))]
        shown = [
            pieces.shown(token, before)
            for before, token in zip([None, *tokens], tokens, strict=False)
            if not (skip_special and tokenizer.is_control(token))
        ]
        assert b"".join(shown).decode() == tokenizer.decode(tokens, skip_special=skip_special)


def test_a_decode_shows_what_the_tokenizer_says(monkeypatch):
    """Forced tokens: in the stream stood five spaces, and four in the tokenizer's text."""
    pack.need_backend("llamacpp")
    tokenizer = SpacePrefix()
    with ic.load_model(pack.model_path("llamacpp"), check_in_child=False) as model:
        guarded, forced = model.tokenizer, [1, 2, 3, 0, 1]
        for name in ("token_bytes", "is_control", "is_eog"):
            monkeypatch.setattr(guarded, name, lambda t, name=name: getattr(tokenizer, name)(t % 6))
        monkeypatch.setattr(guarded, "decode", lambda ts, **k: tokenizer.decode(ts, **k))
        left = iter(forced)

        def only(ids, logits):
            row = logits.copy()
            row[:] = -1e9
            row[next(left)] = 0
            return row

        with model.new_session(n_ctx=64) as session:
            session.ensure_prefix([7, 8])
            text = "".join(chunk.text for chunk in session.decode(max_tokens=5, processors=[only]))
    assert text == " th    tha th"
