"""The steps of the reference's sampler that leave candidates out.

Each takes candidates, the likeliest first, and returns those that stay, at least one.
"""

from __future__ import annotations

import math
import statistics
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from infercore.testing.reference_sampler import Candidates
    from infercore.values.config import SamplingConfig


def probabilities(candidates: Candidates) -> list[float]:
    """Return the softmax of the candidates' logits."""
    best = candidates[0][1]
    weights = [math.exp(logit - best) for _, logit in candidates]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def entropy(found: Sequence[float]) -> float:
    """Return the entropy of probabilities, in nats."""
    return -math.fsum(p * math.log(p) for p in found if p > 0)


def truncated(left: Candidates, config: SamplingConfig, source: random.Random) -> Candidates:
    """Return what top_n_sigma, top_k, typical, top_p, min_p and xtc leave, in this order."""
    keep = max(1, config.min_keep)
    left = top_n_sigma(left, config.top_n_sigma)
    left = left[: config.top_k] if config.top_k else left
    left = typical(left, config.typical_p, keep)
    left = top_p(left, config.top_p, keep)
    left = min_p(left, config.min_p, keep)
    if config.xtc_probability > 0 and source.random() <= config.xtc_probability:
        left = xtc(left, config.xtc_threshold, keep)
    return left


def top_n_sigma(left: Candidates, n: float) -> Candidates:
    """Leave out logits more than ``n`` standard deviations below the best; n <= 0 is off."""
    if n <= 0:
        return left
    lowest = left[0][1] - n * statistics.pstdev([logit for _, logit in left])
    return [candidate for candidate in left if candidate[1] >= lowest]


def typical(left: Candidates, p: float, keep: int) -> Candidates:
    """Keep the tokens whose surprise is nearest to the expected one, of mass above ``p``."""
    if p >= 1:
        return left
    found = probabilities(left)
    expected = entropy(found)

    def oddness(place: int) -> float:
        return abs(-math.log(found[place]) - expected) if found[place] > 0 else math.inf

    order = sorted(range(len(left)), key=oddness)
    sums = accumulate(found[place] for place in order)
    n = next((i for i, total in enumerate(sums, 1) if total > p), len(left))
    return [left[place] for place in sorted(order[: max(n, keep)])]


def top_p(left: Candidates, p: float, keep: int) -> Candidates:
    """Keep the likeliest tokens whose probabilities reach ``p`` together."""
    if p >= 1:
        return left
    sums = accumulate(probabilities(left))
    n = next((i for i, total in enumerate(sums, 1) if total >= p), len(left))
    return left[: max(n, keep)]


def min_p(left: Candidates, p: float, keep: int) -> Candidates:
    """Keep the tokens at least ``p`` times as likely as the best."""
    if p <= 0:
        return left
    lowest = left[0][1] + math.log(p)
    n = sum(logit >= lowest for _, logit in left)
    return left[: max(n, keep)]


def xtc(left: Candidates, threshold: float, keep: int) -> Candidates:
    """Leave out all but the last of the tokens that reach ``threshold``."""
    n = sum(p >= threshold for p in probabilities(left))
    if n == 0 or len(left) - n + 1 < keep:
        return left
    return left[n - 1 :]
