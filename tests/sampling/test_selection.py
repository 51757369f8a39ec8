from __future__ import annotations

import math

import numpy as np
import pytest

import infercore as ic
from infercore.sampling import selection
from infercore.sampling.candidates import Candidates


def of(*probabilities: float) -> Candidates:
    return Candidates(np.arange(10, 10 + len(probabilities)), np.log(probabilities))


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 10), (0.24, 10), (0.26, 11), (0.74, 11), (0.76, 12), (1.0, 12)]
)
def test_one_uniform_picks_by_cumulative_probability_in_order_of_ids(uniform, token):
    assert selection.categorical(of(0.25, 0.5, 0.25), uniform) == token


def test_a_probability_of_zero_is_never_drawn():
    weights = np.array([0.0, 1.0, 0.0])
    assert selection.draw(weights, 0.0) == 1
    assert selection.draw(weights, math.nextafter(1, 0)) == 1


def test_greedy_takes_the_first_of_equal_logits():
    assert selection.greedy(np.array([1, 3, 3], dtype=np.float32)) == 1


def test_mirostat_v2_by_hand():
    # surprises in bits: 1, 2, 3, 3; mu 2.5 leaves the first two, of 2/3 and 1/3
    chosen = selection.mirostat_v2(of(0.5, 0.25, 0.125, 0.125), 0.7, mu=2.5, tau=1.0, eta=0.1)
    assert chosen.out_of.ids.tolist() == [10, 11]
    assert chosen.token == 11
    assert chosen.mu == pytest.approx(2.5 - 0.1 * (math.log2(3) - 1.0))


def test_mirostat_v2_keeps_the_best_when_all_surprise():
    chosen = selection.mirostat_v2(of(0.25, 0.5, 0.25), 0.99, mu=0.1, tau=1.0, eta=0.5)
    assert chosen.token == 11
    assert chosen.mu == pytest.approx(0.1 + 0.5)


def test_mirostat_v1_by_hand():
    # p ~ 1/rank: s = 1, so epsilon = 0 and k = 2**mu / ln(n_vocab): 2**4 / ln 100 = 3.47
    weights = 1 / np.arange(1, 101)
    kept = of(*(weights / weights.sum()))
    chosen = selection.mirostat_v1(kept, 0.0, mu=4.0, tau=2.0, eta=0.1, n_vocab=100)
    assert chosen.out_of.ids.tolist() == [10, 11, 12]
    surprise = math.log2(1 + 1 / 2 + 1 / 3)
    assert chosen.mu == pytest.approx(4.0 - 0.1 * (surprise - 2.0))


def test_mirostat_v1_at_an_exponent_of_exactly_one(monkeypatch):
    monkeypatch.setattr(selection, "_zipf_exponent", lambda _: 1.0)
    kept = of(*[0.01] * 100)
    chosen = selection.mirostat_v1(kept, 0.0, mu=4.0, tau=2.0, eta=0.1, n_vocab=100)
    assert chosen.out_of.ids.size == 3


@pytest.mark.parametrize(
    "probabilities", [(1.0,), (0.5, 0.5), (0.25,) * 4, (1.0, 5e-324), (0.7, 0.2, 0.1)]
)
@pytest.mark.parametrize("mu", [-3000.0, 0.0, 10.0, 3000.0])
def test_mirostat_never_runs_out_of_tokens(probabilities, mu):
    kept = of(*probabilities)
    for n_vocab in (2, 150_000):
        chosen = selection.mirostat_v1(kept, 0.5, mu=mu, tau=1, eta=1, n_vocab=n_vocab)
        assert chosen.token in kept.ids
        assert math.isfinite(chosen.mu)
    assert selection.mirostat_v2(kept, 0.5, mu=mu, tau=1, eta=1).token in kept.ids


@pytest.mark.parametrize("variant", [1, 2])
def test_mirostat_brings_the_surprise_to_tau(variant):
    weights = 1 / np.arange(1, 2001) ** 1.1
    kept = of(*(weights / weights.sum()))
    full = weights / weights.sum()
    random, mu, surprises = np.random.default_rng(1), 6.0, []
    for _ in range(1500):
        uniform = random.random()
        if variant == 1:
            chosen = selection.mirostat_v1(kept, uniform, mu=mu, tau=3, eta=0.1, n_vocab=2000)
        else:
            chosen = selection.mirostat_v2(kept, uniform, mu=mu, tau=3, eta=0.1)
        mu = chosen.mu
        among = full[chosen.out_of.ids - 10]
        surprises.append(-math.log2(full[chosen.token - 10] / among.sum()))
    assert np.mean(surprises[200:]) == pytest.approx(3.0, abs=0.1)


def test_adaptive_p_by_hand():
    # aim: 2 * 0.3 - 0.4 = 0.2; distances of 0.5 and 0.2 from it, in widths of 0.3: 1 and 0
    chosen = selection.adaptive_p(of(0.5, 0.2, 0.3), 0.5, mu=0.4, target=0.3, decay=0.9)
    third = 1 / 3
    expected = [5 - 10 / 2, 5, 5 - 10 * third**2 / (1 + third)]
    assert chosen.out_of.logits.tolist() == pytest.approx(expected)
    assert chosen.token == 11
    assert chosen.mu == pytest.approx(0.2 * 0.1 + 0.4 * 0.9)


def test_only_one_selects():
    with pytest.raises(ic.InvalidInputError, match="mirostat"):
        ic.SamplingConfig(adaptive_p_target=0.3, mirostat=2)
