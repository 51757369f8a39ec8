"""Rigs for tests of the suite itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from conformance.full_toy import toy_rig

if TYPE_CHECKING:
    from pathlib import Path

    from infercore.conformance import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """Return the rig of a toy that keeps every law."""
    return toy_rig(tmp_path / "model.json")
