"""Without the extra `cli` the library works, and the command says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"click", "rich", "psutil"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, check=False
    )


def test_the_command_says_what_to_install() -> None:
    ended = python("from infercore.cli import main; main(['--help'])")
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: the command line needs the package click; "
        "run: pip install '.[cli]' (in a checkout of infercore)\n"
    )


@pytest.mark.parametrize("module", ["infercore", "infercore.conformance", "infercore.testing"])
def test_the_library_needs_none_of_it(module) -> None:
    ended = python(f"import {module} as ic; getattr(ic, 'backends', list)()")
    assert (ended.returncode, ended.stderr) == (0, "")
