"""The reference backend, announced as an installed plugin would be."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from infercore.registry import default_registry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLUGIN = """
from infercore import hookimpl
from infercore.testing import reference_backend

@hookimpl
def infercore_backend():
    return reference_backend()
"""


@pytest.fixture
def reference_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """Announce the reference backend here and in child processes; give their environment."""
    site = tmp_path / "site"
    metadata = site / "announces_reference-1.dist-info"
    metadata.mkdir(parents=True)
    (site / "announces_reference.py").write_text(PLUGIN)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: announces-reference\nVersion: 1\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[infercore.backends]\nreference = announces_reference\n"
    )
    monkeypatch.syspath_prepend(str(site))
    default_registry().refresh()
    yield {
        "PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    }
    monkeypatch.undo()
    sys.modules.pop("announces_reference", None)
    default_registry().refresh()
