"""Clients that other people wrote: JavaScript's, where its packages are."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from served import serving

if TYPE_CHECKING:
    from served import Served

NODE_MODULES = "INFERCORE_NODE_MODULES"
SCRIPTS = Path(__file__).parent / "clients"


BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def run_script(name: str, tmp_path: Path, *arguments: str) -> None:
    modules = os.environ.get(NODE_MODULES)
    node = shutil.which("node")
    if modules is None or node is None:
        pytest.skip(f"needs node, and {NODE_MODULES} with the npm packages openai, puppeteer-core")
    script = Path(shutil.copy(SCRIPTS / name, tmp_path))
    (tmp_path / "node_modules").symlink_to(modules)
    done = subprocess.run(
        [node, str(script), *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "ok"), done.stderr


def test_the_javascript_client(served: Served, tmp_path: Path) -> None:
    run_script("openai.mjs", tmp_path, served.url)


def test_the_page_in_a_browser(pool: Any, tmp_path: Path) -> None:
    found = [path for name in BROWSERS if (path := shutil.which(name)) is not None]
    if os.environ.get(NODE_MODULES) is not None:
        assert found, f"no browser: install one of {', '.join(BROWSERS)}"
    with serving({"tale": pool}, max_tokens=60) as served:
        run_script("page.mjs", tmp_path, served.url, *found[:1])
