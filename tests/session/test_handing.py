"""News for other threads and loops, gathered and handed over at once."""

from __future__ import annotations

import asyncio
from typing import Any

from infercore.session.handing import gathering, in_turn, send_once, tell_loop


class Loop:
    """Counts how often it is woken."""

    def __init__(self) -> None:
        self.n_woken = 0

    def call_soon_threadsafe(self, callback: Any, *args: Any) -> None:
        self.n_woken += 1
        callback(*args)


class Future:
    result: Any = ...

    def done(self) -> bool:
        return self.result is not ...

    def set_result(self, result: Any) -> None:
        self.result = result


def test_a_loop_is_woken_once_for_all_news() -> None:
    loop: Any = Loop()
    futures: list[Any] = [Future() for _ in range(8)]
    with gathering() as hand_over:
        for future in futures[:4]:
            tell_loop(loop, future)
        assert not any(future.done() for future in futures)
        hand_over()
        assert [future.done() for future in futures] == [True] * 4 + [False] * 4
        for future in futures[4:]:
            tell_loop(loop, future)
    assert all(future.done() for future in futures)
    assert loop.n_woken == 2
    tell_loop(loop, Future())  # type: ignore[arg-type]
    assert loop.n_woken == 3, "nothing is kept behind the block"


def test_a_loop_that_is_closed_holds_up_no_other() -> None:
    class Closed(Loop):
        def call_soon_threadsafe(self, callback: Any, *args: Any) -> None:
            raise RuntimeError

    closed: Any = Closed()
    other: Any = Loop()
    with gathering():
        tell_loop(closed, Future())  # type: ignore[arg-type]
        tell_loop(other, Future())  # type: ignore[arg-type]
    assert other.n_woken == 1


def test_what_is_sent_goes_with_what_other_tasks_send() -> None:
    sent: list[int] = []
    waiting: list[int] = []

    def send() -> None:
        if waiting:
            sent.append(len(waiting))
            waiting.clear()

    def ask() -> None:
        waiting.append(1)
        send_once(send)

    async def story() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(3):
            in_turn(loop, ask)
        assert not sent
        await asyncio.sleep(0)

    asyncio.run(story())
    ask()
    assert sent == [3, 1]
    with gathering():
        ask()
        ask()
    assert sent == [3, 1, 2]
