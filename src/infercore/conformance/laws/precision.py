"""Laws about the arithmetic: the engine's default, and the most accurate that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from infercore.conformance.expect import equal, that
from infercore.conformance.law import law
from infercore.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig


_CHOSEN = {"precision", "type_k", "type_v"}
"""Fields left out: the default arithmetic may have other types of KV cache than the accurate."""


@law("CAP-21", since="1.2")
def check_default_arithmetic_is_near_the_accurate(rig: Rig) -> None:
    """Logits of the default arithmetic are within its tolerance of those of "accurate"."""
    rig.need_all_logits()
    fields = {name: value for name, value in rig.fields().items() if name not in _CHOSEN}
    try:
        accurate = rig.opened(rig.model.new_context(**fields, precision="accurate"))
    except UnsupportedFeatureError as error:
        that("precision" in str(error), f"the refusal does not name the field: {error}")
        rig.leave("the backend has one arithmetic, and does not name it")
    equal(accurate.effective["precision"], "accurate", "effective precision")
    default = rig.opened(rig.model.new_context(**fields))
    tokens = rig.tokens(48)
    for context in (accurate, default):
        context.decode(tokens)
        told = context.effective.get("activations")
        that(told is None or isinstance(told, str), f"activations are told as {told!r}")
    gap = float(np.abs(accurate.logits() - default.logits()).max())
    allowed = max(default.tolerance, rig.tolerance)
    that(gap <= allowed, f"logits of the default differ by {gap:.3g}, beyond {allowed:.3g}")
