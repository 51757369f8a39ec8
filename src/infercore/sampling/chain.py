"""All steps in their fixed order: from one row of logits to one token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from infercore.sampling import selection, steps
from infercore.sampling.candidates import Candidates
from infercore.sampling.selection import Selected

if TYPE_CHECKING:
    from collections.abc import Callable

    from infercore.sampling.candidates import FloatArray
    from infercore.values.config import SamplingConfig


def candidates_of(
    logits: FloatArray, config: SamplingConfig, uniform: Callable[[], float]
) -> Candidates:
    """Return what top_n_sigma to temperature leave of the finished ``logits`` [n_vocab].

    ``logits`` have seen mask, bias, penalties and dry; none is NaN or inf, one at least is not
    -inf. ``uniform`` is called once where xtc is on, whatever comes of it, else not at all.
    """
    if config.temperature == 0:
        best = np.array([selection.greedy(logits)], dtype=np.intp)
        return Candidates(best, logits[best].astype(np.float64))
    if config.top_n_sigma > 0:
        kept = steps.top_n_sigma(logits, config.top_n_sigma)
        kept = steps.top_k_of(kept, config.top_k)
    else:
        kept = steps.top_k(logits, config.top_k)
    return _reshaped(_truncated(kept, config, uniform), config)


def _truncated(
    kept: Candidates, config: SamplingConfig, uniform: Callable[[], float]
) -> Candidates:
    kept = steps.typical(kept, config.typical_p, config.min_keep)
    kept = steps.top_p(kept, config.top_p, config.min_keep)
    kept = steps.min_p(kept, config.min_p, config.min_keep)
    if config.xtc_probability == 0:
        return kept
    return steps.xtc(kept, uniform(), config.xtc_probability, config.xtc_threshold, config.min_keep)


def _reshaped(kept: Candidates, config: SamplingConfig) -> Candidates:
    degree = steps.dynamic_degree(
        kept, config.temperature, config.dynatemp_range, config.dynatemp_exponent
    )
    return steps.temperature(kept, degree)


def first_mu(config: SamplingConfig) -> float:
    """Return the state of the selection before its first step."""
    adapts = config.adaptive_p_target >= 0
    return config.adaptive_p_target if adapts else 2.0 * config.mirostat_tau


def select(
    kept: Candidates, config: SamplingConfig, uniform: float, *, mu: float, n_vocab: int
) -> Selected:
    """Return the token that ``uniform`` picks of ``kept``, as the config wants it selected.

    ``mu`` is the state of mirostat or adaptive-p; without them it comes back unchanged.
    """
    if config.adaptive_p_target >= 0:
        target, decay = config.adaptive_p_target, config.adaptive_p_decay
        return selection.adaptive_p(kept, uniform, mu=mu, target=target, decay=decay)
    if config.mirostat == 0:
        return Selected(selection.categorical(kept, uniform), kept, mu)
    tau, eta = config.mirostat_tau, config.mirostat_eta
    if config.mirostat == 1:
        return selection.mirostat_v1(kept, uniform, mu=mu, tau=tau, eta=eta, n_vocab=n_vocab)
    return selection.mirostat_v2(kept, uniform, mu=mu, tau=tau, eta=eta)
