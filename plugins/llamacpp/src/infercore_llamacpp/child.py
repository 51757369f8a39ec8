"""Running a module of this package in a process of its own, where the engine may die."""

from __future__ import annotations

import os
import subprocess
import sys


def run(module: str, *arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run ``module`` in a child process that imports what this one can; return how it ended.

    Raises OSError where there is none to be had, `subprocess.TimeoutExpired` after ``seconds``.
    """
    if not sys.executable:
        raise FileNotFoundError("this Python is embedded in a program and has no executable")
    command = [sys.executable, "-m", module, *arguments]
    path = os.pathsep.join(str(entry) for entry in sys.path if entry)
    return subprocess.run(  # noqa: S603  (our own module, in our own interpreter)
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
