"""An engine that tells only the likeliest tokens keeps each law, or refuses what it is about."""

from __future__ import annotations

import pack
from infercore.conformance import check_backend, reference
from infercore.testing import load_reference_model

KINDS = {"logits": "top", "n_top": 48, "native_sampler": False}


def test_laws_hold_or_are_refused() -> None:
    pack.need_pack()
    rig = reference.rig()
    rig.open_model = lambda: load_reference_model(**KINDS)
    rig.open_path = lambda path: load_reference_model(path, **KINDS)
    rig.observe, rig.require, rig.variant = None, (), "top"
    report = check_backend(rig, only=("DEC-*", "REUSE-*"))
    outcomes = {result.id: result.outcome for result in report.results}
    assert [name for name, outcome in outcomes.items() if outcome == "FAIL"] == []
    assert outcomes["DEC-7"] == "refused"  # each logit is finite
    assert outcomes["DEC-20"] == "ok"  # the likeliest have the oracle's log-probabilities
    assert sum(outcome == "ok" for outcome in outcomes.values()) > len(outcomes) // 2
