"""Type checkers report each wrong call, and nothing in a program that is right.

Runs where mypy and pyright are installed (``tox -e type``, which fails without them).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "cases"
WRONG, RIGHT = CASES / "wrong_calls.py", CASES / "right_program.py"
REQUIRED = bool(os.environ.get("INFERCORE_REQUIRE_TYPE_CHECKERS"))


def need(checker):
    if importlib.util.find_spec(checker) is None:
        reason = f"{checker} is not installed; it comes with the extra 'type'"
        (pytest.fail if REQUIRED else pytest.skip)(reason)


def with_mypy(folder):
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--config-file="]
    command += ["--cache-dir", str(folder), str(WRONG), str(RIGHT)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    return re.findall(r"^(.*?):(\d+): error: (.*)$", run.stdout, re.MULTILINE)


def with_pyright(folder):
    shutil.copytree(CASES, folder / "cases")  # a project takes only what lies below it
    config = {"include": ["cases"], "reportUnnecessaryComparison": "error"}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    run = subprocess.run(
        [*command, "--project", str(folder)], capture_output=True, text=True, check=False
    )
    answer = json.loads(run.stdout)
    assert answer["summary"]["filesAnalyzed"] == len((WRONG, RIGHT)), run.stderr
    found = answer["generalDiagnostics"]
    return [
        (one["file"], one["range"]["start"]["line"] + 1, one["message"])
        for one in found
        if one["severity"] == "error"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("check", [with_mypy, with_pyright])
def test_wrong_calls_are_reported_and_right_ones_are_not(check, tmp_path):
    need(check.__name__.removeprefix("with_"))
    found = check(tmp_path)
    marked = {
        number
        for number, line in enumerate(WRONG.read_text().splitlines(), 1)
        if line.endswith("# wrong")
    }
    reported = {int(line) for path, line, _ in found if path.endswith(WRONG.name)}
    assert len(marked) > 90
    assert reported == marked
    assert [one for one in found if one[0].endswith(RIGHT.name)] == []
