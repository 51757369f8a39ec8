"""What a thread hands to others, once for all that it has for them.

To wake another thread, a loop or a process costs more than what is handed over. So who has news
for many gathers it first.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

T = TypeVar("T")


class _Gathered(threading.local):
    """What the calling thread has gathered; None where it hands over everything at once."""

    loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] | None = None
    sends: list[Callable[[], object]] | None = None
    turn: asyncio.AbstractEventLoop | None = None


_gathered = _Gathered()


def tell_loop(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    """Let ``loop`` know that what ``future`` waits for has come; from any thread."""
    loops = _gathered.loops
    if loops is None:
        _wake(loop, [future])
    else:
        loops.setdefault(loop, []).append(future)


def send_once(send: Callable[[], object]) -> None:
    """Call ``send``, which sends what is there: once for all that this thread gathers."""
    turn, sends = _gathered.turn, _gathered.sends
    if turn is not None:
        turn.call_soon(send)
    elif sends is None:
        send()
    elif send not in sends:
        sends.append(send)


def in_turn(loop: asyncio.AbstractEventLoop, work: Callable[[], T]) -> T:
    """Return what ``work`` returns; what it sends goes with what other tasks of ``loop`` send.

    For a task of that loop, which must not wait for an answer before its next turn.
    """
    _gathered.turn = loop
    try:
        return work()
    finally:
        _gathered.turn = None


@contextmanager
def gathering() -> Iterator[Callable[[], None]]:
    """Gather what this thread has for others until the block ends, or what it gives is called."""
    _gathered.loops, _gathered.sends = {}, []
    try:
        yield _hand_over
    finally:
        _hand_over()
        _gathered.loops = _gathered.sends = None


def _hand_over() -> None:
    loops, sends = _gathered.loops, _gathered.sends
    if loops:
        _gathered.loops = {}
        for loop, futures in loops.items():
            _wake(loop, futures)
    if sends:
        _gathered.sends = []
        for send in sends:
            send()


def _wake(loop: asyncio.AbstractEventLoop, futures: list[asyncio.Future[None]]) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody is left to hear
        loop.call_soon_threadsafe(_set_all, futures)


def _set_all(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
