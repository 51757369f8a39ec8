"""The files that an operator copies, read by the tools that read such files."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_the_unit_of_systemd(tmp_path: Path) -> None:
    verifier = shutil.which("systemd-analyze")
    if verifier is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / "infercore.service"
    text = (DEPLOY / unit.name).read_text("utf-8")
    assert "/opt/infercore/bin/infercore serve" in text
    unit.write_text(text.replace("/opt/infercore/bin/infercore", "/bin/true"), "utf-8")
    done = subprocess.run(
        [verifier, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_container_file() -> None:
    beside = Path(sysconfig.get_path("scripts")) / "hadolint"
    linter = str(beside) if beside.exists() else shutil.which("hadolint")
    if linter is None:
        pytest.skip("needs hadolint")
    done = subprocess.run(
        [linter, str(DEPLOY / "Containerfile")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
