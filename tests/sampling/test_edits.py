from __future__ import annotations

import numpy as np
import pytest

from infercore.sampling.edits import apply_bias, apply_penalties
from infercore.sampling.history import TokenHistory


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def penalised(logits, tokens, *, repeat=1.0, frequency=0.0, presence=0.0):
    window = np.array(tokens, dtype=np.int32)
    counts = np.bincount(window, minlength=logits.size)[window].astype(np.int32)
    apply_penalties(logits, window, counts, repeat=repeat, frequency=frequency, presence=presence)
    return logits.tolist()


def test_bias_adds_and_forbids():
    logits = row(1, 2, -np.inf)
    apply_bias(logits, np.array([0, 1, 2]), row(0.5, -np.inf, 5))
    assert logits.tolist() == [1.5, -np.inf, -np.inf]


def test_the_repeat_penalty_divides_above_zero_and_multiplies_below():
    assert penalised(row(4, -4, 0, 4), [0, 0, 1, 2], repeat=2.0) == [2, -8, 0, 4]


def test_frequency_counts_and_presence_does_not():
    logits = penalised(row(4, 4, 4), [0, 0, 0, 1], frequency=0.5, presence=1.0)
    assert logits == [1.5, 2.5, 4]


def test_all_penalties_together_in_their_order():
    assert penalised(row(4), [0, 0], repeat=2.0, frequency=0.25, presence=0.5) == [1.0]


def test_an_empty_window_and_minus_infinity_stay():
    assert penalised(row(1, -np.inf), [], repeat=2.0) == [1, -np.inf]
    assert penalised(row(1, -np.inf), [1], repeat=2.0, presence=-1) == [1, -np.inf]


@pytest.mark.parametrize("window", [-1, 0, 1, 3, 64])
def test_history_counts_its_window_only(window):
    tokens = np.random.default_rng(1).integers(0, 7, 700).tolist()
    history = TokenHistory(7, window)
    history.extend(tokens[:2])
    for token in tokens[2:690]:
        history.extend([token])
    assert_counts(history, tokens[:690], window)
    history.extend([])
    history.extend(tokens[690:])
    assert_counts(history, tokens, window)


def assert_counts(history, tokens, window):
    seen = tokens if window < 0 else tokens[len(tokens) - window :]
    assert history.last(window).tolist() == seen
    assert history.last(-1).tolist() == tokens
    if window:
        assert history.counts(np.arange(7)).tolist() == np.bincount(seen, minlength=7).tolist()


def test_history_copies_are_independent_and_clear_forgets():
    history = TokenHistory(3, -1)
    history.extend([0, 1])
    twin = history.copy()
    twin.extend([2])
    assert (len(history), len(twin)) == (2, 3)
    assert history.counts(np.array([2])).tolist() == [0]
    twin.clear()
    assert len(twin) == 0
    assert twin.counts(np.arange(3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [2**31, 2**63, -(2**63), 1e300, -1e300])
def test_penalties_beyond_what_a_row_can_hold(value):
    row = np.array([1.0, -2.0, 3.0, -np.inf], dtype=np.float32)
    window, counts = np.array([0, 3]), np.array([2, 1], dtype=np.int32)
    apply_penalties(row, window, counts, repeat=1.0, frequency=value, presence=value)
    assert np.argmax(row) == (2 if value > 0 else 0)
    assert not np.isnan(row).any()
    assert row.max() < np.inf
    assert row[3] == -np.inf
