"""What tasks and servers need of an isolated pool: streams, statistics, an observer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
import pack
from isolated.pools import FIELDS, TEXTS, kill, told, told_here

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(os.name != "posix", reason="isolation needs POSIX")


def test_streams_of_tasks_wait_in_no_threads(pool: Any, plain: Any) -> None:
    expected = told_here(plain, TEXTS[0], 30, temperature=0)

    async def one(number: int) -> list[int]:
        async with await pool.aopen_session(namespace=str(number % 2)) as session:
            await session.ensure_prefix(TEXTS[0])
            found: list[int] = []
            async for chunk in session.decode(max_tokens=30, temperature=0):
                found += chunk.tokens
                if number == 3 and len(found) == 10:
                    kill(pool)
            return found

    async def all_of_them() -> tuple[list[list[int]], int]:
        before = threading.active_count()
        found = await asyncio.gather(*map(one, range(24)))
        return list(found), threading.active_count() - before

    found, n_threads = asyncio.run(all_of_them())
    assert found == [expected] * 24
    n_openers = min(32, (os.cpu_count() or 1) + 4)  # of asyncio.to_thread
    assert n_threads <= len(found) + n_openers + 3  # one for each call that waits


def test_a_task_that_is_cancelled_leaves_a_session_that_works(pool: Any) -> None:
    async def cancelled() -> None:
        async with await pool.aopen_session() as session:
            await session.ensure_prefix(TEXTS[0])

            async def read() -> None:
                async for _ in session.decode(max_tokens=10_000, ignore_eos=True, stop=["@@"]):
                    pass

            task = asyncio.ensure_future(read())
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await session.generate(" and", max_tokens=3)

    asyncio.run(cancelled())


def test_a_task_that_is_cancelled_while_the_engine_starts_anew_leaves_its_session_free(
    pool: Any,
) -> None:
    async def read(stream: Any) -> list[Any]:
        return [chunk async for chunk in stream]

    async def main() -> None:
        async with await pool.aopen_session() as session:
            await session.ensure_prefix(TEXTS[0])
            stream = session.decode(max_tokens=20, ignore_eos=True)
            await stream.__anext__()
            kill(pool)
            reading = asyncio.create_task(read(stream))
            await asyncio.sleep(0.05)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # where it has not ended before
                await reading
            await stream.aclose()
            assert await read(session.decode(max_tokens=2, ignore_eos=True))

    asyncio.run(main())


def test_statistics_wait_for_nobody_and_outlive_a_worker(pool: Any) -> None:
    with pool.open_session() as session:
        told(session, n=5)
        before = pool.stats()
        kill(pool, "SIGSTOP")
        seconds = []
        for _ in range(3):  # the machine has others to serve
            started = time.monotonic()
            assert pool.stats().n_steps >= before.n_steps
            seconds.append(time.monotonic() - started)
        assert min(seconds) < 0.5
        kill(pool)
        told(session, n=5)
        now = pool.stats()
    assert now.generated_tokens > before.generated_tokens
    assert now.prompt_tokens > before.prompt_tokens
    assert now.n_restarts == before.n_restarts + 1


def test_what_a_worker_does_again_after_a_death_counts_once(
    pack_path: Path, backend_name: str
) -> None:
    with ic.open_pool(pack_path, backend=backend_name, isolate=True, n_ctx=256, **FIELDS) as pool:
        sessions = [pool.open_session() for _ in range(3)]
        sessions[0].ensure_prefix(TEXTS[0])
        stream = sessions[0].decode(max_tokens=20, temperature=0, ignore_eos=True)
        n_told = sum(len(next(stream).tokens) for _ in range(10))
        kill(pool)
        n_told += sum(len(chunk.tokens) for chunk in stream)
        stats = pool.stats()
        assert (stats.n_open, stats.n_restarts) == (3, 1)
        assert n_told == 20
        assert abs(stats.generated_tokens - n_told) <= 4  # of the last steps before the death
        for session in sessions:
            session.close()
        assert pool.stats().n_open == 0


def test_an_encoder_s_calls_outlive_its_worker(backend_name: str) -> None:
    pack.need_pack()
    import infercore_models

    path = infercore_models.path("encoder", pack.FORMATS[backend_name])
    with ic.open_pool(path, backend=backend_name, isolate=True) as pool:
        for _ in range(3):
            pool.embed(["a text"])
        kill(pool)
        pool.embed(["a text"])
        assert (pool.stats().n_steps, pool.stats().n_restarts) == (4, 1)
    assert pool.stats().n_steps == 4


def test_statistics_are_there_when_the_worker_has_just_died(
    pack_path: Path, backend_name: str
) -> None:
    with ic.open_pool(pack_path, backend=backend_name, isolate=True, n_ctx=256, **FIELDS) as pool:
        kill(pool)
        assert pool.stats().n_restarts == 0


@pytest.mark.parametrize("isolate", [True, False])
def test_a_closed_pool_reports_what_it_did_and_nothing_open(
    pack_path: Path, backend_name: str, *, isolate: bool
) -> None:
    pool = ic.open_pool(pack_path, backend=backend_name, isolate=isolate, n_ctx=64, **FIELDS)
    with pool:
        n_told = len(told(pool.open_session(), n=5))
        assert pool.stats().n_open == 1
    stats = pool.stats()
    assert (stats.n_open, stats.n_running, stats.n_waiting, stats.n_cells_used) == (0, 0, 0, 0)
    assert stats.generated_tokens >= n_told > 0


@pytest.mark.parametrize("isolate", [True, False])
def test_a_session_of_a_pool_opens_in_async_with(pool: Any, plain: Any, *, isolate: bool) -> None:
    async def main() -> None:
        async with (pool if isolate else plain).aopen_session() as session:
            await session.ensure_prefix(TEXTS[0])
        assert session.closed

    asyncio.run(main())


def test_an_observer_hears_of_steps(pool: Any) -> None:
    heard: list[Any] = []

    class Observer:
        def on_step(self, step: Any) -> None:
            heard.append(step)
            raise SystemExit(3)  # which disturbs nobody

        def on_call_end(self, event: Any) -> None:
            if event.operation == "stream":
                ended.append(event.usage is None)

    ended: list[bool] = []
    ic.set_observer(Observer())
    try:
        with pool.open_session(namespace="observed") as session:
            assert len(told(session, n=6, ignore_eos=True)) == 6
            with session.decode(max_tokens=9, ignore_eos=True) as stream:
                next(stream)
    finally:
        ic.set_observer(None)
    assert ended == [False, True], "the second one was closed before its end"
    assert sum(step.n_running for step in heard) >= 5
    assert sum(step.n_prompt for step in heard) >= 4


def test_an_observer_hears_of_calls_as_it_does_in_one_process(pool: Any, model: Any) -> None:
    heard: list[tuple[str, int | None]] = []

    class Observer:
        def on_call_end(self, event: Any) -> None:
            n = None if event.usage is None else event.usage.completion_tokens
            heard.append((event.operation, n))

    def events(session: Any) -> list[tuple[str, int | None]]:
        session.ensure_prefix("Once upon a time")
        heard.clear()
        session.generate(" there was", max_tokens=4, ignore_eos=True)
        session.sample_many(2, max_tokens=3, ignore_eos=True)
        return heard[:]

    with model.new_pool(**FIELDS) as own:
        ic.set_observer(Observer())
        try:
            found = [events(each.open_session(namespace="heard")) for each in (own, pool)]
        finally:
            ic.set_observer(None)
    assert sorted(found[0]) == sorted(found[1])
    assert found[1][:2] == [("generate", None), ("stream", 4)]


def test_a_warning_of_the_engines_process_is_logged_here_once(
    pack_path: Path, backend_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    fields = {**FIELDS, "cache_dir": str(tmp_path / "file" / "cache")}
    with (
        caplog.at_level(logging.WARNING),
        ic.open_pool(pack_path, backend=backend_name, isolate=True, **fields) as opened,
        opened.open_session() as session,
    ):
        text = session.generate("Once", max_tokens=4, temperature=0)
        kill(opened)
        assert session.generate("Once", max_tokens=4, temperature=0) == text
    told = [(r.name, r.levelno) for r in caplog.records if "cache_dir" in r.getMessage()]
    assert told == [("infercore.session", logging.WARNING)]
