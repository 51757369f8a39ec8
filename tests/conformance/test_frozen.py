"""A plugin of the first release goes on working unchanged: its code is kept as it was then."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import infercore
from infercore.conformance import check_backend, find_rig
from infercore.registry import default_registry

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent / "frozen"
ENTRIES = """[infercore.backends]
frozenlm = infercore_frozenlm.plugin
[infercore.conformance]
frozenlm = infercore_frozenlm.conformance:rig
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the plugin of then be installed beside today's infercore."""
    metadata = tmp_path / "infercore_frozenlm-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: infercore-frozenlm\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{HERE}")
    default_registry().refresh()
    yield
    for name in [name for name in sys.modules if name.startswith("infercore_frozenlm")]:
        del sys.modules[name]
    monkeypatch.undo()
    default_registry().refresh()


@pytest.mark.usefixtures("installed")
def test_a_plugin_of_the_first_release_keeps_every_law() -> None:
    report = check_backend(find_rig("frozenlm"))
    assert [(r.id, r.reason) for r in report.results if r.counts_as_failure] == []
    assert report.passed, report.problems
    with infercore.open_session(find_rig("frozenlm").path, backend="frozenlm") as session:
        assert session.generate("the villag", max_tokens=1, temperature=0) == "e"
