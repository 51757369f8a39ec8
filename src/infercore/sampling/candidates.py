"""The tokens that may still be chosen, and the vector helpers that all steps share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
RealArray = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.intp]
BoolArray = npt.NDArray[np.bool_]

_MOST_ROWS = 64
_COLUMNS_FOR_EACH = 4


class Candidates(NamedTuple):
    """Tokens that may be chosen: ``ids`` [n] ascending, ``logits`` float64 [n], none of them -inf.

    The order by id is part of the specification. One uniform number picks the token from the
    cumulative probabilities in this order, so the choice moves smoothly with the logits; in an
    order by probability two nearly equal tokens could swap places and with them every draw.
    """

    ids: IdArray
    logits: RealArray

    def keep(self, chosen: BoolArray | IdArray) -> Candidates:
        """Return those that ``chosen`` selects: a mask [n], or ascending places."""
        return Candidates(self.ids[chosen], self.logits[chosen])


def gather(logits: FloatArray) -> Candidates:
    """Return every token of ``logits`` [n_vocab] that is not -inf, as candidates."""
    possible = logits > -np.inf
    if possible.all():
        return Candidates(np.arange(logits.size), logits.astype(np.float64))
    ids = np.flatnonzero(possible)
    return Candidates(ids, logits[ids].astype(np.float64))


def softmax(logits: RealArray) -> RealArray:
    """Return exp(l_i) / sum_j exp(l_j) of ``logits`` [n], computed from the largest downwards."""
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()  # type: ignore[no-any-return]


def entropy(probabilities: RealArray) -> float:
    """Return the Shannon entropy in nats of ``probabilities`` [n]; 0 log 0 counts as 0."""
    positive = probabilities[probabilities > 0]
    return float(-(positive * np.log(positive)).sum())


def descending(values: npt.NDArray[np.floating]) -> IdArray:
    """Return the places of ``values`` [n] from the largest to the smallest, ties by place."""
    return np.argsort(-values, kind="stable")


def largest(values: npt.NDArray[np.floating], k: int) -> IdArray:
    """Return the ascending places of the ``k`` largest ``values`` [n]; of ties the first ones.

    ``values`` holds no NaN. A long array is first cut to the few places that can qualify: the
    k-th largest of the column maxima is a value that at least k entries reach.
    """
    if k >= values.size:
        return np.arange(values.size)
    places = np.flatnonzero(values >= _reached_by(values, k))
    found = values[places]
    if places.size == k:
        return places
    bound = np.partition(found, -k)[-k]
    chosen = found > bound
    ties = np.flatnonzero(found == bound)
    chosen[ties[: k - np.count_nonzero(chosen)]] = True
    kept: IdArray = places[chosen]
    return kept


def _reached_by(values: npt.NDArray[np.floating], k: int) -> np.floating:
    rows = min(_MOST_ROWS, values.size // (_COLUMNS_FOR_EACH * k))
    if rows <= 1:
        return np.partition(values, -k)[-k]  # type: ignore[no-any-return]
    columns = values.size // rows
    maxima = values[: columns * rows].reshape(rows, columns).max(axis=0)
    return np.partition(maxima, -k)[-k]  # type: ignore[no-any-return]
