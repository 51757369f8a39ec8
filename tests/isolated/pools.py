"""Pools whose engine lives in a process of its own, which tests may kill."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).parents[1] / "session"))

import kill_cases

if TYPE_CHECKING:
    from collections.abc import Callable

FIELDS = {"n_threads": 1, "n_threads_batch": 1}
HERE = {**kill_cases.POOL, **FIELDS}
ISOLATED = {**HERE, **kill_cases.LIMITS}
"""Fields of the same pool in a process of its own."""
SECONDS = 60.0
TEXTS = ("Once upon a time", "The baker had a dog", "A little girl", "tick tock tick tock")


def told(session: Any, text: str = TEXTS[0], n: int = 24, **fields: Any) -> list[int]:
    session.ensure_prefix(text)
    return [t for chunk in session.decode(max_tokens=n, **fields) for t in chunk.tokens]


def told_here(plain: Any, *args: Any, **fields: Any) -> list[int]:
    with plain.open_session() as session:
        return told(session, *args, **fields)


def kill(pool: Any, name: str = "SIGKILL") -> None:
    os.kill(pool.process.pid, getattr(signal, name))


def wait_until(holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)
