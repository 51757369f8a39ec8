"""Many texts at once, pairs, what is cut off; scores and kinds of tokens. On every engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
import infercore_models
import pack

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXTS = ["Once upon a time", "", "a baker"]


@pytest.fixture(scope="module")
def encoder(backend_name: str) -> Iterator[Any]:
    path = infercore_models.path("encoder", pack.FORMATS[backend_name])
    with ic.load_model(path, backend=backend_name) as loaded:
        yield loaded.tokenizer


def test_each_is_as_it_is_alone(model: Any) -> None:
    tokenizer = model.tokenizer
    for fields in ({}, {"add_special": False}, {"parse_special": False}):
        found = tokenizer.encode_many(TEXTS, **fields)
        assert found == [tokenizer.encode(text, **fields) for text in TEXTS]
    assert tokenizer.encode_many([]) == []


def test_pairs_stand_as_an_encoder_was_trained_on_them(encoder: Any) -> None:
    (found,) = encoder.encode_many([("the stone", "an owl")])
    first = encoder.encode("the stone", add_special=False)
    second = encoder.encode("an owl", add_special=False)
    cls, sep = 2, 3  # as the tokenizer.json of the pack has it
    assert found == [cls, *first, sep, *second, sep]
    assert encoder.sep == sep
    (plain,) = encoder.encode_many([("the stone", "an owl")], add_special=False)
    assert plain == [*first, *second]


def test_pairs_of_a_model_that_generates_begin_once(model: Any) -> None:
    tokenizer = model.tokenizer
    first, second = tokenizer.encode("the stone"), tokenizer.encode("an owl", add_special=False)
    assert tokenizer.encode_many([("the stone", "an owl")]) == [[*first, *second]]
    pair = [("the stone", "an owl")]
    assert tokenizer.encode_many(pair, max_tokens=1, truncation="right") == [[tokenizer.bos]]


def test_what_is_too_long_is_cut_where_that_was_asked_for(encoder: Any) -> None:
    text = "the little baker and the fox"
    whole = encoder.encode(text)
    n = len(whole) - 2
    with pytest.raises(ic.InvalidInputError, match="truncation") as caught:
        encoder.encode_many(["an owl", text], max_tokens=n)
    assert caught.value.value == 1
    (right,) = encoder.encode_many([text], max_tokens=n, truncation="right")
    for few in (1, np.uint8(1)):  # an unsigned byte, less the marks around a text, is no 255
        with pytest.raises(ic.InvalidInputError, match="no room"):
            encoder.encode_many([text], max_tokens=few, truncation="right")
    (left,) = encoder.encode_many([text], max_tokens=n, truncation="left")
    assert right == [*whole[: n - 1], whole[-1]]
    assert left == [whole[0], *whole[3:]]
    assert encoder.encode_many([text], max_tokens=n + 2) == [whole]


def test_of_a_pair_the_longer_gives_way(encoder: Any) -> None:
    long, short = "the little baker and the fox", "an owl"
    first = encoder.encode(long, add_special=False)
    second = encoder.encode(short, add_special=False)
    (found,) = encoder.encode_many([(long, short)], max_tokens=len(second) + 6, truncation="right")
    assert found == [2, *first[:3], 3, *second, 3][: len(second) + 6]
    assert found[-len(second) - 1 :] == [*second, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"texts": "one text"},
        {"texts": [("a", "b", "c")]},
        {"texts": [5]},
        {"texts": [()]},
        {"texts": ["a"], "max_tokens": 0},
        {"texts": ["a"], "truncation": "middle"},
        {"texts": ["a b c"], "max_tokens": 1, "truncation": "right"},
    ],
)
def test_bad_input_is_refused(encoder: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ic.InvalidInputError):
        encoder.encode_many(**wrong)


def test_kinds_and_scores(model: Any, encoder: Any) -> None:
    tokenizer = model.tokenizer
    kinds = {tokenizer.token_kind(token) for token in range(tokenizer.n_vocab)}
    assert "normal" in kinds
    for token in range(tokenizer.n_vocab):
        assert (tokenizer.token_kind(token) == "control") is tokenizer.is_control(token)
    assert tokenizer.token_score(7) is None  # merges have ranks
    assert encoder.token_kind(3) == "control"
    for wrong in (-1, tokenizer.n_vocab, "a"):
        with pytest.raises(ic.InvalidTokenError):
            tokenizer.token_kind(wrong)
        with pytest.raises(ic.InvalidTokenError):
            tokenizer.token_score(wrong)


def test_both_engines_agree() -> None:
    found = []
    for backend, form in pack.FORMATS.items():
        pack.need_backend(backend)
        with ic.load_model(infercore_models.path("storyteller", form), backend=backend) as model:
            tokenizer = model.tokenizer
            kinds = [tokenizer.token_kind(token) for token in range(tokenizer.n_vocab)]
            found.append((kinds, tokenizer.sep, tokenizer.pad))
    assert found[0] == found[1]
