from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infercore.engine import arguments
from infercore.errors import (
    InvalidInputError,
    InvalidPositionError,
    InvalidSequenceError,
    InvalidTokenError,
)

N_VOCAB = 100
NOT_INTEGERS = [None, True, False, "1", 1.0, 1.5, float("nan"), [1], object()]


@pytest.mark.parametrize("value", [0, 99, np.int64(7), np.uint8(7)])
def test_a_token_becomes_a_plain_int(value):
    assert arguments.check_token(value, N_VOCAB) == int(value)
    assert type(arguments.check_token(value, N_VOCAB)) is int


@pytest.mark.parametrize("value", [*NOT_INTEGERS, -1, 100, 2**31, 2**70, -(2**70)])
def test_a_wrong_token_is_refused_with_the_bounds(value):
    with pytest.raises(InvalidTokenError) as caught:
        arguments.check_token(value, N_VOCAB)
    assert caught.value.field == "token"
    assert caught.value.allowed == (0, 99)


@pytest.mark.parametrize(
    "value",
    [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], np.uint64), range(1, 3), iter([1, 2])],
)
def test_tokens_become_int32(value):
    found = arguments.check_tokens(value, N_VOCAB)
    assert found.dtype == np.int32
    assert found.tolist() == [1, 2]


@pytest.mark.parametrize("value", [[], (), np.array([]), range(0)])
def test_no_tokens_are_tokens(value):
    assert arguments.check_tokens(value, N_VOCAB).shape == (0,)


@pytest.mark.parametrize(
    "value",
    [
        "text", b"bytes", 5, None, [[1, 2]], [1, [2]], np.zeros((2, 2), int),
        [1, -1], [1, 100], [2**31], [2**63], [2**64], [2**80], [-(2**70)], [1.0], [1, 2.5], [None],
        [1, None], [True, False], [1, True], ["1"], [float("nan")], np.array([1.0]), [object()],
    ],
)  # fmt: skip
def test_wrong_tokens_are_refused(value):
    with pytest.raises(InvalidInputError):
        arguments.check_tokens(value, N_VOCAB)


@pytest.mark.parametrize(
    ("value", "bad"), [([1, -3], -3), ([1, 200], 200), (np.array([5, 300]), 300)]
)
def test_the_error_names_the_wrong_token(value, bad):
    with pytest.raises(InvalidTokenError) as caught:
        arguments.check_tokens(value, N_VOCAB)
    assert caught.value.value == bad


@given(st.lists(st.integers()))
def test_tokens_are_taken_exactly_when_all_are_in_the_vocabulary(values):
    if all(0 <= value < N_VOCAB for value in values):
        assert arguments.check_tokens(values, N_VOCAB).tolist() == values
    else:
        with pytest.raises(InvalidTokenError):
            arguments.check_tokens(values, N_VOCAB)


def test_sequences_are_bounded():
    assert arguments.check_sequence(np.int32(3), 4) == 3
    for value in (*NOT_INTEGERS, -1, 4, 2**40):
        with pytest.raises(InvalidSequenceError) as caught:
            arguments.check_sequence(value, 4, "dst")
        assert caught.value.field == "dst"


@pytest.mark.parametrize(
    ("p0", "p1", "expected"),
    [
        (-1, -1, (0, arguments.MAX_POSITION)),
        (3, -1, (3, arguments.MAX_POSITION)),
        (-1, 5, (0, 5)),
        (2, 2, (2, 2)),
        (np.int64(1), np.int64(4), (1, 4)),
    ],
)
def test_ranges_are_half_open_with_open_ends(p0, p1, expected):
    assert arguments.check_range(p0, p1) == expected


@pytest.mark.parametrize("pair", [(3, 2), (-2, 1), (0, -2), *((v, 1) for v in NOT_INTEGERS)])
def test_wrong_ranges_are_refused(pair):
    with pytest.raises(InvalidPositionError):
        arguments.check_range(*pair)


def test_modes_flags_and_positions():
    assert arguments.check_logits_mode("all") == "all"
    for value in ("first", None, 1, ["all"]):
        with pytest.raises(InvalidInputError):
            arguments.check_logits_mode(value)
    for value in (0, 1, None, "yes"):
        with pytest.raises(InvalidInputError):
            arguments.check_bool("on", value)
    for value in (*NOT_INTEGERS, -1):
        with pytest.raises(InvalidPositionError):
            arguments.check_position(value, "n_past")
