from __future__ import annotations

import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infercore.errors import UnsupportedFeatureError
from infercore.testing import load_toy_model, toy
from infercore.testing.toy import BOS, EOS, EOT, ToyTokenizer, toy_logits

TOKENIZER = ToyTokenizer()


def test_it_is_small():
    assert len(inspect.getsource(toy).splitlines()) < 300


@given(st.text(max_size=40))
def test_bytes_come_back(text):
    tokens = TOKENIZER.encode(text, add_special=False, parse_special=False)
    assert b"".join(map(TOKENIZER.token_bytes, tokens)) == text.encode()
    assert max(tokens, default=0) < TOKENIZER.n_vocab


def test_control_tokens_and_merges():
    assert TOKENIZER.encode("<|end|>", add_special=True, parse_special=True) == [BOS, EOT]
    assert EOT not in TOKENIZER.encode("<|end|>", add_special=False, parse_special=False)
    assert TOKENIZER.encode("the é", add_special=False, parse_special=False) == [259, 260]
    assert [TOKENIZER.is_eog(t) for t in (BOS, EOS, EOT, 65)] == [False, True, True, False]


def test_a_character_may_be_split_over_tokens():
    tokens = TOKENIZER.encode("😀", add_special=False, parse_special=False)
    assert [TOKENIZER.token_bytes(t) for t in tokens] == [b"\xf0\x9f", b"\x98\x80"]


def test_logits_depend_on_every_token_and_position():
    base = toy_logits([1, 2, 3])
    assert np.array_equal(base, toy_logits([1, 2, 3]))
    for other in (([0, 2, 3],), ([1, 2, 4],), ([1, 2],), ([2, 1, 3],), ([1, 2, 3], [0, 1, 3])):
        assert not np.array_equal(base, toy_logits(*other))
    assert base.dtype == np.float32
    assert base.shape == (TOKENIZER.n_vocab,)
    assert np.isfinite(base).all()


def test_a_session_runs_on_it():
    with load_toy_model() as model, model.new_session(n_ctx=200) as session:
        session.ensure_prefix("Hello 😀")
        text = "".join(chunk.text for chunk in session.decode(max_tokens=50))
        assert text


@pytest.mark.parametrize(
    "fields", [{"n_seq_max": 2}, {"embeddings": True}, {"type_k": "f32"}, {"swa_full": True}]
)
def test_options_are_refused(fields):
    with load_toy_model() as model, pytest.raises(UnsupportedFeatureError):
        model.new_context(**fields)


def test_one_sequence_may_be_asked_for():
    with load_toy_model() as model, model.new_context(n_seq_max=1, n_batch=3) as context:
        assert context.n_batch == 3
