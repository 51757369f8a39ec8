"""Log-probabilities of one step, from logits or from what was left to draw from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from infercore.sampling.candidates import descending, largest
from infercore.values.session import TokenLogprob

if TYPE_CHECKING:
    import numpy.typing as npt

    from infercore.sampling.candidates import Candidates, FloatArray


def raw_logprobs(
    logits: FloatArray, token: int, top_n: int, total: float | None = None
) -> TokenLogprob:
    """Return the natural log-probabilities under the softmax of ``logits`` [n_vocab].

    Of ``token``, and of the ``top_n`` most likely tokens, falling, ties by id. ``total``: the
    logarithm of the sum of their exponentials, where it is known.
    """
    places = _top(logits, top_n)
    total = _log_sum_exp(logits) if total is None else total
    top = tuple((int(place), float(logits[place]) - total) for place in places)
    return TokenLogprob(token=token, logprob=float(logits[token]) - total, top=top)


def candidate_logprobs(candidates: Candidates, token: int, top_n: int) -> TokenLogprob:
    """Return the same under the softmax of ``candidates``; a token not among them has -inf."""
    total = _log_sum_exp(candidates.logits)
    logprobs = candidates.logits - total
    top = tuple(
        (int(candidates.ids[place]), float(logprobs[place]))
        for place in _top(candidates.logits, top_n)
    )
    place = int(np.searchsorted(candidates.ids, token))
    known = place < candidates.ids.size and candidates.ids[place] == token
    logprob = float(logprobs[place]) if known else -math.inf
    return TokenLogprob(token=token, logprob=logprob, top=top)


def _top(values: npt.NDArray[np.floating], n: int) -> npt.NDArray[np.intp]:
    if n == 0:
        return np.zeros(0, dtype=np.intp)
    places = largest(values, n)
    return places[descending(values[places])]


def _log_sum_exp(values: npt.NDArray[np.floating]) -> float:
    peak = values.max()
    return float(peak) + math.log(np.exp(values - peak).sum(dtype=np.float64))
