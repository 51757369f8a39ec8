"""A folder of fake plugins on ``sys.path``, and a registry that sees nothing else."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import pytest

import fake_plugin
from infercore.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Install fake plugins: ``install(name, source, ...)`` as `fake_plugin.install`."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    for variable in ("INFERCORE_DISABLE_PLUGINS", "INFERCORE_PLUGINS", "INFERCORE_BACKEND"):
        monkeypatch.delenv(variable, raising=False)
    yield functools.partial(fake_plugin.install, site)
    for name in [name for name in sys.modules if name.startswith("fake_plugin_")]:
        del sys.modules[name]


@pytest.fixture
def registry(install: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Registry:
    """Return a registry to which only distributions in ``install``'s folder are visible."""
    import importlib.metadata

    every = importlib.metadata.distributions
    monkeypatch.setattr(
        importlib.metadata, "distributions", lambda: every(path=[str(tmp_path / "site")])
    )
    return Registry()
