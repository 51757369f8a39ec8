from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infercore.sampling import steps
from infercore.sampling.candidates import Candidates, gather, softmax


def of(*probabilities: float) -> Candidates:
    return Candidates(np.arange(len(probabilities)), np.log(probabilities))


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def ids(kept: Candidates) -> list[int]:
    return kept.ids.tolist()


SETS = st.lists(st.integers(1, 1000), min_size=1, max_size=60).map(
    lambda weights: of(*(np.array(weights) / sum(weights)))
)
SHARES = st.floats(0.01, 0.99)
KEEP = st.integers(0, 5)


def test_top_n_sigma_by_hand():
    # mean 2, population variance (4 + 1 + 0 + 1 + 4) / 5 = 2; bound 4 - 1.3 * 1.414 = 2.16
    logits = row(0, 1, 2, 3, 4, -np.inf)
    assert ids(steps.top_n_sigma(logits, 1.3)) == [3, 4]
    assert ids(steps.top_n_sigma(logits, 1.5)) == [2, 3, 4]
    assert ids(steps.top_n_sigma(logits, -1)) == [0, 1, 2, 3, 4]


def test_top_k_by_hand():
    assert ids(steps.top_k(row(1, 5, 3, 5, 4), 3)) == [1, 3, 4]
    assert ids(steps.top_k(row(2, 2, 2), 2)) == [0, 1]
    assert ids(steps.top_k(row(1, -np.inf, -np.inf), 2)) == [0]
    assert ids(steps.top_k(row(1, 2), 0)) == [0, 1]
    assert ids(steps.top_k_of(of(0.2, 0.5, 0.3), 2)) == [1, 2]


def test_typical_by_hand():
    # H = 1.0297 nats for these; |-ln p - H| = 0.336, 0.174, 0.579, 1.966: order 1, 0, 2, 3
    kept = of(0.5, 0.3, 0.15, 0.05)
    assert ids(steps.typical(kept, 0.25, 1)) == [1]
    assert ids(steps.typical(kept, 0.31, 1)) == [0, 1]
    assert ids(steps.typical(kept, 0.25, 3)) == [0, 1, 2]
    assert ids(steps.typical(kept, 1.0, 1)) == [0, 1, 2, 3]


def test_typical_may_drop_the_most_likely():
    assert 0 not in ids(steps.typical(of(0.4, *[0.1] * 6), 0.3, 1))


def test_top_p_by_hand():
    kept = of(0.1, 0.5, 0.15, 0.25)
    assert ids(steps.top_p(kept, 0.5, 1)) == [1]
    assert ids(steps.top_p(kept, 0.51, 1)) == [1, 3]
    assert ids(steps.top_p(kept, 0.1, 3)) == [1, 2, 3]
    assert ids(steps.top_p(kept, 0.0, 0)) == [1]
    assert ids(steps.top_p(kept, 0.1, 99)) == [0, 1, 2, 3]


def test_min_p_by_hand():
    kept = of(0.5, 0.26, 0.2, 0.04)
    assert ids(steps.min_p(kept, 0.5, 1)) == [0, 1]
    assert ids(steps.min_p(kept, 0.39, 1)) == [0, 1, 2]
    assert ids(steps.min_p(kept, 1.0, 0)) == [0]
    assert ids(steps.min_p(kept, 0.9, 3)) == [0, 1, 2]


def test_xtc_by_hand():
    kept = of(0.2, 0.4, 0.3, 0.1)
    assert ids(steps.xtc(kept, 0.3, 0.5, 0.15, 1)) == [0, 3]
    assert ids(steps.xtc(kept, 0.3, 0.5, 0.25, 1)) == [0, 2, 3]
    assert ids(steps.xtc(kept, 0.5, 0.5, 0.25, 1)) == [0, 2, 3]
    assert ids(steps.xtc(kept, 0.51, 0.5, 0.25, 1)) == [0, 1, 2, 3]
    assert ids(steps.xtc(kept, 0.0, 1.0, 0.35, 1)) == [0, 1, 2, 3]
    assert ids(steps.xtc(kept, 0.0, 1.0, 0.15, 3)) == [0, 1, 2, 3]
    assert ids(steps.xtc(kept, 0.0, 1.0, 0.15, 2)) == [0, 3]


def test_xtc_above_a_half_is_off():
    assert ids(steps.xtc(of(0.5, 0.5), 0.0, 1.0, 0.5, 1)) == [1]
    assert ids(steps.xtc(of(0.5, 0.5), 0.0, 1.0, 0.500001, 1)) == [0, 1]


def test_temperature_by_hand():
    assert softmax(steps.temperature(of(0.8, 0.2), 2.0).logits) == pytest.approx([2 / 3, 1 / 3])
    assert ids(steps.temperature(of(0.2, 0.4, 0.4), 0.0)) == [1]


