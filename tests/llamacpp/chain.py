"""The engine's chain applied to logits of the test's own, and llama.cpp steps put in any order."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

ROW = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


@attrs.frozen
class Left:
    """What a chain left of a vocabulary: ids ascending, their probabilities, and its choice."""

    ids: np.ndarray
    probabilities: np.ndarray
    chosen: int


def apply(chain: Any, logits: np.ndarray) -> Left:
    """Apply ``chain``, which ends with a selection, to ``logits`` [n_vocab].

    Probabilities are the softmax of the logits that are left, in float64. Tokens whose logit is
    -inf are no candidates: the engine keeps them in its list, with a probability of 0.
    """
    from infercore_llamacpp.library import api

    rows = np.zeros(logits.size, dtype=ROW)
    rows["id"], rows["logit"] = np.arange(logits.size), logits
    data = ctypes.cast(rows.ctypes.data, ctypes.POINTER(api.llama_token_data))
    array = api.llama_token_data_array(data=data, size=logits.size, selected=-1, sorted=False)
    api.llama_sampler_apply(chain, ctypes.byref(array))
    start = (ctypes.addressof(array.data.contents) - rows.ctypes.data) // ROW.itemsize
    rows = rows[start : start + array.size]  # min_p may move the beginning, and cut the end
    chosen = int(rows["id"][array.selected])
    kept = np.sort(rows[rows["logit"] > -np.inf], order="id")
    weights = np.exp(kept["logit"].astype(np.float64) - kept["logit"].max())
    return Left(kept["id"].copy(), weights / weights.sum(), chosen)


@contextmanager
def chain_of(*stages: Any) -> Iterator[Any]:
    """Return a chain of ``stages`` in the order given, freed afterwards."""
    from infercore_llamacpp.library import api

    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    for stage in stages:
        api.llama_sampler_chain_add(chain, stage)
    yield chain
    api.llama_sampler_free(chain)


def chi_square(drawn: np.ndarray, ids: np.ndarray, probabilities: np.ndarray) -> float:
    """Return Pearson's statistic of ``drawn`` tokens; inf for one that cannot come.

    Candidates that are expected fewer than five times count together.
    """
    counts = np.bincount(drawn, minlength=int(ids.max()) + 1)
    if counts[ids].sum() < drawn.size:
        return float("inf")
    expected, found = probabilities * drawn.size, counts[ids]
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    found = np.append(found[~rare], found[rare].sum())
    some = expected > 0
    return float(((found - expected)[some] ** 2 / expected[some]).sum())


def chi_square_limit(n_categories: int) -> float:
    """Return what one draw in 100,000 exceeds, by Wilson and Hilferty (1931)."""
    degrees = n_categories - 1
    return float(degrees * (1 - 2 / (9 * degrees) + 4.265 * (2 / (9 * degrees)) ** 0.5) ** 3)
