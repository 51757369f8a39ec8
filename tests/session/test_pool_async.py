"""Sessions of a pool in tasks: many at once, cancelled, and without a thread each."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

import infercore as ic

TEXTS = ("Once upon a time", "The baker had a dog", "A little girl", "tick tock tick tock")
N_TASKS = 24


async def tokens_of(session: ic.AsyncSession, text: str, n: int = 8, **fields: Any) -> list[int]:
    await session.ensure_prefix(text)
    stream = session.decode(max_tokens=n, **fields)
    return [token async for chunk in stream for token in chunk.tokens]


def alone(reference: Any, text: str, n: int = 8, **fields: Any) -> list[int]:
    with reference.new_session(n_ctx=128) as session:
        session.ensure_prefix(text)
        return [t for chunk in session.decode(max_tokens=n, **fields) for t in chunk.tokens]


def test_streams_of_many_tasks_wait_in_no_thread(reference: Any) -> None:
    expected = [alone(reference, text, seed=5) for text in TEXTS]
    before = set(threading.enumerate())

    async def begin(pool: ic.SessionPool, i: int) -> tuple[list[int], Any]:
        session = await pool.aopen_session()
        await session.ensure_prefix(TEXTS[i % len(TEXTS)])
        stream = session.decode(max_tokens=8, seed=5)
        return list((await anext(stream)).tokens), stream

    async def rest(tokens: list[int], stream: Any) -> list[int]:
        return tokens + [token async for chunk in stream for token in chunk.tokens]

    async def main() -> list[list[int]]:
        async with ic.aopen_pool(reference, n_parallel=4, n_ctx=128) as pool:
            begun = [await begin(pool, i) for i in range(N_TASKS)]
            found = await asyncio.gather(*(rest(*each) for each in begun))
            assert len(set(threading.enumerate()) - before) < N_TASKS / 2
            return found

    assert asyncio.run(main()) == [expected[i % len(TEXTS)] for i in range(N_TASKS)]


def test_calls_of_a_closed_pool_are_refused_and_its_sessions_can_be_closed(reference: Any) -> None:
    async def main() -> None:
        async with ic.aopen_pool(reference, n_parallel=2, n_ctx=128) as pool:
            session = await pool.aopen_session()
            await session.ensure_prefix(TEXTS[0])
            stream = session.decode(max_tokens=2)
        with pytest.raises(ic.SessionClosedError):
            await session.ensure_prefix(TEXTS[1])
        with pytest.raises(ic.SessionClosedError):
            await anext(stream)
        await session.close()
        assert session.closed

    asyncio.run(main())


def test_a_cancelled_task_leaves_what_was_shown(reference: Any) -> None:
    whole = alone(reference, TEXTS[0], 20, temperature=0)

    async def main() -> None:
        async with (
            ic.aopen_pool(reference, n_parallel=2, n_ctx=128) as pool,
            await pool.aopen_session() as session,
        ):
            await session.ensure_prefix(TEXTS[0])
            shown: list[int] = []

            async def read() -> None:
                async for chunk in session.decode(temperature=0, ignore_eos=True):
                    shown.extend(chunk.tokens)

            task = asyncio.create_task(read())
            while len(shown) < 3:  # noqa: ASYNC110  (any third token will do)
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            report = session.explain_context()
            assert report.resident_tokens == report.prefix_tokens + len(shown)
            rest = [t async for c in session.decode(max_tokens=4, temperature=0) for t in c.tokens]
            assert (shown + rest)[:20] == whole[: len(shown) + 4]

    asyncio.run(main())


def test_forks_of_a_session_run_at_once(reference: Any) -> None:
    expected = alone(reference, TEXTS[0], seed=1), alone(reference, TEXTS[1], seed=1)

    async def main() -> list[list[int]]:
        async with ic.aopen_session(reference, n_ctx=128, n_seq_max=2) as session:
            await session.ensure_prefix(TEXTS[0])
            twin = await session.fork()
            return await asyncio.gather(
                tokens_of(session, TEXTS[0], seed=1), tokens_of(twin, TEXTS[1], seed=1)
            )

    assert tuple(asyncio.run(main())) == expected


def test_errors_reach_the_task(reference: Any) -> None:
    async def main() -> None:
        async with ic.aopen_pool(reference, n_parallel=2, n_ctx=32) as pool:
            session = await pool.aopen_session()
            with pytest.raises(ic.ContextOverflowError):
                await session.ensure_prefix("a b c d e " * 9)
            await session.ensure_prefix("a")
            stream = session.decode(processors=[Failing()])
            with pytest.raises(ZeroDivisionError):
                await anext(stream)
            assert await session.generate(" b", max_tokens=2)
            await session.close()
            with pytest.raises(ic.SessionClosedError):
                await session.ensure_prefix("x")

    asyncio.run(main())


class Failing:
    def apply(self, logits: Any) -> Any:
        raise ZeroDivisionError("a processor of the caller's failed")


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("chats", [False, True])
def test_a_task_cancelled_at_any_chunk_leaves_the_session_free(
    reference: Any, between: bool, chats: bool
) -> None:
    """Though the task is kept, and with it the stream that it read."""
    kept: list[Any] = []
    lost: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: lost.append(told))
        async with (
            ic.aopen_pool(reference, n_parallel=2, n_ctx=128) as pool,
            await pool.aopen_session() as session,
        ):
            for n in range(6):
                shown: list[int] = []
                if not chats:
                    await session.ensure_prefix(TEXTS[0])

                async def read(n: int = n, shown: list[int] = shown) -> None:
                    options = {"temperature": 0, "ignore_eos": True, "max_tokens": 40}
                    stream = (
                        session.chat(MESSAGES, chat_template=TEMPLATE, **options)
                        if chats
                        else session.decode(**options)
                    )
                    kept.append(stream)
                    async for chunk in stream:
                        shown.extend(chunk.tokens)
                        if len(shown) >= n and between:
                            await asyncio.sleep(60)

                task = asyncio.create_task(read())
                while len(shown) < n:  # noqa: ASYNC110  (any n-th token will do)
                    await asyncio.sleep(0)
                if between:
                    await asyncio.sleep(0.01)
                task.cancel()
                await asyncio.wait([task])
                kept.append(task)
                report = session.explain_context()
                assert report.generated_tokens == len(shown)
                await session.ensure_prefix(TEXTS[1])
                assert pool.stats().n_running == pool.stats().n_waiting == 0

    asyncio.run(main())
    gc.collect()
    assert not lost


def test_a_cancelled_prefill_reports_no_lost_exception(reference: Any) -> None:
    lost: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: lost.append(told))
        async with ic.aopen_pool(reference, n_step_tokens=1, n_ctx=256) as pool:
            session = await pool.aopen_session()
            task = asyncio.create_task(session.ensure_prefix("tick tock " * 30))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            del task
            gc.collect()
            await session.close()

    asyncio.run(main())
    gc.collect()
    assert not lost


def test_a_task_that_fails_between_two_chunks_leaves_the_session_free(reference: Any) -> None:
    async def main() -> None:
        async with ic.aopen_pool(reference, n_parallel=2, n_ctx=128) as pool:
            session = await pool.aopen_session()
            await session.ensure_prefix(TEXTS[0])

            async def read() -> None:
                stream = session.decode(max_tokens=40, ignore_eos=True)
                async for _ in stream:
                    raise ConnectionResetError

            task = asyncio.create_task(read())
            await asyncio.wait([task])
            await session.ensure_prefix(TEXTS[1])
            with pytest.raises(ConnectionResetError):
                await task
            await session.close()

    asyncio.run(main())


MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
