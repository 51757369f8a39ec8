"""The four distributions say the same of themselves, and what they say is true.

Building and installing them is shown by ``tox -e package``.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import infercore
from infercore.values import install

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "infercore": ROOT,
    "infercore-models": ROOT / "models",
    "infercore-llamacpp": ROOT / "plugins" / "llamacpp",
    "infercore-openvino": ROOT / "plugins" / "openvino",
    "infercore-ray": ROOT / "integrations" / "ray",
}
OF_PYTHON = re.compile(r"Programming Language :: Python :: (3\.\d+)$")


def test_addresses_are_those_of_one_constant() -> None:
    """[project.urls] cannot be computed, so it is compared; nobody invents an address."""
    stated = {name: read(folder).get("urls", {}) for name, folder in FOLDERS.items()}
    if not install.REPOSITORY:
        assert set(map(str, stated.values())) == {"{}"}
        return
    for urls in stated.values():
        assert urls
        assert all(url.startswith(install.REPOSITORY) for url in urls.values())


def read(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        pytest.skip(f"{folder.name} is a distribution of its own, not beside these tests")
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


@pytest.fixture(params=sorted(FOLDERS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(name: str) -> Path:
    return FOLDERS[name]


@pytest.fixture
def project(folder: Path) -> dict[str, Any]:
    return read(folder)


@pytest.fixture
def installed(name: str) -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")


def test_the_version_is_the_same_everywhere(name: str, project: dict[str, Any]) -> None:
    assert project["name"] == name
    assert project["version"] == read(ROOT)["version"] == infercore.__version__


def test_what_is_installed_has_that_version(installed: importlib.metadata.Distribution) -> None:
    assert installed.version == infercore.__version__
    module = importlib.import_module(installed.name.replace("-", "_"))
    assert getattr(module, "__version__", installed.version) == installed.version


def test_the_pythons_are_those_that_are_tested(project: dict[str, Any]) -> None:
    (tested,) = re.findall(r"core-py3\{([\d,]+)\}", (ROOT / "tox.ini").read_text())
    versions = [found[1] for line in project["classifiers"] if (found := OF_PYTHON.match(line))]
    assert versions == [f"3.{minor}" for minor in tested.split(",")]
    assert project["requires-python"] == f">={versions[0]}"


def test_the_licence_is_the_same_file(folder: Path, project: dict[str, Any]) -> None:
    assert (project["license"], project["license-files"]) == ("MIT", ["LICENSE"])
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert not [line for line in project["classifiers"] if line.startswith("License ::")]


def test_what_is_common_is_said_by_all(name: str, folder: Path, project: dict[str, Any]) -> None:
    core = read(ROOT)
    assert project["authors"] == core["authors"]
    assert set(core["classifiers"]) - set(project["classifiers"]) <= {
        "Topic :: Software Development :: Libraries :: Python Modules"
    }
    package = name.replace("-", "_")
    assert (folder / "src" / package / "py.typed").read_bytes() == b""
    readme = (folder / project["readme"]).read_text(encoding="utf-8")
    assert readme.startswith(f"# {name}\n")


def test_plugins_take_this_core(name: str, project: dict[str, Any]) -> None:
    needs = {Requirement(line).name: Requirement(line) for line in project["dependencies"]}
    if name in {"infercore", "infercore-models"}:
        assert not [need for need in needs if need.startswith("infercore")]
    else:
        assert infercore.__version__ in needs["infercore"].specifier
        assert SpecifierSet("<0.2") & needs["infercore"].specifier == needs["infercore"].specifier


def test_the_wheel_announces_what_the_project_says(
    project: dict[str, Any], installed: importlib.metadata.Distribution
) -> None:
    said = {("console_scripts", *item) for item in project.get("scripts", {}).items()}
    for group, entries in project.get("entry-points", {}).items():
        said |= {(group, *item) for item in entries.items()}
    assert {(entry.group, entry.name, entry.value) for entry in installed.entry_points} == said


def test_what_is_announced_can_be_loaded(installed: importlib.metadata.Distribution) -> None:
    for entry in installed.entry_points:
        assert entry.load() is not None


def test_the_source_distribution_holds_what_tests_read() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    held = set(config["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    assert all(part.startswith("/") for part in held)  # else it means such a folder at any depth
    needed = {"src", "tests", "docs", "examples", "benchmarks", "tools", "changelog", "tox.ini"}
    assert needed <= {part.removeprefix("/") for part in held}
    assert [part for part in held if not (ROOT / part.removeprefix("/")).exists()] == []
