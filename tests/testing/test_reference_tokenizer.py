from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infercore.testing.reference_tokenizer import byte_alphabet


def test_golden_prompts(reference_model, golden):
    for prompt in golden.prompts:
        tokens = reference_model.tokenizer.encode(prompt.text)
        assert tuple(tokens) == prompt.tokens
        assert reference_model.tokenizer.decode(tokens, skip_special=False).endswith(prompt.text)


@given(text=st.text(max_size=60))
def test_bytes_come_back(reference_model, text):
    tokenizer = reference_model.tokenizer
    tokens = tokenizer.encode(text, add_special=False, parse_special=False)
    assert b"".join(map(tokenizer.token_bytes, tokens)) == text.encode()
    assert tokenizer.decode(tokens) == text
    assert not any(map(tokenizer.is_control, tokens))


def test_control_tokens(reference_model):
    tokenizer = reference_model.tokenizer
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eot) == (0, 1, 3)
    assert [t for t in range(tokenizer.n_vocab) if tokenizer.is_control(t)] == [0, 1, 2, 3]
    assert [t for t in range(tokenizer.n_vocab) if tokenizer.is_eog(t)] == [1, 3]
    assert tokenizer.token_bytes(3) == b"<|im_end|>"
    text = "a<|im_end|>"
    assert tokenizer.encode(text, add_special=False)[-1] == 3
    assert 3 not in tokenizer.encode(text, parse_special=False)
    assert tokenizer.encode("") == [0]
    assert tokenizer.encode("", add_special=False) == []


def test_the_template_is_rendered(reference_model):
    text = reference_model.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_the_alphabet_names_each_byte():
    alphabet = byte_alphabet()
    assert set(alphabet.values()) == set(range(256))
    assert [alphabet[chr(0x100 + i)] for i in (0, 32, 33, 66, 67)] == [0, 32, 127, 160, 173]
    assert (alphabet["A"], alphabet["Ġ"], alphabet["Ċ"]) == (65, 32, 10)
    assert all(len(character) == 1 for character in alphabet)


def test_every_token_has_bytes(reference_model):
    tokenizer = reference_model.tokenizer
    pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.n_vocab)]
    assert all(pieces)
    assert len(set(pieces)) == len(pieces)


@pytest.mark.parametrize("token", [-1, 1024])
def test_ids_end_with_the_vocabulary(reference_model, token):
    with pytest.raises(ValueError, match="vocabulary"):
        reference_model.tokenizer.token_bytes(token)
