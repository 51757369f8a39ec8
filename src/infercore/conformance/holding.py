"""Holding a call in its middle, and letting threads meet, for laws about threads."""

from __future__ import annotations

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from infercore.conformance.expect import that

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S = 20.0
"""How long anything is waited for."""


class Held:
    """An abort callback that holds the first call until it is let go, and never aborts."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()

    def __call__(self) -> bool:
        """Wait, the first time."""
        if not self.entered.is_set():
            self.entered.set()
            self.go.wait(PATIENCE_S)
        return False


def while_held(held: Held, work: Callable[[], object], then: Callable[[], object]) -> None:
    """Run ``work`` in a thread, and ``then`` here while ``held`` holds it.

    Raises what ``then`` raises, and after it what ``work`` raises.
    """
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(work)
        try:
            that(held.entered.wait(PATIENCE_S), "the abort callback was never asked")
            then()
        finally:
            held.go.set()
        running.result(PATIENCE_S)


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    """Let Python switch between threads as often as it can, so that they meet."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
