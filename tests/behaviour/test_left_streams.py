"""Streams that a task leaves: the session is free at once, whatever a thread still holds."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

THREADS = {"n_threads": 1, "n_threads_batch": 1}


class Keeping(ThreadPoolExecutor):
    """Threads that take their time to forget what they have done."""

    def __init__(self) -> None:
        super().__init__(4)
        self.kept: list[Any] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.kept += fn, args
        return super().submit(fn, *args, **kwargs)


@pytest.fixture(params=["alone", "pool", "isolated"])
def open_session(
    request: pytest.FixtureRequest,
    model: Any,
    pack_path: Path,
    backend_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Any]:
    threads = Keeping()
    monkeypatch.setattr(ic.AsyncSession, "_executor", lambda _: threads)
    if request.param == "alone":
        yield lambda: ic.aopen_session(model, n_ctx=128, **THREADS)
    else:
        isolate = request.param == "isolated"
        if isolate and os.name != "posix":
            pytest.skip("isolation needs POSIX")
        source, name = (pack_path, backend_name) if isolate else (model, None)
        fields = {"n_parallel": 2, "n_ctx": 128, **THREADS}
        with ic.open_pool(source, backend=name, isolate=isolate, **fields) as pool:
            yield pool.aopen_session
    threads.shutdown()


@pytest.mark.parametrize("chats", [False, True])
def test_leaving_the_loop_of_a_task_frees_the_session(open_session: Any, chats: bool) -> None:
    async def main() -> None:
        async with await open_session() as session:
            for n in range(1, 4):
                await session.ensure_prefix("Once upon a time")
                options = {"max_tokens": 50, "temperature": 0, "ignore_eos": True}
                messages = [{"role": "user", "content": "Once upon a time"}]
                template = "{{ messages[0].content }}"
                shown: list[int] = []
                async for chunk in (
                    session.chat(messages, chat_template=template, **options)
                    if chats
                    else session.decode(**options)
                ):
                    shown += chunk.tokens
                    if len(shown) >= n:
                        break
                del chunk
                report = session.explain_context()
                assert report.generated_tokens == len(shown)
                rest = session.decode(max_tokens=2, temperature=0, ignore_eos=True)
                assert len([token async for chunk in rest for token in chunk.tokens]) == 2
                assert session.explain_context().resident_tokens == report.resident_tokens + 2

    asyncio.run(main())


def test_a_task_that_fails_leaves_the_session_to_who_awaits_it(open_session: Any) -> None:
    kept: list[Any] = []

    async def main() -> None:
        async with await open_session() as session:
            await session.ensure_prefix("Once upon a time")

            async def read() -> None:
                kept.append(session.decode(max_tokens=50, ignore_eos=True))
                async for _ in kept[-1]:
                    raise ConnectionResetError

            for _ in range(20):
                with pytest.raises(ConnectionResetError):
                    await asyncio.create_task(read())
                await session.ensure_prefix("Once upon a time")
                with pytest.raises(ConnectionResetError):
                    await asyncio.create_task(read())
                session.decode(max_tokens=2)

    asyncio.run(main())
