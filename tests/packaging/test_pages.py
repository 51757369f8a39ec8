"""What stands at the root of the repository and of each distribution is true."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click
import pytest

from infercore.cli.app import main

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
READMES = sorted(
    path
    for pattern in ("*.md", "*/README.md", "plugins/*/README.md", "examples/*/README.md")
    for path in ROOT.glob(pattern)
    if not path.parent.name.startswith(".")
)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
ENVIRONMENT = re.compile(r"^\[testenv:([^\]]+)\]", re.MULTILINE)


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    links = LINK.findall(path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.skipif(
    not (ROOT / "CONTRIBUTING.md").is_file(), reason="a source distribution has none"
)
def test_contributing_names_every_environment_of_tox() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z0-9*-]+)`", page))
    groups = ENVIRONMENT.findall((ROOT / "tox.ini").read_text(encoding="utf-8"))
    missing = [group for group in groups if not named & ways_to_name(group)]
    assert missing == []


def ways_to_name(group: str) -> set[str]:
    """Return what names ``group``: ``example`` itself, ``core`` or ``core*`` for ``core{...}``."""
    stem = group.partition("{")[0]
    return {group, stem, f"{stem}*"}


def test_the_readme_names_every_folder() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for folder in ("src/infercore", "tests", "docs", "examples", "benchmarks", "tools"):
        assert f"| `{folder}` |" in readme


def test_the_readme_names_every_command_and_only_options_there_are() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    context = click.Context(main)
    for name in main.list_commands(context):
        assert re.search(rf"\binfercore {name}\b|`{name}`", readme), name
    for name, rest in re.findall(r"^infercore (\w+)([^#\n]*)", readme, re.MULTILINE):
        command = main.get_command(context, name)
        assert command is not None, name
        options = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= options


def test_fragments_of_the_changelog_are_well_formed() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    kinds = "|".join(kind["directory"] for kind in config["tool"]["towncrier"]["type"])
    fragments = [path for path in (ROOT / "changelog").iterdir() if path.name != "README.md"]
    for path in fragments:
        assert re.fullmatch(rf"\d+\.({kinds})(\.\d+)?\.md", path.name), path.name
        for line in path.read_text(encoding="utf-8").splitlines():
            assert re.match(r"[A-Z`].+\.$", line), f"{path.name}: {line}"


def test_products_of_builds_are_ignored() -> None:
    path = ROOT / ".gitignore"
    ignored = set(path.read_text(encoding="utf-8").split())
    assert {"build/", "dist/", "*.egg-info/", "__pycache__/", ".venv/", ".tox/", "*.py[co]"} <= (
        ignored
    )
