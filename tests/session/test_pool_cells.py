"""Sessions of a pool that lose their cells have their tokens all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from session.pool_texts import TEXTS, tokens_of
from session.pool_waits import in_threads, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pool(reference: Any) -> Iterator[Any]:
    with reference.new_pool(n_parallel=4, n_ctx=256) as pool:
        yield pool


def test_sessions_that_lose_their_cells_go_on(reference: Any, alone: Any) -> None:
    """Cells for one and a half texts: one is preempted, or dropped between its calls."""
    with reference.new_pool(n_parallel=4, n_cells=48, n_ctx=40) as pool:

        def work(text: str) -> list[int]:
            with pool.open_session() as session:
                return tokens_of(session, text, 24, seed=11)

        expected = [alone(text, 24, seed=11) for text in TEXTS]
        assert in_threads(*(lambda t=t: work(t) for t in TEXTS)) == expected
        assert pool.stats().n_cells_used == 0


def test_idle_sessions_are_evaluated_again_and_say_so(reference: Any) -> None:
    with reference.new_pool(n_parallel=2, n_cells=24, n_ctx=24) as pool:
        one, two, three = (pool.open_session(namespace=name) for name in "abc")
        n = one.ensure_prefix(TEXTS[1]).prefix_tokens
        for session, text in ((two, TEXTS[2] + " a dog and a cat"), (three, TEXTS[5] + " tock b")):
            session.ensure_prefix(text)
        report = one.explain_context()
        assert (report.held_tokens, report.resident_tokens) == (0, n)
        status = one.prefill_suffix(" and")
        assert status.reevaluated_tokens == n
        assert status.reused_tokens + status.prefilled_tokens == status.suffix_tokens
        assert one.ensure_prefix(TEXTS[1]).reused_tokens == n


def test_a_first_token_that_all_share_is_no_use_of_what_follows_it(reference: Any) -> None:
    """The one used least recently loses its cells, though the newest copied a token of it."""
    texts = ("the dog " * 12, "a cat sat " * 5, "tick tock " * 12, "she said so " * 6)
    with reference.new_pool(n_parallel=2, n_ctx=100, n_cells=120) as pool:
        sessions = [pool.open_session() for _ in texts]
        for i, (session, text) in enumerate(zip(sessions, texts, strict=True)):
            assert session.ensure_prefix(text).prefilled_tokens > 10
            held = [other.explain_context().held_tokens for other in sessions[: i + 1]]
            n_lost = next(n for n, tokens in enumerate(held) if tokens)
            assert not any(held[:n_lost])
            assert all(held[n_lost:])
        assert n_lost


def test_a_restored_session_that_loses_its_cells_at_once_has_its_tokens(
    pool: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = pool.owner.scheduler
    with pool.open_session() as session:
        session.ensure_prefix(TEXTS[0])
        snapshot = session.snapshot()
        restore = scheduler.restore

        def restore_and_lose(sequence: Any, *args: Any) -> None:
            restore(sequence, *args)
            scheduler.places.let_go(sequence, keep=False)

        monkeypatch.setattr(scheduler, "restore", restore_and_lose)
        session.restore(snapshot)
        assert session.explain_context().resident_tokens == snapshot.resident_tokens
        found = [t for c in session.decode(max_tokens=10, temperature=0) for t in c.tokens]
    assert found == alone(TEXTS[0], temperature=0)


def test_a_stream_whose_tokens_come_back_whole_evaluates_the_last_one(
    reference: Any, alone: Any
) -> None:
    """Another session that drew the same text left it in memory, with all its tokens."""
    expected = alone(TEXTS[1], 24, seed=3, ignore_eos=True)
    with reference.new_pool(n_parallel=2, n_ctx=256, cache_bytes=2**26) as pool:
        with pool.open_session() as first:
            assert tokens_of(first, TEXTS[1], 24, seed=3, ignore_eos=True) == expected
        with pool.open_session() as session:
            session.ensure_prefix(TEXTS[1])
            stream = session.decode(max_tokens=24, seed=3, ignore_eos=True)
            found = [*next(stream).tokens, *next(stream).tokens]
            wait_for(lambda: not pool.stats().n_running)
            scheduler, sequence = pool.owner.scheduler, session.context.sequence
            pool.owner.ask(lambda: scheduler.places.let_go(sequence, keep=False))
            (rest,) = in_threads(lambda: [token for chunk in stream for token in chunk.tokens])
            assert [*found, *rest] == expected
