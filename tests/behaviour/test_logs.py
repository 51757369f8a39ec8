"""Engines are silent; their lines go to `logging`, and the last ones ride on errors."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
import logging, sys
import infercore as ic
backend, path, level = sys.argv[1:]
if level:
    logging.basicConfig(level=level, format="%(name)s|%(message)s")
with ic.load_model(path, backend=backend) as model, model.new_context(n_ctx=64) as context:
    context.decode([5, 6, 7])
"""


def said(backend: str, path: Path, level: str) -> list[str]:
    command = [sys.executable, "-c", SOURCE, backend, str(path), level]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_nothing_is_said_unless_asked(backend_name: str, pack_path: Path) -> None:
    assert said(backend_name, pack_path, "") == []


def test_lines_go_to_a_logger_named_for_the_backend(backend_name: str, pack_path: Path) -> None:
    lines = said(backend_name, pack_path, "DEBUG")
    assert any(line.startswith(f"infercore.{backend_name}|") for line in lines)


def test_an_error_brings_the_engines_last_lines(
    backend_name: str, pack_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if backend_name == "openvino":
        pytest.skip("this engine keeps no log; its exception is the cause")
    path = tmp_path / "short.gguf"
    path.write_bytes(pack_path.read_bytes()[:300_000])
    with (
        caplog.at_level(logging.DEBUG, logger="infercore.llamacpp"),
        pytest.raises(ic.ModelFormatError) as caught,
    ):
        ic.load_model(path, backend=backend_name)
    (note,) = caught.value.__notes__
    assert note.startswith("llama.cpp said:")
    last = note.splitlines()[-1].strip()
    assert last in [record.message for record in caplog.records]


def test_an_engine_without_a_log_raises_from_its_own_error(
    backend_name: str, pack_path: Path, tmp_path: Path
) -> None:
    if backend_name != "openvino":
        pytest.skip("this engine has a log instead")
    import shutil

    target = tmp_path / "model"
    shutil.copytree(pack_path, target)
    graph = target / "openvino_model.xml"
    graph.write_text(graph.read_text().replace('type="MatMul"', 'type="MatMal"'))
    with pytest.raises(ic.ModelFormatError) as caught:
        ic.load_model(target, backend=backend_name)
    cause: Any = caught.value.__cause__
    assert "MatMal" in str(cause)
