"""The targets of ``tools/fuzz.py``: a module each.

A module has ``LIMIT_S``, the seconds that one case may take; ``BATCH``, how many cases run in one
child; and ``open_target()``, which returns a `Target` in the child, when its engines and files are
needed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from random import Random


class Wrong(Exception):  # noqa: N818  (a finding, like a kill or a hang)
    """What was accepted, computed or kept is not what is right."""


class Patience:
    """Seconds to wait, of which those do not count in which the whole machine was stopped.

    A jump of the clock between two looks counts as one step: who was stopped himself cannot say
    that another hung.
    """

    _STEP_S = 0.5

    def __init__(self, limit_s: float) -> None:
        self.left_s = limit_s
        self._last = time.monotonic()

    def step_s(self) -> float:
        """Return how long to wait until the next look."""
        self._last = time.monotonic()
        return min(self._STEP_S, max(0.0, self.left_s))

    def spend(self) -> None:
        """Count what went by since `step_s`."""
        self.left_s -= min(time.monotonic() - self._last, 2 * self._STEP_S)


class Target(Protocol):
    """**Protocol:** a kind of input, and what is done with it."""

    def case(self, random: Random) -> str | None:
        """Make one input from ``random`` and use it.

        A typed error may come out: it is counted, and is no finding. Raises `Wrong` where the
        result is false. Returns what is worth printing with ``--only``.
        """
