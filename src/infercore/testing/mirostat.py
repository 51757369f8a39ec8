"""Mirostat for the reference's sampler: the surprise of the chosen tokens is held near a target.

Source: Basu et al. 2020, "Mirostat", algorithms 1 and 2, as llama.cpp has them.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from infercore.testing.truncation import probabilities

if TYPE_CHECKING:
    import random

    from infercore.testing.reference_sampler import Candidates
    from infercore.values.config import SamplingConfig

N_ESTIMATED = 100
"""How many of the likeliest tokens tell the shape of the distribution, in version 1."""


class Mirostat:
    """The state between tokens: the surprise in bits that is allowed next."""

    def __init__(self, config: SamplingConfig) -> None:
        self._config = config
        self._allowed = 2.0 * config.mirostat_tau

    def choose(self, left: Candidates, source: random.Random, *, n_vocab: int) -> int:
        """Return a token of ``left``, the likeliest first, and adapt."""
        found = probabilities(left)
        if self._config.mirostat == 1:
            n = _zipf_k(found, self._allowed, n_vocab)
        else:
            n = sum(-math.log2(p) <= self._allowed for p in found if p > 0)
        left = left[: max(1, n)]
        found = probabilities(left)
        place = source.choices(range(len(left)), found)[0]
        error = -math.log2(found[place]) - self._config.mirostat_tau
        self._allowed -= self._config.mirostat_eta * error
        return left[place][0]


def _zipf_k(found: list[float], allowed: float, n_vocab: int) -> int:
    """Return how many tokens to keep, where probabilities fall by Zipf's law (equation 2)."""
    best = [p for p in found[:N_ESTIMATED] if p > 0]
    if len(best) < 2:  # noqa: PLR2004  (a slope needs two points)
        return 1
    steps = [math.log((rank + 1) / rank) for rank in range(1, len(best))]
    falls = [math.log(a / b) for a, b in pairwise(best)]
    s = sum(t * f for t, f in zip(steps, falls, strict=True)) / sum(t * t for t in steps)
    excess = s - 1 or math.ulp(s)
    spread = excess / (1 - n_vocab**-excess)
    power = allowed * math.log(2) + math.log(spread)  # that of the last rank to keep
    return sum(s * math.log(rank) <= power for rank in range(1, len(found) + 1))
