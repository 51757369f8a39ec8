"""The last step: one token out of the candidates, by one uniform number from [0, 1)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from infercore.sampling.candidates import Candidates, RealArray, descending, largest, softmax

MIROSTAT_M = 100
# Shape of adaptive-p's preference: its width in probability, the logit at its peak, and how fast it
# falls. Source: llama.cpp, ``llama_sampler_adaptive_p_apply``.
_WIDTH, _PEAK, _SHARPNESS = 0.3, 5.0, 10.0


class Selected(NamedTuple):
    """The chosen ``token``, what it was drawn ``out_of``, and the selection's new state ``mu``.

    Of mirostat that is in bits, of adaptive-p the mean probability of what it chose.
    """

    token: int
    out_of: Candidates
    mu: float


def greedy(logits: np.ndarray[tuple[int], np.dtype[np.float32]]) -> int:
    """Return the id of the largest of ``logits`` [n_vocab], the first of equal ones.

    A NaN counts as the largest, as in `numpy.argmax`.
    """
    return int(logits.argmax())


def draw(probabilities: RealArray, uniform: float) -> int:
    """Return the first place whose cumulative probability exceeds ``uniform`` of the total.

    Inverse transform sampling; ``probabilities`` [n] need not sum to one. Same distribution as
    ``llama_sampler_init_dist``.
    """
    cumulative = np.cumsum(probabilities)
    place = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
    return min(int(place), int(np.flatnonzero(probabilities)[-1]))


def categorical(candidates: Candidates, uniform: float) -> int:
    """Return a token drawn from the softmax of the candidates' logits."""
    return int(candidates.ids[draw(softmax(candidates.logits), uniform)])


def mirostat_v1(
    candidates: Candidates, uniform: float, *, mu: float, tau: float, eta: float, n_vocab: int
) -> Selected:
    """Draw from the top k, with k set so that the surprise comes to about ``mu`` bits.

    The exponent s of a Zipf distribution is estimated from the 100 most likely tokens, k follows
    from it and ``mu``; then ``mu`` moves by ``eta`` times the error against ``tau``. Source: Basu
    et al. 2020, "Mirostat", algorithm 1; ``llama_sampler_init_mirostat`` with m = 100.
    """
    k = _zipf_k(softmax(candidates.logits), mu, n_vocab)
    kept = candidates.keep(largest(candidates.logits, k))
    return _surprise_controlled(kept, uniform, mu, tau, eta)


def mirostat_v2(
    candidates: Candidates, uniform: float, *, mu: float, tau: float, eta: float
) -> Selected:
    """Draw from the tokens whose surprise ``-log2 p`` is at most ``mu`` bits (at least the best).

    Then ``mu`` moves by ``eta`` times the error against ``tau``. Source: Basu et al. 2020,
    "Mirostat", algorithm 2; ``llama_sampler_init_mirostat_v2``.
    """
    with np.errstate(divide="ignore"):
        expected = -np.log2(softmax(candidates.logits)) <= mu
    kept = candidates.keep(expected if expected.any() else largest(candidates.logits, 1))
    return _surprise_controlled(kept, uniform, mu, tau, eta)


def adaptive_p(
    candidates: Candidates, uniform: float, *, mu: float, target: float, decay: float
) -> Selected:
    """Draw so that the chosen tokens' probabilities come to ``target`` on average.

    ``mu`` is their running mean so far, in which each step before counts ``decay`` of the one after
    it; tokens near ``2 target - mu`` are preferred. Source: ``llama_sampler_init_adaptive_p``,
    whose two sums have this quotient.
    """
    probabilities = softmax(candidates.logits)
    aim = min(max(2.0 * target - mu, 0.0), 1.0)
    distance = np.abs(probabilities - aim) / _WIDTH
    logits = _PEAK - _SHARPNESS * distance * distance / (1.0 + distance)
    out_of = Candidates(candidates.ids, logits)
    place = draw(softmax(logits), uniform)
    mean = float(probabilities[place]) * (1.0 - decay) + decay * mu
    return Selected(int(candidates.ids[place]), out_of, mean)


def _surprise_controlled(
    kept: Candidates, uniform: float, mu: float, tau: float, eta: float
) -> Selected:
    probabilities = softmax(kept.logits)
    place = draw(probabilities, uniform)
    surprise = -math.log2(probabilities[place])
    return Selected(int(kept.ids[place]), kept, mu - eta * (surprise - tau))


def _zipf_k(probabilities: RealArray, mu: float, n_vocab: int) -> int:
    """Return k of Mirostat's equation 2, between 1 and the number of candidates.

    Computed by logarithms, since 2**mu and the power 1/s may overflow.
    """
    s = _zipf_exponent(probabilities)
    if not math.isfinite(s):
        return 1
    epsilon = s - 1
    size = math.log(n_vocab)
    ratio = epsilon / -math.expm1(-epsilon * size) if epsilon else 1 / size
    log_base = mu * math.log(2) + math.log(ratio)
    log_k = log_base / s if s > 0 else math.copysign(math.inf, log_base)
    if log_k >= math.log(probabilities.size):
        return int(probabilities.size)
    return max(int(math.exp(log_k)), 1)


def _zipf_exponent(probabilities: RealArray) -> float:
    """Return the least-squares estimate of s from the ratios of successive probabilities."""
    best = probabilities[largest(probabilities, MIROSTAT_M)]
    best = best[descending(best)]
    best = best[best > 0]
    if best.size <= 1:
        return math.inf
    rank = np.arange(1, best.size)
    steps = np.log((rank + 1) / rank)
    return float((steps * -np.diff(np.log(best))).sum() / (steps * steps).sum())
