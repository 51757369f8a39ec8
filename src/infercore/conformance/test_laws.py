"""What pytest collects of ``--pyargs infercore.conformance``: one test for each law."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infercore.conformance.plugin import run_one

if TYPE_CHECKING:
    import pytest

    from infercore.conformance.law import Law
    from infercore.conformance.rig import Rig


def test_law(infercore_law: Law, infercore_rig: Rig, request: pytest.FixtureRequest) -> None:
    """Run one law on the backend that was named."""
    run_one(infercore_law, infercore_rig, request)
