"""What a closed session held stays in place until somebody wants the place, or what is in it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from infercore.errors import SessionFatalError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLACES = 3
SHARED = "Once upon a time there was a little girl who had a dog. " * 4
TURN = SHARED + "The dog was very big."
NEXT = TURN + " They went to the garden and played."
OTHER = SHARED + "The girl was happy, and " + "the baker said tick tock to the cat. " * 6
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def pool(story_path: Path) -> Iterator[Any]:
    with ic.open_pool(
        story_path, n_ctx=512, n_parallel=PLACES, kv_unified=False, cache_bytes=2**26, n_threads=1
    ) as pool:
        yield pool


def asked(pool: Any, text: str, namespace: str = "") -> ic.PrefixStatus:
    """Open a session, let it hold ``text``, and close it."""
    with pool.open_session(namespace=namespace) as session:
        return session.ensure_prefix(text)


def n_tokens(pool: Any, text: str) -> int:
    with pool.open_session(namespace="counted") as session:
        n = int(session.ensure_prefix(text).prefix_tokens)
    pool.flush_cache("counted")
    return n


def told(pool: Any, text: str) -> list[int]:
    with pool.open_session() as session:
        session.ensure_prefix(text)
        return [token for chunk in session.decode(**GREEDY) for token in chunk.tokens]


def test_a_turn_that_comes_back_finds_its_cells_where_they_were(pool: Any, story_path: Any) -> None:
    with ic.open_session(story_path, n_ctx=512, n_threads=1) as alone:
        alone.ensure_prefix(NEXT)
        expected = [token for chunk in alone.decode(**GREEDY) for token in chunk.tokens]
    first = asked(pool, TURN)
    with pool.open_session() as session:
        status = session.ensure_prefix(NEXT)
        found = [token for chunk in session.decode(**GREEDY) for token in chunk.tokens]
    assert status.restored_tokens == status.reused_tokens >= first.prefix_tokens - 1
    assert found == expected
    assert pool.stats().n_moved_out == 0


def test_cells_that_are_left_are_free_for_others(pool: Any) -> None:
    asked(pool, TURN)
    assert pool.stats().n_cells_used == 0
    texts = [f"{i} {OTHER}" for i in range(PLACES)]
    with ExitStack() as stack:
        sessions = [stack.enter_context(pool.open_session()) for _ in texts]
        for session, text in zip(sessions, texts, strict=True):
            session.ensure_prefix(text)
        stats = pool.stats()
        assert stats.n_cells_used == sum(n_tokens_held(session) for session in sessions)
        assert stats.n_moved_out == 1
    assert asked(pool, TURN).restored_tokens == n_tokens(pool, TURN) - 1  # from memory


def n_tokens_held(session: Any) -> int:
    return int(session.explain_context().held_tokens)


def test_who_shares_only_the_beginning_takes_a_copy(pool: Any) -> None:
    asked(pool, OTHER)
    status = asked(pool, TURN)
    assert (status.restored_tokens, pool.stats().n_moved_out) == (0, 0)
    assert status.shared_tokens >= n_tokens(pool, SHARED) - 1
    assert asked(pool, OTHER).restored_tokens == n_tokens(pool, OTHER) - 1


def test_a_pause_is_used_to_store_what_next_ones_would_wait_for(pool: Any) -> None:
    """Only where all places are taken: what stays in place is not stored for nothing."""
    texts = [f"{i} {OTHER}" for i in range(PLACES)]
    for i, text in enumerate(texts):
        assert pool.stats().n_moved_out == 0
        asked(pool, text, str(i))
    until = time.monotonic() + 10
    while pool.stats().n_moved_out < PLACES and time.monotonic() < until:
        time.sleep(0.01)
    assert pool.stats().n_moved_out == PLACES
    moved: list[Any] = []
    context = pool.owner.scheduler.context
    pool.owner.ask(lambda: setattr(context, "hand_over", lambda *a, **k: moved.append(a)))
    with pool.open_session(namespace="next") as session:  # has the place of the first
        session.ensure_prefix(TURN)
        assert not moved
    pool.owner.ask(lambda: delattr(context, "hand_over"))
    for i, text in enumerate(texts):
        n = asked(pool, text, str(i)).restored_tokens
        assert n == n_tokens_stored(pool, text)


def n_tokens_stored(pool: Any, text: str) -> int:
    return len(pool.tokenizer.encode(text, add_special=True)) - 1


def test_what_is_left_is_its_namespaces(pool: Any) -> None:
    asked(pool, TURN, "one")
    assert asked(pool, TURN, "two").reused_tokens == 0
    assert asked(pool, TURN, "one").reused_tokens > 0


@pytest.mark.parametrize("namespace", [None, "one"])
def test_a_flush_forgets_what_is_left(pool: Any, namespace: str | None) -> None:
    asked(pool, TURN, "one")
    asked(pool, TURN, "two")
    pool.flush_cache(namespace)
    assert asked(pool, TURN, "one").reused_tokens == 0
    assert (asked(pool, TURN, "two").reused_tokens > 0) == (namespace is not None)


def test_a_flush_forgets_what_goes_to_memory_meanwhile(pool: Any) -> None:
    """The places that are left are wanted between the call and its taking effect."""
    asked(pool, TURN)
    scheduler = pool.owner.scheduler
    scheduler.post(scheduler.places.let_go_all)
    pool.flush_cache()
    assert asked(pool, TURN).reused_tokens == 0


def test_nothing_is_left_where_the_engine_is_opened_anew(pool: Any) -> None:
    asked(pool, TURN)
    scheduler = pool.owner.scheduler
    pool.owner.ask(lambda: scheduler.recovery.restart(SessionFatalError("lost", cause=None), []))
    assert not scheduler.sequences
    assert asked(pool, TURN).reused_tokens == 0
    assert len(told(pool, TURN)) == GREEDY["max_tokens"]


def test_a_gap_is_closed_over_what_is_left(pool: Any) -> None:
    """Those that run get neighbouring places, and what lay between goes to memory."""
    texts = [f"{i} {SHARED}" for i in range(PLACES)]
    long = {**GREEDY, "max_tokens": 200}
    with ExitStack() as stack:
        sessions = [stack.enter_context(pool.open_session()) for _ in texts]
        for session, text in zip(sessions, texts, strict=True):
            session.ensure_prefix(text)
        ids = {session.context.sequence.seq_id: session for session in sessions}
        ids.pop(1).close()
        together = Barrier(2)

        def read(session: Any) -> None:
            together.wait()
            assert [*session.decode(**long)]

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(read, ids.values()))
        now = sorted(session.context.sequence.seq_id for session in ids.values())
        assert now[1] - now[0] == 1
        assert pool.stats().n_moved_out == 1


def test_who_is_open_keeps_its_cells_while_closed_ones_have_some(pool: Any) -> None:
    """What is left counts as free, so it goes before what an idle session holds."""
    with pool.open_session() as session:
        n = session.ensure_prefix(TURN).prefix_tokens
        for i in range(2 * PLACES):
            asked(pool, f"{i} {OTHER}", str(i))
            assert (n_tokens_held(session), pool.stats().n_cells_used) == (n, n)
