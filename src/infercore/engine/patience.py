"""How long to wait for a child process, on machines that stand still or do much else."""

from __future__ import annotations

import os
import time

STEP_S = 0.5
_AT_MOST = 10  # times as long by the clock: a child may hardly work, or be stopped for good


class Patience:
    """Seconds that the process ``pid`` may work or sleep.

    Where the system tells (Linux), time does not count in which it was stopped, or ready to work
    while others had the processor; and nowhere does time in which this process stood still itself:
    a jump of the clock between two looks, as after the machine slept, counts as one step.
    """

    def __init__(self, pid: int, seconds: float) -> None:
        self._pid = pid
        self._left_s, self._clock_left_s = seconds, seconds * _AT_MOST
        self._looked_at, (_, self._worked_s) = time.monotonic(), _looked(pid)

    def is_spent(self) -> bool:
        """Count what went by since the last call, or since the beginning."""
        now, (state, worked_s) = time.monotonic(), _looked(self._pid)
        step_s = min(now - self._looked_at, 2 * STEP_S)
        used_s = worked_s - self._worked_s
        self._looked_at, self._worked_s = now, worked_s
        self._clock_left_s -= step_s
        if used_s > 0:
            self._left_s -= min(used_s, step_s)
        elif state not in ("R", "T"):
            self._left_s -= step_s
        return min(self._left_s, self._clock_left_s) <= 0


def _looked(pid: int) -> tuple[str, float]:
    """Return the letter of the process's state and its seconds of a processor; ("", 0) unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, *fields = file.read().rpartition(")")[2].split()
        return state, (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return "", 0.0
