"""The check of the widths of pages fails by name where it cannot check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "check_widths.py"

if not TOOL.exists():
    pytest.skip("tools/ is not here", allow_module_level=True)


@pytest.mark.parametrize(
    ("options", "required", "status"),
    [((), "", 1), (("--if-browser",), "", 0), (("--if-browser",), "1", 1)],
)
def test_without_a_browser_it_fails_unless_told(
    tmp_path: Path, options: tuple[str, ...], required: str, status: int
) -> None:
    (tmp_path / "index.html").write_text("<p>here</p>")
    environment = {**os.environ, "PATH": str(tmp_path), "INFERCORE_REQUIRE_BROWSER": required}
    done = subprocess.run(
        [sys.executable, TOOL, tmp_path, *options], env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == status
    assert "no browser" in done.stdout + done.stderr


def test_an_empty_folder_fails(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, TOOL, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "no pages" in done.stderr
