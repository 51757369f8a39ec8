"""The tutorial shows what the example is, and its code runs; the example keeps every law."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from infercore.cli import main
from infercore.registry import default_registry

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "third_party_backend"
TUTORIAL = ROOT / "docs" / "tutorial" / "write-a-backend.md"
BLOCK = re.compile(r"(?:<!-- from: (\S+) -->\n)?```(\w+)\n(.*?)\n```", re.DOTALL)

pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples are not beside tests")


def blocks() -> list[tuple[str, str, str]]:
    return BLOCK.findall(TUTORIAL.read_text(encoding="utf-8"))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the example be installed: its packages on the path, its entry points announced."""
    metadata = tmp_path / "infercore_tablelm-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: infercore-tablelm\nVersion: 0.1.0\n"
    )
    project = (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")
    groups = re.findall(r'\[project\.entry-points\."(.+)"\]\n(\w+) = "(.+)"', project)
    entries = [f"[{group}]\n{name} = {value}\n" for group, name, value in groups]
    (metadata / "entry_points.txt").write_text("".join(entries))
    monkeypatch.syspath_prepend(str(EXAMPLE / "src"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{EXAMPLE / 'src'}")
    default_registry().refresh()
    yield
    monkeypatch.undo()
    for name in [name for name in sys.modules if name.startswith("infercore_tablelm")]:
        del sys.modules[name]
    default_registry().refresh()


def test_what_is_shown_is_what_is_there() -> None:
    shown = [(path, text) for path, _, text in blocks() if path]
    assert len(shown) >= 6
    for path, text in shown:
        assert text in (EXAMPLE / path).read_text(encoding="utf-8"), path


def test_its_code_runs(installed: None, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    code = [text for path, language, text in blocks() if language == "python" and not path]
    assert len(code) == 3
    for text in code:
        exec(compile(text, str(TUTORIAL), "exec"), names)  # noqa: S102  (the page's own code)
    assert capsys.readouterr().out == "a\n"


def test_its_command_passes(installed: None) -> None:
    commands = [text for _, language, text in blocks() if language == "bash"]
    assert commands[0] == "infercore conformance tablelm"
    done = CliRunner().invoke(main, commands[0].split()[1:])
    assert done.exit_code == 0, done.output
    assert re.search(r"tablelm: passed \(1\d\d ok", done.output)


def test_the_backend_is_short() -> None:
    source = EXAMPLE / "src" / "infercore_tablelm"
    assert len((source / "backend.py").read_text().splitlines()) < 300
