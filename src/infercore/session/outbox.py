"""What a step made for its readers, handed over at its end."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from infercore.session.jobs import Generating, Item


class Outbox:
    """Keeps items until all of a step are there.

    A reader that wakes while others are still being served takes the interpreter.
    """

    def __init__(self) -> None:
        self._given: list[tuple[Generating, Item]] = []
        self._notices: dict[asyncio.AbstractEventLoop, list[Callable[[], object]]] = {}

    def give(self, job: Generating, item: Item) -> None:
        """Give the reader of ``job`` an item at the end of the step."""
        job.note(item)
        self._given.append((job, item))

    def notify(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
        """Let ``loop`` call ``callback`` at the end of the step: one call of a loop a step."""
        self._notices.setdefault(loop, []).append(callback)

    def send(self) -> None:
        """Let the readers have what was made for them."""
        if self._given:
            given, self._given = self._given, []
            for job, item in given:
                job.give(item)
        if self._notices:
            notices, self._notices = self._notices, {}
            for loop, callbacks in notices.items():
                with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                    loop.call_soon_threadsafe(_call_all, callbacks)


def _call_all(callbacks: list[Callable[[], object]]) -> None:
    for callback in callbacks:
        callback()
