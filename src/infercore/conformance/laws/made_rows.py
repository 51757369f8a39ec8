"""The engine's own sampler on rows that biases make: ties, edges, shapes for mirostat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance.expect import equal, that
from infercore.conformance.law import law
from infercore.conformance.laws import sampling
from infercore.conformance.laws.native import MOST_BIASED
from infercore.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.conformance.rig import Rig

EQUAL = (0.0, 0.0, 0.0, 0.0)
"""Each has a probability of exactly a quarter, in every precision."""
FALLING = (0.0, -0.5, -1.1, -1.6, -2.3, -2.9)
FLAT = 30.0
"""A temperature at which of what filters leave each token comes about as often as another."""

_FILTERS: tuple[tuple[Sequence[float], dict[str, Any]], ...] = (
    (EQUAL, {"top_p": 0.5}),
    (EQUAL, {"top_p": 0.5, "min_keep": 3}),
    (EQUAL, {"typical_p": 0.5}),
    (EQUAL, {"typical_p": 0.2, "min_keep": 2}),
    (EQUAL, {"min_p": 1.0}),
    (EQUAL, {"top_n_sigma": 1.0}),
    (EQUAL, {"xtc_probability": 1.0, "xtc_threshold": 0.25}),
    (EQUAL, {"xtc_probability": 1.0, "xtc_threshold": 0.25, "min_keep": 2}),
    (FALLING, {"top_k": 2}),
    (FALLING, {"top_n_sigma": 0.0}),
    (FALLING, {"top_n_sigma": 0.6}),
    (FALLING, {"top_n_sigma": 1.4}),
    (FALLING, {"top_p": 0.7}),
    (FALLING, {"top_p": 0.7, "min_keep": 5}),
    (FALLING, {"typical_p": 0.3}),
    (FALLING, {"typical_p": 0.3, "min_keep": 4}),
    (FALLING, {"typical_p": 0.5, "top_p": 0.6}),
    (FALLING, {"typical_p": 0.99, "min_p": 0.02}),
    (FALLING, {"min_p": 0.25}),
    (FALLING, {"min_p": 0.9, "min_keep": 4}),
    (FALLING, {"xtc_probability": 1.0, "xtc_threshold": 0.15}),
    (FALLING, {"xtc_probability": 1.0, "xtc_threshold": 0.15, "min_keep": 4}),
    (FALLING, {"xtc_probability": 1.0, "xtc_threshold": 0.15, "min_keep": 5}),
    (FALLING, {"xtc_probability": 1.0, "xtc_threshold": 0.15, "min_keep": 6}),
    (FALLING, {"xtc_probability": 1.0, "xtc_threshold": 0.3}),
    (FALLING, {"xtc_probability": 1.0, "xtc_threshold": 0.9}),
)
_NEVER = -5000.0
"""A bias that leaves a probability of 0, though no token is forbidden."""
_OF_SHARES = {"typical_p", "top_p"}


@law("SAMP-28", needs="native_sampler", since="1.2")
def check_native_on_rows_that_are_made(rig: Rig) -> None:
    """On rows of few tokens, made by biases, the engine's own filters and mirostat are exact.

    They leave the tokens that the portable sampler's leave; of equal ones, as many.
    """
    context, row = sampling._row(rig)  # noqa: SLF001  (the same row as in other laws)
    if len(row) > MOST_BIASED:
        rig.leave(f"a row of {len(row)} tokens takes too many biases")
    asked_of_all = [(*each, -np.inf) for each in _FILTERS]
    asked_of_all += [(*each, _NEVER) for each in _FILTERS if _OF_SHARES & each[1].keys()]
    for logits, fields, rest in asked_of_all:
        ids, bias = _made(rig, row, logits, rest)
        asked = {**sampling.PLAIN, "temperature": FLAT, "logit_bias": bias, **fields}
        left, _ = rig.sampler(**asked).distribution(row.astype(np.float32))
        found = _drawn(rig, context, 12 * len(left) + 8, asked)
        if found is None:
            continue
        what = f"of logits {logits} with {fields}, {rest} for the others"
        that(found <= set(ids), f"{what}: {sorted(found - set(ids))} are impossible")
        if len(set(logits)) == 1:
            equal(len(found), len(left), f"how many tokens {what} stay")
        else:
            stay = [ids.index(token) for token in left.tolist()]
            equal(sorted(map(ids.index, found)), sorted(stay), f"places {what} that stay")
    _check_mirostat(rig, context, row)
    _check_mirostat_of_few(rig, context)
    _check_adapting(rig, context, row)


def _made(
    rig: Rig, row: Any, logits: Sequence[float], rest: float = -np.inf
) -> tuple[list[int], dict[int, float]]:
    """Return tokens, and the biases that give them ``logits``; all others have ``rest``.

    A logit of 0 is exact: no rounding can leave anything of a number and its negative.
    """
    ids = rig.random.sample(range(len(row)), len(logits))
    bias = dict.fromkeys(range(len(row)), rest)
    for token, logit in zip(ids, logits, strict=True):
        bias[token] = logit - float(row[token])
    return ids, bias


def _drawn(rig: Rig, context: Any, n: int, fields: dict[str, Any]) -> set[int] | None:
    """Return the tokens that ``n`` draws of the engine give, None where it refuses an option."""
    try:
        native = rig.sampler(**fields, implementation="native", seed=rig.random.randrange(999))
    except UnsupportedFeatureError:
        return None
    return {int(native.sample(context)) for _ in range(n)}


def _cliff(at: int) -> list[float]:
    """Logits that fall slowly, but for a deep fall before place ``at``."""
    return [-0.02 * i - (60.0 if i >= at else 0.0) for i in range(130)]


_SLOW = [-0.1 * i for i in range(8)]
_SHAPES: tuple[tuple[Sequence[float], dict[str, Any]], ...] = (
    (EQUAL, {"mirostat": 2, "mirostat_tau": 1.0}),  # each is surprising by just what is allowed
    (EQUAL, {"mirostat": 2, "mirostat_tau": 0.9}),
    (EQUAL, {"mirostat": 1, "mirostat_tau": 1.0}),
    (FALLING, {"mirostat": 2, "mirostat_tau": 0.7}),
    (FALLING, {"mirostat": 2, "mirostat_tau": 1.2}),
    (FALLING, {"mirostat": 2, "mirostat_tau": 0.0}),
    *((_SLOW, {"mirostat": 1, "mirostat_tau": tau}) for tau in (4.3, 4.5, 4.7)),
    (FALLING, {"mirostat": 1, "mirostat_tau": 9.0}),
    ((0.0, -0.3), {"mirostat": 1, "mirostat_tau": 6.0}),
    ([-0.01 * i for i in range(8)], {"mirostat": 1, "mirostat_tau": 8.0}),  # each may come
    ([-0.1 * i for i in range(64)], {"mirostat": 1, "mirostat_tau": 4.5}),  # below 100
    # Whether the 100 likeliest tokens show the cliff decides between one token and many.
    *((_cliff(at), {"mirostat": 1, "mirostat_tau": 4.5}) for at in (99, 100)),
)
FEW = 9
"""Candidates up to which every one is drawn that can be."""
N_DRAWS = 110
_MORE = 6


def _check_mirostat(rig: Rig, context: Any, row: Any) -> None:
    """Without adapting, mirostat draws from the tokens that the portable one draws from."""
    for logits, fields in _SHAPES:
        ids, bias = _made(rig, row, logits)
        asked = {**sampling.PLAIN, "logit_bias": bias, "mirostat_eta": 0.0, **fields}
        near = [_portable(rig, context, {**asked, "mirostat_tau": t}) for t in _around(fields)]
        if len(logits) <= FEW and near[0] != near[-1]:
            continue  # at the very edge
        found = _drawn(rig, context, N_DRAWS, asked)
        if found is None:
            continue
        expected, what = near[len(near) // 2], f"of logits {logits[:8]} with {fields}"
        for _ in range(_MORE if len(logits) <= FEW else 0):  # the rarest come once in forty
            found |= _drawn(rig, context, N_DRAWS, asked) or set()
            expected |= _portable(rig, context, asked)
            if found == expected:
                break
        that(found <= set(ids), f"{what}: {sorted(found - set(ids))} are impossible")
        if len(logits) <= FEW and len(set(logits)) > 1:
            places = [sorted(map(ids.index, tokens)) for tokens in (found, expected)]
            equal(places[0], places[1], f"places {what} that stay")
        else:
            equal(min(len(found), FEW), min(len(expected), FEW), f"how many tokens {what} stay")


def _check_mirostat_of_few(rig: Rig, context: Any) -> None:
    """Where top_k leaves few, and more surprise is wanted than they have, each of them comes."""
    asked = {**sampling.PLAIN, "temperature": FLAT, "mirostat": 1, "mirostat_tau": 9.0, "top_k": 4}
    found = _drawn(rig, context, N_DRAWS, {**asked, "mirostat_eta": 0.0})
    if found is not None:
        expected = _portable(rig, context, {**asked, "mirostat_eta": 0.0})
        equal(found, expected, "tokens that mirostat draws of the four that top_k leaves")


def _around(fields: dict[str, Any]) -> tuple[float, ...]:
    """Return the target, and for version 1, whose cut no row meets exactly, two beside it."""
    tau = fields["mirostat_tau"]
    return (tau,) if fields["mirostat"] == 2 else (0.99 * tau, tau, 1.01 * tau)  # noqa: PLR2004


def _portable(rig: Rig, context: Any, fields: dict[str, Any]) -> set[int]:
    portable = rig.sampler(**fields, seed=rig.random.randrange(999))
    return {int(portable.sample(context)) for _ in range(N_DRAWS)}


def _check_adapting(rig: Rig, context: Any, row: Any) -> None:
    """What a choice surprises by moves what is allowed next: after 2 bits the best alone comes.

    Allowed are 2.3 bits, then 2.3 - (2 - 1.15), then 1.15 more after a choice without surprise.
    """
    ids, bias = _made(rig, row, (0.0, -0.01, -0.01, -0.01))
    asked = {**sampling.PLAIN, "logit_bias": bias, "mirostat": 2, "mirostat_tau": 1.15}
    runs = []
    for seed in range(24):
        try:
            native = rig.sampler(**asked, mirostat_eta=1.0, implementation="native", seed=seed)
        except UnsupportedFeatureError:
            return
        runs.append([int(native.sample(context)) for _ in range(4)])
    for i, is_alone in enumerate((False, True, False, True)):
        seen = {run[i] for run in runs}
        equal(seen == {ids[0]}, is_alone, f"mirostat adapts: whether one token alone is number {i}")
