"""What README.md says works as written, line after line, as somebody does who has just cloned it.

The environment is the one that the tests run in, under the name that README gives it; a stand-in
for the hub has the storyteller as ``ORG/REPO``. ``tools/try_readme.py`` does the same from a fresh
clone, with the installation.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import pack
from docs import newcomer, pages
from hub_server import Hub

if not (pages.ROOT / "README.md").is_file():
    pytest.skip("README.md is not beside these tests", allow_module_level=True)
pytest.importorskip("fcntl", reason="the commands are those of a shell of Unix")
pytest.importorskip("huggingface_hub", reason="needs .[hub]")
pytest.importorskip("uvicorn", reason="needs .[serve]")


@pytest.mark.timeout(1800)  # a dozen programs, one after the other
@pytest.mark.parametrize("engine", ["llamacpp", "openvino"])
def test_every_line_works_as_written(engine: str, tmp_path: Path) -> None:
    pack.need_pack()
    pack.need_backend(engine)
    programs = Path(sys.executable).parent
    if not (programs / "activate").is_file() or not (programs / "infercore").is_file():
        pytest.skip("these tests do not run in a virtual environment, which README makes")
    folder = tmp_path / "clone"
    folder.mkdir()
    (folder / ".venv").symlink_to(programs.parent)
    with Hub() as hub:
        hub.repos["ORG/REPO"] = newcomer.storyteller(engine)
        environment = {
            **os.environ,
            "INFERCORE_PLUGINS": engine,  # as where README's command has installed one
            "INFERCORE_CONFIG_DIR": str(tmp_path / "config"),
            "HF_HOME": str(tmp_path / "hub"),
            "HF_ENDPOINT": hub.url,
        }
        done = newcomer.follow(folder, environment)
        assert hub.bodies(next(iter(hub.repos["ORG/REPO"])))
    assert [step.said for step in done if not step.worked] == []
    skipped = [step.said for step in done if step.kind == newcomer.SKIPPED]
    kinds = {step.kind for step in done} - {newcomer.SKIPPED}
    assert kinds == {"demo", "program", "command", "server"}
    assert newcomer.left_out(done) == []
    if skipped:
        pytest.skip("; ".join(skipped))
