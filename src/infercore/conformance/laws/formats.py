"""Keys and values in each declared type: how near they stay, and what is saved of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance.expect import that
from infercore.conformance.law import law
from infercore.conformance.standing import MAX_SHARE
from infercore.errors import InvalidInputError, UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infercore.conformance.rig import Rig

SHARES = {"f32": 0.0, "f16": 0.004, "bf16": 0.02, "q8_0": 0.03, "u8": 0.03}
"""How far logits may be from the exact ones, as a share of their spread; about thrice the usual."""
OF_V = {"f16": 0.0008, "bf16": 0.004, "q8_0": 0.015}
"""The same of V alone, of which errors are only added up."""
COARSE = 0.3
"""For types of less than 8 bits, and those that are not known here."""


def accepted_types(rig: Rig) -> list[dict[str, Any]]:
    """Return the fields for each declared type of K alone, of V alone and of both, if accepted."""
    return [fields for _, fields in _accepted(rig)]


def _accepted(rig: Rig) -> Iterator[tuple[str, dict[str, Any]]]:
    plain = {"type_k": "f32", "type_v": "f32"}
    for kind in rig.context().capabilities.kv_types:
        for names in (("type_k",), ("type_v",), ("type_k", "type_v")):
            for flash in ({}, {"flash_attn": "on"}):
                fields = {**plain, **dict.fromkeys(names, kind), **flash}
                try:
                    rig.model.new_context(**rig.fields(**fields)).close()
                except (InvalidInputError, UnsupportedFeatureError):
                    continue
                yield kind, fields
                break


def _contexts(rig: Rig) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Yield each of these types, the fields for it, and a context with them."""
    for kind, fields in _accepted(rig):
        yield kind, fields, rig.context(**fields, n_batch=24, n_ubatch=11)


MOST_SAID = 0.1
"""Of the spread of a text's logits, the most that a context may state as its tolerance.

With a type of known rounding, twice what that may move them by, but no less than `MAX_SHARE`.
"""


@law("CAP-29", since="1.2")
def check_types_are_as_near_as_their_bits(rig: Rig) -> None:
    """With K, V or both in each declared type, logits are as near the oracle's as its bits allow.

    In several steps, single tokens and after a removal, so that what is kept is read again.
    """
    rig.need_all_logits()
    oracle = rig.need_oracle()
    tokens = rig.tokens(60)
    rows = oracle.rows(tokens)
    expected = rows[-1]
    # The spread of one row is chance, and a tolerance is stated before there is a text.
    spread = max(float(np.ptp(expected)), float(np.median(np.ptp(rows, axis=1))))
    for kind, fields, context in _contexts(rig):
        context.decode(tokens[:41])
        if context.capabilities.kv_remove == "any":
            context.decode(tokens[:7])
            context.seq_remove(0, 41, -1)
        context.decode(tokens[41:58])
        for token in tokens[58:]:
            context.decode_one(token)
        gap = float(np.abs(context.logits() - expected).max())
        shares = {**SHARES, **(OF_V if fields["type_k"] == "f32" else {})}
        allowed = max(rig.tolerance, shares.get(kind, COARSE) * spread)
        that(gap <= allowed, f"{fields}: logits {gap:.3g} from the oracle's, beyond {allowed:.3g}")
        share = max(MAX_SHARE, min(MOST_SAID, 2 * SHARES.get(kind, MOST_SAID)))
        most = max(rig.tolerance, share * spread)
        said = context.tolerance
        that(said <= most, f"{fields}: a tolerance of {said:.3g} where logits span {spread:.3g}")
        _check_moved(rig, context, tokens, 2 * allowed, f"{fields}, moved")


def _check_moved(rig: Rig, context: Any, tokens: list[int], allowed: float, what: str) -> None:
    """Positions that such a context says it moves are moved, and keys rounded once more."""
    exact = rig.context()
    if not (context.capabilities.kv_shift and exact.capabilities.kv_shift):
        return
    for each in (context, exact):
        each.clear()
        each.decode(tokens[:30])
        each.seq_shift(0, 15, -1, 3)
        each.decode_one(tokens[30])
    gap = float(np.abs(context.logits() - exact.logits()).max())
    that(gap <= allowed, f"{what}: logits {gap:.3g} from those in full, beyond {allowed:.3g}")


@law("STATE-25", needs="sequence_state", since="1.2")
def check_state_of_each_type(rig: Rig) -> None:
    """Saved state goes on as its source does, with K, V or both in each declared type."""
    rig.need_all_logits()
    tokens = rig.tokens(40)
    for _, fields, context in _contexts(rig):
        context.decode(tokens[:30])
        data = context.save_sequence(0)
        other = rig.context(**fields, n_batch=24, n_ubatch=11)
        other.load_sequence(0, data)
        for each in (context, other):
            each.decode(tokens[30:39])
            each.decode_one(tokens[39])
        gap = float(np.abs(context.logits() - other.logits()).max())
        allowed = max(rig.tolerance, context.tolerance)
        that(gap <= allowed, f"{fields}: restored, logits are {gap:.3g} off, beyond {allowed:.3g}")
        rig.tidy()
