from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infercore.sampling.dry import apply_dry, compile_breakers, repeat_lengths

A, B, C, Y, NEWLINE = b"abcy\n"


def lowered(tokenizer, text, breakers=("\n",), **fields):
    """Return by how much each byte's logit fell after ``text``."""
    options = {"multiplier": 0.5, "base": 2.0, "allowed_length": 2, **fields}
    logits = np.zeros(tokenizer.n_vocab, dtype=np.float32)
    window = np.frombuffer(text, dtype=np.uint8).astype(np.int32)
    apply_dry(logits, window, compile_breakers(tokenizer, breakers, tokenizer.n_vocab), **options)
    return {chr(token): -float(logits[token]) for token in np.flatnonzero(logits)}


def test_longer_repetitions_cost_more(tokenizer):
    # after "abc": "abc" stood before c, "bc" before y, "c" before b
    assert lowered(tokenizer, b"abccbcyabc") == {"c": 1.0, "y": 0.5}
    assert lowered(tokenizer, b"abccbcyabc", allowed_length=1) == {"b": 0.5, "c": 2.0, "y": 1.0}


def test_an_allowed_length_of_zero_punishes_all_that_followed_anything(tokenizer):
    assert lowered(tokenizer, b"abcy", allowed_length=0) == {"b": 0.5, "c": 0.5, "y": 0.5}


def test_the_longest_repetition_counts(tokenizer):
    # before y stood "bc" and, overlapping the end, "bcyabc": 6 tokens
    assert lowered(tokenizer, b"bcyabcyabc") == {"y": 8.0}
    # the longer one, "abc", may also be the earlier one
    assert lowered(tokenizer, b"abcyxbcyabc") == {"y": 1.0}


def test_a_breaker_ends_the_repetition(tokenizer):
    assert lowered(tokenizer, b"xab\ncdyxab\ncd", ()) == {"y": 8.0}
    assert lowered(tokenizer, b"xab\ncdyxab\ncd") == {"y": 0.5}
    assert lowered(tokenizer, b"ab\nab\n") == {}


def test_a_breaker_itself_is_not_punished(tokenizer):
    assert lowered(tokenizer, b"ab\nab", ()) == {"\n": 0.5}
    assert lowered(tokenizer, b"ab\nab") == {}


def test_a_breaker_over_several_tokens(tokenizer):
    assert lowered(tokenizer, b"aSTbcyaSTbc", ()) == {"y": 4.0}
    assert lowered(tokenizer, b"aSTbcyaSTbc", ("ST",)) == {"y": 0.5}
    assert lowered(tokenizer, b"aSxbcyaSxbc", ("ST",)) == {"y": 4.0}


def test_a_breaker_inside_a_longer_token(make_tokenizer):
    tokenizer = make_tokenizer([b"x\ny", b"aS"])
    found = compile_breakers(tokenizer, ("\n", "STU"), tokenizer.n_vocab)
    assert np.flatnonzero(found.single).tolist() == [10, 256]
    assert found.tails[257] == ((ord("T"), ord("U")),)
    assert found.heads[[10, 256, 257, ord("S")]].all()


def test_a_rest_that_cuts_a_character_is_left_out(tokenizer):
    found = compile_breakers(tokenizer, ("\u00e4",), tokenizer.n_vocab)
    assert not found.heads.any()


def test_it_is_off_where_llama_cpp_has_it_off(tokenizer):
    assert lowered(tokenizer, b"abcabc", multiplier=0.0) == {}
    assert lowered(tokenizer, b"abcabc", base=0.9) == {}
    assert lowered(tokenizer, b"ab", allowed_length=2) == {}


def test_the_penalty_never_overflows(tokenizer):
    punished = lowered(tokenizer, b"a" * 2000, base=1.75)["a"]
    assert 1e37 < punished < np.inf


def test_breakers_are_compiled_once_for_each_tokenizer(tokenizer, make_tokenizer):
    first = compile_breakers(tokenizer, ("x",), 259)
    assert compile_breakers(tokenizer, ("x",), 259) is first
    assert compile_breakers(tokenizer, ("z",), 259) is not first
    assert compile_breakers(make_tokenizer(), ("x",), 259) is not first


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    limit=st.integers(0, 50),
)
def test_repeat_lengths_against_their_definition(tokens, limit):
    window = np.array(tokens, dtype=np.int32)
    for place, length in enumerate(repeat_lengths(window, limit)):
        true = 0
        while true <= place and tokens[place - true] == tokens[-1 - true]:
            true += 1
        assert length == min(true, limit)


@pytest.mark.parametrize("size", [1, 2])
def test_short_windows(tokenizer, size):
    assert lowered(tokenizer, b"aa"[:size], allowed_length=0) == ({"a": 1.0} if size == 2 else {})
