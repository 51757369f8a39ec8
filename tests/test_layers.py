"""Plugins are written against the public names alone, as those of third parties are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import infercore

ROOT = Path(__file__).parents[1]
PLUGINS = sorted((ROOT / "plugins").glob("*/src/**/*.py"))
PUBLIC_MODULES = {
    "infercore",
    "infercore.conformance",
    "infercore.testing",
    *(f"infercore.weight_files{part}" for part in ("", ".gguf", ".lora", ".safetensors")),
}


def foreign_imports(source: str) -> list[str]:
    """Return what ``source`` takes from infercore beyond its public names."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if not _is_public_module(name.name)]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found += _foreign_names(node)
        elif isinstance(node, ast.Attribute) and _is_infercore(node.value):
            found += _not_public(node.attr)
    return found


def _is_infercore(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in {"infercore", "ic"}


def _is_public_module(module: str) -> bool:
    return module in PUBLIC_MODULES or module.split(".", maxsplit=1)[0] != "infercore"


def _foreign_names(node: ast.ImportFrom) -> list[str]:
    module = node.module or ""
    if module == "infercore":
        return [text for name in node.names for text in _not_public(name.name)]
    return [] if _is_public_module(module) else [module]


def _not_public(name: str) -> list[str]:
    public = {*infercore.__all__, "testing", "conformance", "__version__"}
    return [] if name in public else [f"infercore.{name}"]


@pytest.mark.skipif(not PLUGINS, reason="the plugins' sources are not beside these tests")
def test_plugins_import_public_names_only() -> None:
    foreign = {
        str(path.relative_to(ROOT)): found
        for path in PLUGINS
        if (found := foreign_imports(path.read_text(encoding="utf-8")))
    }
    assert foreign == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import infercore as ic\nic.hookimpl", []),
        ("from infercore import hookimpl, ModelInfo", []),
        ("import numpy\nfrom . import library", []),
        ("from infercore.testing import anything", []),
        ("from infercore.engine import gate", ["infercore.engine"]),
        ("import infercore.values.checks", ["infercore.values.checks"]),
        ("from infercore import errors", ["infercore.errors"]),
        ("import infercore\ninfercore.values", ["infercore.values"]),
    ],
)
def test_the_check_sees_what_it_must(source: str, found: list[str]) -> None:
    assert foreign_imports(source) == found
