"""The pictures of the command line show what a terminal would."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("fcntl", reason="needs a terminal of Unix")
TOOL = Path(__file__).parents[2] / "tools" / "record.py"


@pytest.fixture(scope="module")
def record():
    if not TOOL.exists():
        pytest.skip("tools/ is not here")
    spec = importlib.util.spec_from_file_location("record", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("one\r\ntwo", "one\ntwo"),
        ("loading 10%\rloading 90%\r\x1b[2Kdone", "done"),
        ("bar\r\n\x1b[1A\r\x1b[2Ktext", "text"),
        ("ab\b\x1b[Kc", "ac"),
        ("\x1b[?2004h>>> hi\x1b[?2004l", ">>> hi"),
        ("\x1b[31mno\x1b[0m", "\x1b[31mn\x1b[0m\x1b[31mo\x1b[0m"),
        ("title\x1b]0;x\x07", "title"),
    ],
)
def test_what_a_terminal_shows(record, output, shown) -> None:
    screen = record.Screen()
    screen.feed(output)
    assert screen.text() == shown


def test_a_picture_needs_nothing_from_elsewhere(record) -> None:
    recording = record.Recording("infercore --version", ("--version",), 60)
    svg = record.picture(record.record(recording), recording)
    assert "infercore" in svg
    assert "@font-face" not in svg
    assert svg.count("http") == 1  # the name of SVG itself
    assert sys.modules.get("record") is None
