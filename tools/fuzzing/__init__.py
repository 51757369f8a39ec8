"""The targets of ``tools/fuzz.py``: a module each.

A module has ``LIMIT_S``, the seconds that one case may take; ``BATCH``, how many cases run in one
child; and ``open_target()``, which returns a `Target` in the child, when its engines and files are
needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from random import Random


class Wrong(Exception):  # noqa: N818  (a finding, like a kill or a hang)
    """What was accepted, computed or kept is not what is right."""


class Target(Protocol):
    """**Protocol:** a kind of input, and what is done with it."""

    def case(self, random: Random) -> str | None:
        """Make one input from ``random`` and use it.

        A typed error may come out: it is counted, and is no finding. Raises `Wrong` where the
        result is false. Returns what is worth printing with ``--only``.
        """
