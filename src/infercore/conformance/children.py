"""Laws that need another process: its rig is found there by name."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from infercore.conformance.expect import LawError

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig

TIMEOUT_S = 60
_SETUP = """
import sys
from infercore.conformance import find_rig
name, model, *arguments = sys.argv[1:]
rig = find_rig(name, model=model or None)
"""


def run(rig: Rig, source: str, *arguments: str, before: str = "") -> str:
    """Return what ``source`` prints in another process, where ``rig`` and ``arguments`` are set.

    It runs ``before`` first of all.

    Raises `NotApplicable` where the rig cannot be found by name, `LawError` where the process
    fails, hangs, or writes to standard error.
    """
    if rig.child is None:
        rig.leave("the rig is not announced, so no other process can find it")
    name, model = rig.child
    command = [sys.executable, "-W", "ignore", "-c", before + _SETUP + source, name, model or ""]
    try:
        done = subprocess.run(  # noqa: S603  (this Python, and a program of the suite's own)
            [*command, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LawError(f"the other process did not end within {TIMEOUT_S} s") from error
    if done.returncode or done.stderr:
        raise LawError(f"the other process ended with {done.returncode}: {done.stderr[-1000:]}")
    return done.stdout
