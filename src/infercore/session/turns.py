"""Calls that tasks await: done in threads, one after the other, and stopped with their task."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future, ThreadPoolExecutor

T = TypeVar("T")


class Turns:
    """Runs the calls of one object in threads of ``executor()``, in the order they came.

    ``stop`` ends the call that runs; it is asked again until the call has ended. ``rest`` is called
    in the thread after each call: the next one may come in another thread.
    """

    def __init__(
        self,
        executor: Callable[[], ThreadPoolExecutor],
        stop: Callable[[], object],
        rest: Callable[[], object],
    ) -> None:
        self._executor = executor
        self._stop = stop
        self._rest = rest
        self._last: asyncio.Future[None] | None = None  # what the next call has to wait for

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` after the calls before it; a task that is cancelled stops it."""
        loop = asyncio.get_running_loop()
        before, mine = self._last, loop.create_future()
        self._last = mine
        try:
            if before is not None:
                await asyncio.shield(before)
            return await self._in_thread(work)
        finally:
            if before is None or before.done():
                _settle(mine)
            else:  # cancelled while it waited: who comes next waits for those before
                before.add_done_callback(lambda _: _settle(mine))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        job = self._executor().submit(self._one, work)
        future = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not job.cancel():
                await self._stopped(job, future)
            raise

    def _one(self, work: Callable[[], T]) -> T:
        try:
            return work()
        finally:
            self._rest()

    async def _stopped(self, job: Future[Any], done: asyncio.Future[Any]) -> None:
        """Stop until ``job`` is done, however often the task is cancelled meanwhile."""
        while not job.done():
            self._stop()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({done}, timeout=0.05)
        with suppress(asyncio.CancelledError):
            await asyncio.wait({done})
        if done.done() and not done.cancelled():
            done.exception()  # taken, so that it is not reported as lost


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
