"""Worker threads of OpenMP end where their caller goes on to something else."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psutil
import pytest

import infercore as ic
import infercore_models
from infercore_llamacpp import context

WORKERS = 7  # more than any other part starts


@pytest.fixture(scope="module")
def model() -> Any:
    with ic.load_model(infercore_models.path("storyteller", "gguf-f32")) as loaded:
        yield loaded


def n_threads() -> int:
    return psutil.Process().num_threads()


def generated(session: Any) -> None:
    session.ensure_prefix("Once upon a time")
    assert list(session.decode(max_tokens=3, temperature=0))


@pytest.fixture(autouse=True)
def has_teams(model: Any) -> None:
    """Begin without workers of other tests; skip on a build whose OpenMP keeps none."""
    context._end_team()
    if context._end_team is int:
        pytest.skip("this llama.cpp does not compute with GNU's OpenMP")


def test_a_context_leaves_none_when_it_is_closed(model: Any) -> None:
    before = n_threads()
    with model.new_session(n_ctx=128, n_threads=WORKERS + 1) as session:
        generated(session)
        assert n_threads() - before >= WORKERS
    assert n_threads() - before < WORKERS


def test_awaited_calls_leave_none(model: Any) -> None:
    async def story() -> int:
        session = ic.AsyncSession(model.new_session(n_ctx=128, n_threads=2 * WORKERS + 1))
        async with session:
            await session.ensure_prefix("Once upon a time")
            async for _ in session.decode(max_tokens=3, temperature=0):
                pass
            return n_threads()

    before = n_threads()
    assert asyncio.run(story()) - before < 2 * WORKERS


def test_an_idle_pool_keeps_none(model: Any) -> None:
    before = n_threads()
    with model.new_pool(n_ctx=128, n_parallel=2, n_threads=WORKERS + 1) as pool:
        with pool.open_session() as session:
            generated(session)
        until = time.monotonic() + 10
        while n_threads() - before >= WORKERS and time.monotonic() < until:
            time.sleep(0.01)
        assert n_threads() - before < WORKERS
