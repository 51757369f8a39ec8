"""Clients that other people wrote: JavaScript's, where its packages are."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from served import Served

NODE_MODULES = "INFERCORE_NODE_MODULES"
SCRIPTS = Path(__file__).parent / "clients"


def test_the_javascript_client(served: Served, tmp_path: Path) -> None:
    modules = os.environ.get(NODE_MODULES)
    node = shutil.which("node")
    if modules is None or node is None:
        pytest.skip(f"needs node, and {NODE_MODULES} with the npm package openai")
    script = Path(shutil.copy(SCRIPTS / "openai.mjs", tmp_path))
    (tmp_path / "node_modules").symlink_to(modules)
    done = subprocess.run(
        [node, str(script), served.url], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "ok"), done.stderr
