"""The hub's stand-in, with a cache and settings of the test's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hub_server import Hub

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def settings_folder(tmp_path: Path, monkeypatch) -> Path:
    folder = tmp_path / "config"
    monkeypatch.setenv("INFERCORE_CONFIG_DIR", str(folder))
    monkeypatch.delenv("INFERCORE_MODEL", raising=False)
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch) -> Iterator[Hub]:
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs .[hub]")
    with Hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        file_download = pytest.importorskip("huggingface_hub.file_download")
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        for module in (constants, file_download):  # where versions before 1 have it
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
