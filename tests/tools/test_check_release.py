"""A tag is a release only where versions and changelog agree with it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "check_release.py"))
CHANGELOG = (
    "# Changelog\n\n## 1.2.3 (2030-01-02)\n\n- Better.\n\n## 1.2.2 (2029-01-02)\n\n- Good.\n"
)


@pytest.fixture
def root(tmp_path):
    for folder in TOOL["FOLDERS"]:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "changelog").mkdir()
    (tmp_path / "changelog" / "README.md").write_text("how to")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def test_a_release(root):
    assert TOOL["faults"]("v1.2.3", root) == []
    assert TOOL["section"](root, "1.2.3") == "- Better."
    assert TOOL["section"](root, "1.2.2") == "- Good."


@pytest.mark.parametrize("tag", ["1.2.3", "v1.2", "v1.2.3rc1", "vx"])
def test_what_is_no_tag_of_a_release(root, tag):
    assert TOOL["faults"](tag, root) == [f"{tag!r} is not vX.Y.Z"]


def test_all_that_is_wrong_is_named(root):
    (root / "models" / "pyproject.toml").write_text('version = "1.2.2"\n')
    (root / "changelog" / "5.fix.md").write_text("Fixed.")
    (root / "CHANGELOG.md").write_text("# Changelog\n")
    wrong = TOOL["faults"]("v1.2.3", root)
    assert [text.split()[0] for text in wrong] == [
        "models/pyproject.toml",
        "changelog/",
        "CHANGELOG.md",
    ]


@pytest.mark.skipif(not (ROOT / "plugins").is_dir(), reason="this is the core's distribution alone")
def test_this_checkout_states_one_version():
    stated = {TOOL["version"](ROOT / folder / "pyproject.toml") for folder in TOOL["FOLDERS"]}
    assert len(stated) == 1
