"""Waiting, in tests, for what another thread does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 60.0


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.001)
