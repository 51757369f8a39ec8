"""Waiting, in tests, for what other threads do."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import infercore as ic

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 60.0


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.001)


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """Return what each of ``works`` returns, all of them begun at once."""
    found: list[Any] = [None] * len(works)

    def do(i: int) -> None:
        try:
            found[i] = works[i]()
        except BaseException as error:  # noqa: BLE001  (the test looks at it)
            found[i] = error

    threads = [threading.Thread(target=do, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a call of a pool hangs"
    return found


def in_error(work: Callable[[], Any]) -> BaseException | None:
    try:
        work()
    except ic.InferCoreError as error:
        return error
    return None
