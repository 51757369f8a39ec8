"""The steps of the reference's sampler that leave candidates out.

Each takes candidates, the likeliest first, and returns those that stay, at least one. Logits are
relative to that of the likeliest of all, which has 0.
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


def relative(candidates: Candidates) -> Candidates:
    """Return the candidates with their logits less that of the first."""
    best = candidates[0][1]
    return [(token, logit - best) for token, logit in candidates]


def probabilities(candidates: Candidates) -> list[float]:
    """Return the softmax of the candidates' logits, of which none is above 0."""
    weights = [math.exp(logit) for _, logit in candidates]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def entropy(found: Sequence[float]) -> float:
    """Return the entropy of probabilities, in nats."""
    return -math.fsum(p * math.log(p) for p in found if p > 0)


def truncated(left: Candidates, config: SamplingConfig, source: random.Random) -> Candidates:
    """Return what top_n_sigma, top_k, typical, top_p, min_p and xtc leave, in this order."""
    keep = config.min_keep
    left = top_n_sigma(left, config.top_n_sigma)
    left = left[: config.top_k] if config.top_k else left
    for step, p in ((typical, config.typical_p), (top_p, config.top_p)):
        if p < 1:
            left = step(left, p, keep)
    left = min_p(left, config.min_p, keep)
    if source.random() <= config.xtc_probability:
        left = xtc(left, config.xtc_threshold, keep)
    return left


def top_n_sigma(left: Candidates, n: float) -> Candidates:
    """Leave out logits more than ``n`` standard deviations below the best; n <= 0 is off."""
    if n <= 0:
        return left
    lowest = -n * statistics.pstdev([logit for _, logit in left])
    return [(token, logit) for token, logit in left if logit >= lowest]


def typical(left: Candidates, p: float, keep: int) -> Candidates:
    """Keep the tokens whose surprise is nearest to the expected one, of mass above ``p``.

    Surprise is a constant less the logit, so their distances are those of logits from the mean.
    """
    found = probabilities(left)
    mean = math.fsum(share * logit for share, (_, logit) in zip(found, left, strict=True))
    order = sorted(range(len(left)), key=lambda place: abs(left[place][1] - mean))
    n = 1 + sum(total <= p for total in accumulate(found[place] for place in order))
    return [left[place] for place in sorted(order[: max(n, keep)])]


def top_p(left: Candidates, p: float, keep: int) -> Candidates:
    """Keep the likeliest tokens whose probabilities reach ``p`` together."""
    n = 1 + sum(total < p for total in accumulate(probabilities(left)))
    return left[: max(n, keep)]


def min_p(left: Candidates, p: float, keep: int) -> Candidates:
    """Keep the tokens at least ``p`` times as likely as the best; p = 0 is off."""
    if not p:
        return left
    lowest = left[0][1] + math.log(p)
    n = sum(logit >= lowest for _, logit in left)
    return left[: max(n, keep)]


def xtc(left: Candidates, threshold: float, keep: int) -> Candidates:
    """Leave out all but the last of the tokens that reach ``threshold``."""
    n = sum(p >= threshold for p in probabilities(left))
    if len(left) - n + 1 < keep:
        return left
    return left[max(n, 1) - 1 :]
