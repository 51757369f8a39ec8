"""Streams that were cancelled and are not read to their end: the next call ends them."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

THREADS = {"n_threads": 1, "n_threads_batch": 1}
GREEDY = {"temperature": 0, "ignore_eos": True}
FIRST, SECOND = "Once upon a time", "A little dog went to the park"


@pytest.fixture(params=["alone", "pool", "isolated"])
def home(request: pytest.FixtureRequest) -> str:
    if request.param == "isolated" and os.name != "posix":
        pytest.skip("isolation needs POSIX")
    return str(request.param)


@pytest.fixture
def opened(home: str, model: Any, pack_path: Path, backend_name: str) -> Iterator[Any]:
    """Return what opens a session, given fields of its pool."""
    pools: dict[str, Any] = {}

    def open_session(**fields: Any) -> Any:
        if home == "alone":
            return ic.open_session(model, n_ctx=128, **THREADS)
        isolate = home == "isolated"
        source, name = (pack_path, backend_name) if isolate else (model, None)
        given = {"n_parallel": 2, "n_ctx": 128, **THREADS, **fields}
        if str(fields) not in pools:
            pools[str(fields)] = ic.open_pool(source, backend=name, isolate=isolate, **given)
        return pools[str(fields)].open_session()

    yield open_session
    for pool in pools.values():
        pool.close()


def tokens(session: Any, n: int) -> list[int]:
    return [t for chunk in session.decode(max_tokens=n, **GREEDY) for t in chunk.tokens]


def expected(session: Any, text: str, n: int) -> list[int]:
    session.ensure_prefix(text)
    return tokens(session, n)


def test_the_next_call_ends_a_cancelled_stream(opened: Any) -> None:
    with opened() as session:
        rest = expected(session, SECOND, 6)
        session.ensure_prefix(FIRST)
        stream = session.decode(max_tokens=50, **GREEDY)
        shown = [*next(stream).tokens, *next(stream).tokens]
        with pytest.raises(ic.SessionBusyError):
            session.snapshot()
        session.cancel()
        session.snapshot()
        assert session.explain_context().generated_tokens == len(shown)
        assert list(stream) == []
        assert expected(session, SECOND, 6) == rest


def test_a_cancelled_stream_goes_on_where_it_was(opened: Any) -> None:
    with opened() as session:
        whole = expected(session, FIRST, 8)
        session.ensure_prefix(FIRST)
        stream = session.decode(max_tokens=50, **GREEDY)
        shown = [*next(stream).tokens, *next(stream).tokens]
        session.cancel()
        assert shown + tokens(session, 8 - len(shown)) == whole
        assert list(stream) == []


def test_without_a_call_a_cancelled_stream_tells_its_end(opened: Any) -> None:
    with opened() as session:
        session.ensure_prefix(FIRST)
        stream = session.decode(max_tokens=50, **GREEDY)
        next(stream)
        session.cancel()
        assert [chunk.finish_reason for chunk in stream][-1] == "cancelled"


class LateGate:
    """Lets another call come first, once, before a reader that is on its way in."""

    def __init__(self, gate: Any, before: Callable[[], object]) -> None:
        self._gate = gate
        self._before = before

    def __enter__(self) -> None:
        self._before()
        self._gate.__enter__()

    def __exit__(self, *error: object) -> None:
        self._gate.__exit__(*error)


@pytest.mark.parametrize("ends", ["cancel", "close"])
def test_a_reader_that_comes_late_changes_nothing(opened: Any, home: str, ends: str) -> None:
    with opened() as session:
        whole = expected(session, SECOND, 6)
        session.ensure_prefix(FIRST)
        stream = session.decode(max_tokens=50, **GREEDY)
        next(stream)
        name, later = "_gate" if home == "isolated" else "gate", []
        gate = getattr(session, name)

        def come_first() -> None:
            setattr(session, name, gate)
            session.cancel() if ends == "cancel" else stream.close()
            session.ensure_prefix(SECOND)
            later.append(session.decode(max_tokens=6, **GREEDY))
            later.append(next(later[0]))

        setattr(session, name, LateGate(gate, come_first))
        assert next(stream, None) is None
        rest = [t for chunk in (later[1], *later[0]) for t in chunk.tokens]
        assert rest == whole


def test_what_a_pool_cancelled_for_want_of_a_reader_holds_no_session(
    opened: Any, home: str
) -> None:
    if home == "alone":
        pytest.skip("a session alone has no reader_timeout")
    with opened(reader_timeout=0.05) as session:
        whole = expected(session, FIRST, 8)
        session.ensure_prefix(FIRST)
        stream = session.decode(max_tokens=50, **GREEDY)
        shown, rest = list(next(stream).tokens), list[int]()
        end = time.perf_counter() + 10
        while not rest and time.perf_counter() < end:
            with suppress(ic.SessionBusyError):
                rest = tokens(session, 7)
            time.sleep(0.02)
        assert shown + rest == whole
        assert list(stream) == []


def test_a_task_that_reads_a_cancelled_stream_changes_nothing(opened: Any) -> None:
    async def main(own: Any) -> None:
        session = ic.AsyncSession(own)

        async def read() -> None:
            async for _ in session.decode(max_tokens=100, **GREEDY):
                pass

        for n in range(10):
            await session.ensure_prefix(FIRST)
            reader = asyncio.create_task(read())
            await asyncio.sleep(0.002 * n)
            session.cancel()
            found: list[int] = []
            while not found:
                with suppress(ic.SessionBusyError):  # while the reader is in a step
                    await session.ensure_prefix(SECOND)
                    stream = session.decode(max_tokens=6, **GREEDY)
                    found = [t async for chunk in stream for t in chunk.tokens]
                await asyncio.sleep(0.001)
            await reader
            assert found == whole

    with opened() as own:
        whole = expected(own, SECOND, 6)
        asyncio.run(main(own))


def test_whoever_leaves_near_the_end_of_a_text_holds_no_session(opened: Any, home: str) -> None:
    """The pool has generated all of it, and looks at it no more."""
    if home == "alone":
        pytest.skip("a session alone has no reader_timeout")
    with opened(reader_timeout=0.05) as session:
        whole = expected(session, FIRST, 8)
        for n_read in range(3):
            session.ensure_prefix(FIRST)
            stream = session.decode(max_tokens=3, **GREEDY)
            shown = [t for _ in range(n_read) for t in next(stream).tokens]
            time.sleep(0.2)
            assert shown + tokens(session, 8 - len(shown)) == whole


def test_what_was_on_its_way_to_a_task_is_shown_and_resident(opened: Any) -> None:
    async def main(own: Any) -> None:
        session = ic.AsyncSession(own)
        await session.ensure_prefix(FIRST)
        stream = session.decode(max_tokens=50, **GREEDY)
        shown = list((await anext(stream)).tokens)

        async def read() -> None:
            async for chunk in stream:
                shown.extend(chunk.tokens)

        reader = asyncio.create_task(read())
        for _ in range(2):
            await asyncio.sleep(0)  # it asks
        time.sleep(0.1)  # noqa: ASYNC251  (the answer comes while the loop is busy)
        session.cancel()
        rest: list[int] = []
        while not rest:
            with suppress(ic.SessionBusyError):  # alone, while the reader is in a step
                rest = [
                    t
                    async for chunk in session.decode(max_tokens=6, **GREEDY)
                    for t in chunk.tokens
                ]
            await asyncio.sleep(0.001)
        await reader
        assert [*shown, *rest] == whole[: len(shown) + len(rest)]

    with opened() as own:
        whole = expected(own, FIRST, 20)
        asyncio.run(main(own))


def test_to_close_a_stream_that_was_ended_disturbs_no_later_call(opened: Any) -> None:
    with opened(n_batch=8, n_ubatch=8) as session, ThreadPoolExecutor(1) as thread:
        session.ensure_prefix(FIRST)
        long = [300 + i % 150 for i in range(100)]
        with session.decode(max_tokens=20, **GREEDY):  # never read
            session.cancel()
            call = thread.submit(session.ensure_prefix, long)
        assert call.result().prefix_tokens == len(long)


class Heard:
    def __init__(self) -> None:
        self.told: list[str] = []

    def on_call_start(self, event: ic.CallStart) -> None:
        self.told += ["begins"] * (event.operation == "stream")

    def on_call_end(self, event: ic.CallEnd) -> None:
        self.told += ["ends"] * (event.operation == "stream")


def test_an_observer_hears_of_one_end(opened: Any) -> None:
    heard = Heard()
    ic.set_observer(heard)
    try:
        for how in ("read", "close", "drop", "session", "read late", "close late"):
            with opened() as session:
                heard.told.clear()
                _left(session, how)
                assert heard.told == ["begins", "ends"], how
    finally:
        ic.set_observer(None)


def _left(session: Any, how: str) -> None:
    """Begin a stream and leave it in a way."""
    session.ensure_prefix(FIRST)
    stream = session.decode(max_tokens=20, **GREEDY)
    next(stream)
    if how.endswith("late"):
        session.cancel()
        session.ensure_prefix(SECOND)
    if how == "session":
        session.close()
    elif how == "drop":
        del stream
        session.ensure_prefix(SECOND)
    elif how.startswith("close"):
        stream.close()
    else:
        list(stream)
