"""The steps that drop candidates or reshape their logits, in their fixed order.

The whole order is: constraint mask, bias, penalties, dry (these change logits of the whole
vocabulary: `edits`, `dry`), then what stands here: top_n_sigma, top_k, typical, top_p, min_p,
xtc, temperature; at last the selection (`selection`). Each function is pure, returns at least
one candidate and keeps the candidates in order of their ids.
"""

from __future__ import annotations

import math
import sys

import numpy as np

from infercore.sampling.candidates import (
    Candidates,
    FloatArray,
    IdArray,
    RealArray,
    descending,
    entropy,
    gather,
    largest,
    softmax,
)


def top_n_sigma(logits: FloatArray, n: float) -> Candidates:
    """Return the tokens whose logit is at least ``max - n * sigma``, of ``logits`` [n_vocab].

    ``sigma`` is the standard deviation (of the population) over the logits that are not -inf.
    ``n <= 0`` keeps them all. Source: Tang et al. 2024, "Top-nsigma: Not All Logits Are You
    Need"; ``llama_sampler_init_top_n_sigma``.
    """
    every = gather(logits)
    if n <= 0 or every.ids.size <= 1:
        return every
    return every.keep(every.logits >= every.logits.max() - n * every.logits.std())


def top_k(logits: FloatArray, k: int) -> Candidates:
    """Return the ``k`` largest of ``logits`` [n_vocab], of equal ones those of the lowest ids.

    ``k = 0`` keeps every token that is not -inf. Source: Fan et al. 2018, section 5.4;
    ``llama_sampler_init_top_k``.
    """
    if k == 0:
        return gather(logits)
    ids = largest(logits, k)
    found = logits[ids].astype(np.float64)
    possible = found > -np.inf
    return Candidates(ids[possible], found[possible])


def top_k_of(candidates: Candidates, k: int) -> Candidates:
    """Return the ``k`` most likely of ``candidates``; as `top_k`, after an earlier step."""
    if k == 0 or k >= candidates.ids.size:
        return candidates
    return candidates.keep(largest(candidates.logits, k))


def typical(candidates: Candidates, p: float, min_keep: int) -> Candidates:
    """Return the tokens whose surprise is closest to the expected one, of mass above ``p``.

    Tokens are taken in order of ``| -log p_i - H |`` (H the entropy) until their sum exceeds
    ``p`` and there are ``min_keep``. ``p >= 1`` keeps all. Source: Meister et al. 2022, "Locally
    Typical Sampling", eq. 7; ``llama_sampler_init_typical``.
    """
    if p >= 1:
        return candidates
    probabilities = softmax(candidates.logits)
    with np.errstate(divide="ignore"):
        distance = np.abs(-np.log(probabilities) - entropy(probabilities))
    order = np.argsort(distance, kind="stable")
    above = np.cumsum(probabilities[order]) > p
    n_keep = _first_true(above, min_keep)
    return candidates.keep(np.sort(order[:n_keep]))


def top_p(candidates: Candidates, p: float, min_keep: int) -> Candidates:
    """Return the smallest set of most likely tokens whose probabilities sum to ``p`` or more.

    At least ``min_keep`` stay; ``p >= 1`` keeps all. Source: Holtzman et al. 2020, "The Curious
    Case of Neural Text Degeneration", section 3.1; ``llama_sampler_init_top_p``.
    """
    if p >= 1:
        return candidates
    probabilities = softmax(candidates.logits)
    order = _likeliest_first(probabilities, p, min_keep)
    reached = np.cumsum(probabilities[order]) >= p
    n_keep = _first_true(reached, min_keep)
    return candidates.keep(np.sort(order[:n_keep]))


def _likeliest_first(probabilities: RealArray, p: float, min_keep: int) -> IdArray:
    """Return the places by falling probability, at least as many as sum to ``p``.

    The n places below ``(1 - p) / n`` hold less than ``1 - p`` together, so they need no sorting.
    """
    worth = np.flatnonzero(probabilities >= (1 - p) / probabilities.size / 2)
    if worth.size < min_keep:
        return descending(probabilities)
    return worth[descending(probabilities[worth])]


def _first_true(reached: np.ndarray[tuple[int], np.dtype[np.bool_]], min_keep: int) -> int:
    """Return how many leading entries end at the first True, at least ``min_keep``."""
    n_keep = int(np.argmax(reached)) + 1 if reached.any() else reached.size
    return max(n_keep, min(min_keep, reached.size))


def min_p(candidates: Candidates, p: float, min_keep: int) -> Candidates:
    """Return the tokens at least ``p`` times as likely as the most likely one.

    Compared as ``logit >= max + log p``. Where that leaves fewer than ``min_keep``, the
    ``min_keep`` most likely stay; ``p = 0`` keeps all. Source: Nguyen et al. 2024, "Turning Up
    the Heat: Min-p Sampling"; ``llama_sampler_init_min_p``.
    """
    if p <= 0:
        return candidates
    kept = candidates.logits >= candidates.logits.max() + math.log(p)
    if np.count_nonzero(kept) < min_keep:
        return candidates.keep(largest(candidates.logits, min_keep))
    return candidates.keep(kept)


def xtc(
    candidates: Candidates, uniform: float, probability: float, threshold: float, min_keep: int
) -> Candidates:
    """Drop the most likely tokens, all but the least likely of those that reach ``threshold``.

    Happens where ``uniform`` (from [0, 1)) is at most ``probability``, two tokens or more reach
    the threshold, and ``min_keep`` would stay; so a threshold above 0.5 does nothing. Source:
    "Exclude Top Choices", text-generation-webui pull request 6335; ``llama_sampler_init_xtc``.
    """
    if uniform > probability:
        return candidates
    probabilities = softmax(candidates.logits)
    reaching = np.flatnonzero(probabilities >= threshold)
    if reaching.size <= 1 or candidates.ids.size - reaching.size + 1 < min_keep:
        return candidates
    kept = np.ones(candidates.ids.size, dtype=np.bool_)
    kept[reaching[descending(probabilities[reaching])][:-1]] = False
    return candidates.keep(kept)


def temperature(candidates: Candidates, degree: float) -> Candidates:
    """Divide the logits by ``degree``; 0 leaves only the most likely token (of ties the first).

    The logits come out relative to the largest, which changes no probability and lets the
    smallest ``degree`` overflow harmlessly. Source: ``llama_sampler_init_temp``.
    """
    relative = candidates.logits - candidates.logits.max()
    if degree <= 0:
        return candidates.keep(np.flatnonzero(relative == 0)[:1])
    with np.errstate(over="ignore"):
        scaled = relative / degree
    possible = scaled > -np.inf
    return Candidates(candidates.ids[possible], scaled[possible])


def dynamic_degree(candidates: Candidates, degree: float, spread: float, exponent: float) -> float:
    """Return the temperature for this step: low where the model is sure, high where it is not.

    ``low + (high - low) * (H / log n) ** exponent`` with low and high ``spread`` below (at
    least 0) and above ``degree``, H the entropy of the n candidates. A single candidate, or a
    ``spread`` of 0, leaves ``degree``. Source: ``llama_sampler_init_temp_ext``.
    """
    if spread <= 0 or candidates.ids.size <= 1:
        return degree
    low, high = max(0.0, degree - spread), min(degree + spread, sys.float_info.max)
    sureness = min(1.0, entropy(softmax(candidates.logits)) / math.log(candidates.ids.size))
    return float(low + (high - low) * sureness**exponent)