def test_the_smallest_temperature_is_the_most_likely_token():
    assert ids(steps.temperature(of(0.3, 0.7), 5e-324)) == [1]


def test_dynamic_degree_by_hand():
    assert steps.dynamic_degree(of(0.25, 0.25, 0.25, 0.25), 1.0, 0.4, 1.0) == pytest.approx(1.4)
    # H / log 2 of (0.9, 0.1) = 0.468996
    degree = steps.dynamic_degree(of(0.9, 0.1), 0.5, 0.8, 2.0)
    assert degree == pytest.approx(1.3 * 0.468996**2, rel=1e-5)
    assert steps.dynamic_degree(of(1.0), 0.5, 0.4, 1.0) == 0.5
    assert steps.dynamic_degree(of(0.9, 0.1), 0.5, 0.0, 1.0) == 0.5


@pytest.mark.parametrize("spread", [0.5, 1e308])
@pytest.mark.parametrize("exponent", [0.0, 1.0, 1e308])
def test_a_dynamic_degree_is_a_finite_number(spread, exponent):
    for n in range(2, 40):  # the entropy of n equal ones may come out above log(n)
        kept = Candidates(np.arange(n), np.zeros(n))
        assert 0 <= steps.dynamic_degree(kept, 1e308, spread, exponent) < np.inf


@given(kept=SETS, p=SHARES, min_keep=KEEP)
def test_top_p_is_the_smallest_set_that_reaches_p(kept, p, min_keep):
    probabilities = softmax(kept.logits)
    chosen = steps.top_p(kept, p, min_keep).ids
    mass = probabilities[chosen].sum()
    assert mass >= p - 1e-9 or chosen.size == kept.ids.size
    if chosen.size > max(min_keep, 1):
        assert mass - probabilities[chosen].min() < p + 1e-9
    left_out = np.setdiff1d(kept.ids, chosen)
    if left_out.size:
        assert probabilities[left_out].max() <= probabilities[chosen].min()


@given(kept=SETS, p=SHARES)
def test_min_p_is_a_threshold(kept, p):
    probabilities = softmax(kept.logits)
    bound = p * probabilities.max()
    chosen = np.isin(kept.ids, steps.min_p(kept, p, 1).ids)
    assert (probabilities[chosen] >= bound * (1 - 1e-9)).all()
    assert (probabilities[~chosen] <= bound * (1 + 1e-9)).all()


@given(kept=SETS, p=SHARES, min_keep=KEEP)
@pytest.mark.parametrize("step", [steps.top_p, steps.typical, steps.min_p])
def test_truncation_keeps_some_in_order_with_their_logits(step, kept, p, min_keep):
    left = step(kept, p, min_keep)
    assert left.ids.size >= max(1, min(min_keep, kept.ids.size))
    assert (np.diff(left.ids) > 0).all()
    assert np.array_equal(left.logits, kept.logits[left.ids])


@given(kept=SETS, p=SHARES, q=SHARES)
def test_truncation_is_monotonic(kept, p, q):
    low, high = sorted((p, q))
    assert set(ids(steps.top_p(kept, low, 1))) <= set(ids(steps.top_p(kept, high, 1)))
    assert set(ids(steps.typical(kept, low, 1))) <= set(ids(steps.typical(kept, high, 1)))
    assert set(ids(steps.min_p(kept, high, 1))) <= set(ids(steps.min_p(kept, low, 1)))


@given(kept=SETS, threshold=SHARES)
def test_xtc_leaves_one_token_that_reached_the_threshold(kept, threshold):
    before = softmax(kept.logits) >= threshold
    left = steps.xtc(kept, 0.0, 1.0, threshold, 0).ids
    assert before[left].sum() == (before.sum() if threshold > 0.5 else min(1, before.sum()))


def test_top_p_of_a_whole_vocabulary_equals_the_plain_sort():
    logits = np.random.default_rng(2).standard_normal(20_000).astype(np.float32) * 4
    kept = gather(logits)
    probabilities = softmax(kept.logits)
    order = np.argsort(-probabilities, kind="stable")
    n_keep = int(np.searchsorted(np.cumsum(probabilities[order]), 0.9)) + 1
    assert np.array_equal(steps.top_p(kept, 0.9, 1).ids, np.sort(order[:n_keep]))
    assert steps.top_p(kept, 0.9, 15_000).ids.size == 15_000


def test_the_bound_of_min_p_is_inclusive():
    kept = Candidates(np.arange(2), np.array([0.0, math.log(0.25)]))
    assert ids(steps.min_p(kept, 0.25, 1)) == [0, 1]
