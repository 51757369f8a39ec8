"""Sessions under asyncio: many at once, cancelled by their task, no thread left behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import infercore as ic

PROMPT = "Once upon a time there was a baker named Mira"


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("infercore-session")}


async def tell(session: ic.AsyncSession, prompt: str, n: int = 30) -> str:
    await session.ensure_prefix(prompt)
    return "".join([chunk.text async for chunk in session.decode(max_tokens=n, temperature=0)])


def test_many_at_once_give_what_they_give_alone(
    model: Any, exact: dict[str, str], new_session: Any
) -> None:
    prompts = [f"Once upon a time there was a {who}" for who in ("baker", "fiddler", "miller")]
    alone = []
    for prompt in prompts:
        session = new_session()
        session.ensure_prefix(prompt)
        alone.append("".join(c.text for c in session.decode(max_tokens=30, temperature=0)))

    async def one(prompt: str) -> str:
        async with ic.aopen_session(model, n_ctx=1024, **exact) as session:
            return await tell(session, prompt)

    async def main() -> list[str]:
        return await asyncio.gather(*(one(prompt) for prompt in prompts))

    assert asyncio.run(main()) == alone
    assert threads() == set()


def test_cancelling_the_task_ends_the_decode_and_frees_the_session(
    model: Any, exact: dict[str, str]
) -> None:
    async def main() -> None:
        session = await ic.aopen_session(model, n_ctx=1024, **exact)
        whole = await tell(session, PROMPT, 40)
        await session.ensure_prefix(PROMPT)
        shown: list[str] = []

        async def read() -> None:
            async for chunk in session.decode(temperature=0, ignore_eos=True):
                shown.append(chunk.text)  # noqa: PERF401  (read while it grows)

        task = asyncio.create_task(read())
        while len(shown) < 3:  # noqa: ASYNC110  (any third chunk will do)
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert whole.startswith("".join(shown)[:20])
        assert session.state == "DECODED"
        assert await tell(session, PROMPT, 40) == whole
        await session.close()
        await session.close()

    asyncio.run(main())
    assert threads() == set()


def test_cancelling_a_prefill(model: Any, exact: dict[str, str], story: str) -> None:
    async def main() -> None:
        async with ic.aopen_session(model, n_ctx=1024, n_batch=8, **exact) as session:
            task = asyncio.create_task(session.ensure_prefix(story))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            status = await session.ensure_prefix(story)
            assert status.reused_tokens + status.prefilled_tokens == status.prefix_tokens

    asyncio.run(main())


def test_errors_reach_the_caller(model: Any, exact: dict[str, str]) -> None:
    async def main() -> None:
        async with ic.aopen_session(model, n_ctx=32, **exact) as session:
            with pytest.raises(ic.InvalidStateError):
                session.decode()
            with pytest.raises(ic.ContextOverflowError):
                await session.ensure_prefix(PROMPT * 9)
            fork = await session.fork()
            await fork.close()
        with pytest.raises(ic.SessionClosedError):
            await session.ensure_prefix("x")

    asyncio.run(main())


def test_leaving_the_loop_early_frees_the_session(model: Any, exact: dict[str, str]) -> None:
    async def main() -> None:
        async with ic.aopen_session(model, n_ctx=256, **exact) as session:
            await session.ensure_prefix(PROMPT)
            async with session.decode(temperature=0) as stream:
                async for _ in stream:
                    break
            await session.ensure_prefix(PROMPT)

    asyncio.run(main())


def test_nothing_slow_is_done_in_the_thread_of_the_loop(
    model: Any, exact: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a grammar that is compiled, nor a draft model's context that is opened."""
    from infercore.sampling import factory
    from infercore.session import drafting

    where: dict[str, int] = {}

    def noting(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            where[name] = threading.get_ident()
            return real(*args, **kwargs)

        return call

    make = noting("sampler", factory.new_portable_sampler)
    monkeypatch.setattr(factory, "new_portable_sampler", make)
    draft = noting("draft", drafting.DraftModel.__init__)
    monkeypatch.setattr(drafting.DraftModel, "__init__", draft)
    guess = ic.SpeculativeConfig(kind="draft_model", draft_model=model, n_draft=2)

    async def main() -> str:
        async with ic.aopen_session(model, n_ctx=128, **exact) as session:
            await session.ensure_prefix(PROMPT)
            stream = session.decode(
                max_tokens=4,
                response_format={"type": "regex", "pattern": "[a-z ]+"},
                speculative=guess,
            )
            assert where == {}
            return "".join([chunk.text async for chunk in stream])

    pytest.importorskip("llguidance", reason="constraints need llguidance")
    assert asyncio.run(main())
    assert set(where) == {"sampler", "draft"}
    assert threading.get_ident() not in where.values()


def test_what_is_wrong_with_a_decode_is_said_at_once_or_when_it_begins(
    model: Any, exact: dict[str, str]
) -> None:
    pytest.importorskip("llguidance", reason="constraints need llguidance")

    async def main() -> None:
        async with ic.aopen_session(model, n_ctx=128, **exact) as session:
            await session.ensure_prefix(PROMPT)
            with pytest.raises(ic.InvalidInputError, match="temperature"):
                session.decode(temprature=1)
            stream = session.decode(response_format={"type": "regex", "pattern": "a(b"})
            with pytest.raises(ic.GrammarError):
                await anext(stream)
            assert session.state == "PREFIXED"
            never = session.decode(max_tokens=2)
            await never.aclose()
            assert len([c async for c in session.decode(max_tokens=2, ignore_eos=True)]) == 3

    asyncio.run(main())
