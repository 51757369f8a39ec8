from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infercore.sampling.candidates import entropy, gather, largest, softmax

ROWS = st.builds(
    lambda seed, size, spread: np.random.default_rng(seed).integers(-spread, spread, size),
    st.integers(0, 2**32),
    st.integers(1, 3000),
    st.sampled_from([1, 20, 10**6]),
).map(lambda values: values.astype(np.float32))


@given(values=ROWS, k=st.integers(1, 3000))
def test_largest_is_the_head_of_a_stable_sort(values, k):
    expected = np.sort(np.argsort(-values, kind="stable")[:k])
    assert np.array_equal(largest(values, k), expected)


@pytest.mark.parametrize("k", [1, 40, 1000, 149_999, 150_000])
def test_largest_of_a_long_row_finds_ties_by_id(k):
    values = np.random.default_rng(0).integers(0, 500, 150_000).astype(np.float32)
    expected = np.sort(np.argsort(-values, kind="stable")[:k])
    assert np.array_equal(largest(values, k), expected)


def test_gather_leaves_out_what_cannot_be_chosen():
    kept = gather(np.array([1, -np.inf, 3], dtype=np.float32))
    assert kept.ids.tolist() == [0, 2]
    assert kept.logits.tolist() == [1, 3]
    assert kept.logits.dtype == np.float64


def test_softmax_and_entropy_of_known_values():
    assert softmax(np.log([0.5, 0.25, 0.25])) == pytest.approx([0.5, 0.25, 0.25])
    assert softmax(np.array([1e30, -1e30])).tolist() == [1, 0]
    assert entropy(np.array([0.5, 0.25, 0.25, 0.0])) == pytest.approx(1.5 * np.log(2))
