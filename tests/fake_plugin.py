"""Fake installed plugins: real distributions, as an installer would leave them on the path."""

from __future__ import annotations

import itertools
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """
import types
import infercore

@infercore.hookimpl
def infercore_backend():
    return types.SimpleNamespace(
        name={name!r},
        api_version={api_version},
        match=lambda path: {score},
        loader=lambda path, config: None,
        formats={formats!r},
        priority={priority},
    )
"""

_numbers = itertools.count()


def good(
    name: str,
    *,
    score: str = "1",
    priority: int = 0,
    api_version: object = 1,
    formats: tuple[str, ...] = ("fake",),
) -> str:
    """Return the source of a plugin that works; ``score`` is an expression over ``path``."""
    return GOOD.format(
        name=name, score=score, priority=priority, api_version=api_version, formats=formats
    )


def install(
    site: Path,
    name: str,
    source: str,
    *,
    distribution: str | None = None,
    version: str = "1.0",
    entry_points: str | None = None,
) -> str:
    """Put a distribution with one plugin into the folder ``site``; return its module's name."""
    module = f"fake_plugin_{next(_numbers)}"
    distribution = distribution or f"infercore-{name}"
    (site / f"{module}.py").write_text(textwrap.dedent(source), encoding="utf-8")
    metadata = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n", encoding="utf-8"
    )
    if entry_points is None:
        entry_points = f"[infercore.backends]\n{name} = {module}\n"
    (metadata / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    return module
