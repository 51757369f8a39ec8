"""``tool_choice="required"`` with random schemas: every call is valid, in every form.

This is a sample; ``python tools/required_calls.py --cases 500`` does them all.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "required_calls.py"
N_CASES = 14


def test_required_calls_are_valid(session: Any) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance: pip install '.[constraints]'")
    if not SCRIPT.is_file():
        pytest.skip("the folder tools is not beside these tests")
    spec = importlib.util.spec_from_file_location("required_calls", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = list(module.outcomes(session, N_CASES, seed=1))
    assert len({form for form, _ in found}) == len(module.WRITTEN)
    assert [outcome for _, outcome in found] == ["valid"] * N_CASES
