"""The tutorial shows what the example is, and its code runs; the example keeps every law."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import infercore
import pack
from infercore.cli.app import main
from infercore.registry import default_registry

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "third_party_backend"
TUTORIAL = ROOT / "docs" / "tutorial" / "write-a-backend.md"
SOURCES = {"src": EXAMPLE, "pyproject.toml": EXAMPLE, "infercore": ROOT / "src"}
SECOND_PART = "## The other end"
BLOCK = re.compile(r"(?:<!-- from: (\S+) -->\n)?```(\w+)\n(.*?)\n```", re.DOTALL)

pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples are not beside tests")


def blocks(part: int | None = None) -> list[tuple[str, str, str]]:
    """Return the blocks of the page: all, those about the example (0) or the reference (1)."""
    text = TUTORIAL.read_text(encoding="utf-8")
    return BLOCK.findall(text if part is None else text.split(SECOND_PART)[part])


def run(part: int) -> int:
    """Run the code of a part, as one module; return how many blocks there are."""
    names: dict[str, Any] = {"infercore": infercore}
    code = [text for path, language, text in blocks(part) if language == "python" and not path]
    for text in code:
        exec(compile(text, str(TUTORIAL), "exec"), names)  # noqa: S102  (the page's own code)
    return len(code)


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
    assert len(shown) >= 10
    for path, text in shown:
        folder = SOURCES[path.split("/")[0]]
        assert text in (folder / path).read_text(encoding="utf-8"), path


def test_its_code_runs(installed: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(0) == 3
    assert capsys.readouterr().out == "a\n"


def test_the_code_on_the_reference_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pack.need_pack()
    assert run(1) == 5
    assert capsys.readouterr().out == "offload_kqv=True\nsession\n"


def test_the_table_names_every_file_of_the_reference() -> None:
    """But for what is about something else: the toy, faults, limits, and how it is announced."""
    named = set(re.findall(r"`(\w+\.py)`", TUTORIAL.read_text(encoding="utf-8")))
    there = {path.name for path in (ROOT / "src" / "infercore" / "testing").glob("*.py")}
    others = {"__init__.py", "toy.py", "faults.py", "limits.py", "reference.py"}
    assert named == there - others


def test_its_command_is_the_one_that_tox_runs() -> None:
    """Its laws take half a minute, and run as tests below."""
    commands = [text for _, language, text in blocks(0) if language == "bash"]
    assert commands[0] == "infercore conformance tablelm"
    assert f"{commands[0]} {{posargs}}" in (ROOT / "tox.ini").read_text(encoding="utf-8")


def test_its_command_works(installed: None) -> None:
    done = CliRunner().invoke(main, ["conformance", "tablelm", "--only", "DEC-*"])
    assert done.exit_code == 0, done.output
    assert re.search(r"tablelm: passed \(\d\d ok", done.output)


@pytest.mark.timeout(600)
def test_its_pytest_command_passes(installed: None, tmp_path: Path) -> None:
    commands = [text for _, language, text in blocks() if language == "bash"]
    (command,) = (text for text in commands if text.startswith("pytest "))
    arguments = [*command.split()[1:], "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"[12]\d\d passed", done.stdout)


def test_the_backend_is_short() -> None:
    source = EXAMPLE / "src" / "infercore_tablelm"
    assert len((source / "backend.py").read_text().splitlines()) < 300
