"""Text to ids and back."""

from __future__ import annotations

import pytest

import infercore as ic

TEXTS = [
    "",
    " ",
    "Once upon a time",
    "  two  spaces\n\n\ttab",
    "é 😀 日本語 \x00 nul",
    "<|im_start|>user\nhi<|im_end|>",
    "x" * 5000,
]


def text_of(tokenizer, tokens):
    return b"".join(map(tokenizer.token_bytes, tokens)).decode()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("parse_special", [True, False])
def test_decoding_gives_the_text_back(story, text, parse_special):
    tokens = story.tokenizer.encode(text, add_special=False, parse_special=parse_special)
    assert text_of(story.tokenizer, tokens) == text


def test_special_tokens_are_added_and_parsed_only_when_asked(story):
    tokenizer = story.tokenizer
    text = "<|im_end|>"
    assert tokenizer.encode(text, add_special=True, parse_special=True) == [
        tokenizer.bos,
        tokenizer.eot,
    ]
    plain = tokenizer.encode(text, add_special=False, parse_special=False)
    assert tokenizer.eot not in plain
    assert len(plain) > 1


def test_special_ids_and_kinds(story):
    tokenizer = story.tokenizer
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eot) == (0, 1, 3)
    assert tokenizer.add_bos
    assert tokenizer.n_vocab == 1024
    assert [t for t in range(tokenizer.n_vocab) if tokenizer.is_eog(t)] == [1, 3]
    assert [t for t in range(tokenizer.n_vocab) if tokenizer.is_control(t)] == [0, 1, 2, 3]
    assert tokenizer.token_bytes(3) == b"<|im_end|>"
    assert "messages" in tokenizer.chat_template


def test_a_model_without_vocabulary_refuses_text(tiny):
    tokenizer = tiny("llama").tokenizer
    with pytest.raises(ic.UnsupportedFeatureError, match="no vocabulary"):
        tokenizer.encode("text", add_special=True, parse_special=True)
    assert tokenizer.token_bytes(5) == b""
    assert not tokenizer.is_eog(5)
    assert tokenizer.bos is None


def test_sentencepiece_gives_back_the_text_without_the_added_space(story, monkeypatch):
    from infercore_llamacpp.tokenizer import SpacePrefixTokenizer, api

    pieces = {1: b" a", 2: b"<s>", 3: b" ", 4: b" b"}
    tokenizer = SpacePrefixTokenizer(story.vocab, None)
    monkeypatch.setattr(tokenizer, "token_bytes", pieces.__getitem__)
    monkeypatch.setattr(tokenizer, "is_control", lambda token: token == 2)
    monkeypatch.setattr(api, "llama_vocab_get_attr", lambda _, token: 8 if token == 2 else 1 << 2)
    assert tokenizer.decode([1, 4, 2, 4, 3], skip_special=False) == "a b<s>b "
    assert tokenizer.decode([2, 3, 4], skip_special=True) == " b"


def test_a_text_may_have_more_tokens_than_bytes(story, monkeypatch):
    """Some vocabularies spell a character out: the engine says then how much room it wants."""
    from infercore_llamacpp import tokenizer

    own, rooms = tokenizer.api.llama_tokenize, []
    flags = {"add_special": True, "parse_special": False}
    expected = story.tokenizer.encode("a dog", **flags)

    def tokenize(vocab, data, n_bytes, tokens, room, *how):
        rooms.append(room)
        return own(vocab, data, n_bytes, tokens, room, *how) if room >= 100 else -100

    monkeypatch.setattr(tokenizer.api, "llama_tokenize", tokenize)
    assert story.tokenizer.encode("a dog", **flags) == expected
    assert rooms == [len("a dog") + 8, 100]
