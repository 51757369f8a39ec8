"""Calls of a pool that end early: refused, cancelled, dropped, or closed with the pool."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from session.pool_texts import TEXTS, tokens_of
from session.pool_waits import SECONDS, in_error, in_threads, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pool(reference: Any) -> Iterator[Any]:
    with reference.new_pool(n_parallel=4, n_ctx=256) as pool:
        yield pool


def test_too_many_calls_are_refused_before_any_change(
    reference: Any, request: pytest.FixtureRequest
) -> None:
    goes_on = threading.Event()

    class Holds:
        def on_step(self, step: Any) -> None:
            goes_on.wait(SECONDS)

    with reference.new_pool(n_parallel=1, max_waiting=1, n_ctx=256, n_step_tokens=1) as pool:
        first, second, third = (pool.open_session() for _ in range(3))
        third.ensure_prefix("x")
        before = third.explain_context()
        long = "the little dog and the baker " * 7
        threads = [
            threading.Thread(target=in_error, args=(lambda s=s: s.ensure_prefix(long),))
            for s in (first, second)
        ]
        request.addfinalizer(lambda: ic.set_observer(None))
        ic.set_observer(Holds())
        for thread in threads:
            thread.start()
        wait_for(lambda: pool.stats().n_waiting == 1)
        with pytest.raises(ic.PoolFullError) as caught:
            third.ensure_prefix(TEXTS[0])
        assert caught.value.n_waiting == 1
        other, another = (pool.open_session(namespace=name) for name in "bc")
        threads.append(threading.Thread(target=other.ensure_prefix, args=("x",)))
        threads[-1].start()  # a namespace without a call is let in, as many as may wait
        wait_for(lambda: pool.stats().n_waiting == 2)
        with pytest.raises(ic.PoolFullError):
            another.ensure_prefix("x")
        first.cancel()
        second.cancel()
        goes_on.set()
        for thread in threads:
            thread.join(SECONDS)
        after = third.explain_context()
        assert (after.state, after.resident_tokens) == (before.state, before.resident_tokens)
        assert other.state == "PREFIXED"
        assert third.ensure_prefix(TEXTS[0]).prefix_tokens


def test_cancel_ends_one_and_harms_no_other(pool: Any, alone: Any) -> None:
    session, other = pool.open_session(), pool.open_session()
    session.ensure_prefix(TEXTS[0])
    stream = session.decode(temperature=0)
    shown = list(next(stream).tokens)
    expected = alone(TEXTS[1], 20, temperature=0)
    works = in_threads(lambda: tokens_of(other, TEXTS[1], 20, temperature=0), session.cancel)
    assert works[0] == expected
    rest = list(stream)
    assert rest[-1].finish_reason == "cancelled"
    shown += [t for chunk in rest for t in chunk.tokens]
    assert shown == alone(TEXTS[0], 20, temperature=0)[: len(shown)]
    n_prefix = session.explain_context().prefix_tokens
    assert session.explain_context().resident_tokens == n_prefix + len(shown)
    assert len(session.generate(" and", max_tokens=3, temperature=0))


def test_a_stream_that_is_dropped_leaves_what_was_shown(pool: Any, alone: Any) -> None:
    expected = alone(TEXTS[0], 9, temperature=0)
    with pool.open_session() as session:
        session.ensure_prefix(TEXTS[0])
        stream = session.decode(temperature=0)
        shown = [t for _ in range(3) for t in next(stream).tokens]
        del stream
        gc.collect()
        report = session.explain_context()
        assert report.resident_tokens == report.prefix_tokens + len(shown)
        rest = session.decode(temperature=0, max_tokens=9 - len(shown))
        assert shown + [t for chunk in rest for t in chunk.tokens] == expected


def test_closing_the_pool_ends_every_call(reference: Any) -> None:
    pool = reference.new_pool(n_parallel=2, n_ctx=256, n_step_tokens=1)
    reader = pool.open_session()
    reader.ensure_prefix("x")
    stream = reader.decode(max_tokens=200, ignore_eos=True)
    next(stream)
    sessions = [pool.open_session() for _ in range(4)]
    text = "the little dog and the baker " * 7
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda s=s: found.append(in_error(lambda: s.ensure_prefix(text))))
        for s in sessions
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: pool.stats().n_steps > 3)
    pool.close()
    with pytest.raises(ic.SessionClosedError):
        reader.ensure_prefix("x")
    for thread in threads:
        thread.join(SECONDS)
    assert [type(error) for error in found] == [ic.SessionClosedError] * 4
    assert pool.closed
    assert pool.stats().n_open == 0
    for session in sessions:
        assert (session.closed, session.state) == (True, "CLOSED")
        assert session.explain_context().closed
    with pytest.raises(ic.SessionClosedError):
        pool.open_session()
    with pytest.raises(ic.SessionClosedError):
        sessions[0].ensure_prefix("x")
    for session in sessions:
        session.close()
