"""Sessions of a pool: the same sessions, many at once on one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from session.pool_texts import TEXTS, tokens_of
from session.pool_waits import in_error, in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def pool(reference: Any) -> Iterator[Any]:
    with reference.new_pool(n_parallel=4, n_ctx=256) as pool:
        yield pool


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"seed": 7}])
def test_texts_are_those_of_single_sessions(pool: Any, alone: Any, fields: dict[str, Any]) -> None:
    def work(text: str) -> Callable[[], list[int]]:
        def tokens() -> list[int]:
            with pool.open_session() as session:
                return tokens_of(session, text, **fields)

        return tokens

    expected = [alone(text, **fields) for text in TEXTS]
    assert in_threads(*(work(text) for text in TEXTS)) == expected
    stats = pool.stats()
    assert stats.mean_batch > 1.2
    assert stats.n_open == stats.n_cells_used == stats.n_running == stats.n_waiting == 0


def test_one_thread_reads_ten_streams_over_two_places(reference: Any, alone: Any) -> None:
    with reference.new_pool(n_parallel=2, n_ctx=64) as pool:
        sessions = [pool.open_session() for _ in range(10)]
        for i, session in enumerate(sessions):
            session.ensure_prefix(TEXTS[i % len(TEXTS)])
        streams = [session.decode(max_tokens=6, temperature=0) for session in sessions]
        found: list[list[int]] = [[] for _ in streams]
        while not all(stream.finished for stream in streams):
            for tokens, stream in zip(found, streams, strict=True):
                tokens += [t for chunk in [next(stream, None)] if chunk for t in chunk.tokens]
    assert found == [alone(TEXTS[i % len(TEXTS)], 6, temperature=0) for i in range(10)]


def test_all_calls_of_a_session(pool: Any, reference: Any) -> None:
    def calls(session: Any) -> list[Any]:
        found: list[Any] = [session.ensure_prefix(TEXTS[0]).resident_tokens]
        status = session.prefill_suffix(" there was a dog")
        found += [status.resident_tokens, status.reused_tokens, status.prefilled_tokens]
        found.append("".join(c.text for c in session.decode(max_tokens=5, temperature=0)))
        found.append(session.explain_context().resident_tokens)
        found.append(session.generate(" and a cat", max_tokens=5, temperature=0))
        status = session.prefill_suffix(ic.SuffixInput(text=" so", mode="append"))
        found += [status.suffix_tokens, session.state]
        twin = session.fork()
        found.append("".join(c.text for c in twin.decode(max_tokens=5, seed=3)))
        snapshot = session.snapshot()
        session.ensure_prefix("x")
        session.restore(snapshot)
        found.append("".join(c.text for c in session.decode(max_tokens=5, seed=3)))
        twin.close()
        return found

    with reference.new_session(n_ctx=256) as single, pool.open_session() as session:
        assert calls(session) == calls(single)


def test_a_snapshot_goes_from_a_pool_to_a_single_session_and_back(
    pool: Any, reference: Any
) -> None:
    with reference.new_session(n_ctx=256) as single, pool.open_session() as session:
        session.ensure_prefix(TEXTS[1])
        snapshot = session.snapshot()
        single.restore(snapshot)
        expected = [c.text for c in single.decode(max_tokens=6, temperature=0)]
        assert [c.text for c in session.decode(max_tokens=6, temperature=0)] == expected
        single.restore(snapshot)
        session.restore(single.snapshot())
        assert [c.text for c in session.decode(max_tokens=6, temperature=0)] == expected


def test_a_backend_of_one_sequence_takes_turns(toy: Any) -> None:
    with toy.new_session(n_ctx=64) as single:
        expected = [tokens_of(single, text, 8, temperature=0) for text in TEXTS]
    with toy.new_pool(n_parallel=4, n_ctx=64) as pool:
        works = [
            lambda t=text: tokens_of(pool.open_session(), t, 8, temperature=0) for text in TEXTS
        ]
        assert in_threads(*works) == expected


def test_texts_of_many_callers_are_embedded_together(reference: Any) -> None:
    texts = [*TEXTS, "a", "b"]
    expected = ic.embed(reference, texts, pooling="mean")
    with ic.open_pool(reference, n_parallel=2, n_ctx=64) as pool:
        found = in_threads(*(lambda t=t: pool.embed([t], pooling="mean")[0] for t in texts))
        found.append(in_error(lambda: pool.embed(["a"], pooling="no such")))
    assert isinstance(found.pop(), ic.InvalidInputError)
    for vector, right in zip(found, expected, strict=True):
        assert abs(vector - right).max() < 1e-4


def test_decodes_of_one_token_each_give_the_text_of_one_decode(pool: Any, alone: Any) -> None:
    """The token that was shown last is wanted and not evaluated: it must not be added twice."""
    expected = alone(TEXTS[1], 12, seed=5, ignore_eos=True)
    with pool.open_session() as session:
        found = tokens_of(session, TEXTS[1], 1, seed=5, ignore_eos=True)
        assert found == expected[:1]
        for _ in range(3):
            session.restore(session.snapshot())
        report = session.explain_context()
        assert report.resident_tokens == report.prefix_tokens + 1
        for text in TEXTS:
            first = tokens_of(session, text, 1, temperature=0, ignore_eos=True)
            more = [
                token
                for n in (1, 1, 2, 1)
                for chunk in session.decode(max_tokens=n, temperature=0, ignore_eos=True)
                for token in chunk.tokens
            ]
            assert first + more == alone(text, 6, temperature=0, ignore_eos=True)
            logical = session.explain_context().resident_tokens
            assert len(session.context.wanted()) == logical


def test_overflow_of_one_is_its_own(reference: Any, alone: Any) -> None:
    with reference.new_pool(n_parallel=2, n_cells=64, n_ctx=32) as pool:
        small, other = pool.open_session(), pool.open_session()
        with pytest.raises(ic.ContextOverflowError) as caught:
            small.ensure_prefix("a b c d e " * 8)
        assert (caught.value.stage, caught.value.n_ctx) == ("prefix", 32)

        def full() -> str | None:
            small.ensure_prefix(TEXTS[0])
            chunks = list(small.decode(temperature=0, ignore_eos=True))
            return chunks[-1].finish_reason

        assert in_threads(full, lambda: tokens_of(other, TEXTS[1], 8, temperature=0)) == [
            "context",
            alone(TEXTS[1], 8, temperature=0),
        ]
        assert small.explain_context().resident_tokens == 32


def test_a_pool_refuses_what_is_no_time_and_no_namespace(pool: Any) -> None:
    for timeout in (-1, float("nan"), "1", True):
        with pytest.raises(ic.InvalidInputError):
            pool.drain(timeout)
    for namespace in (5, b"a", True, "\ud800"):
        with pytest.raises(ic.InvalidInputError):
            pool.flush_cache(namespace)
    pool.open_session().close()  # it does not drain
    assert pool.drain(timeout=0)
    assert pool.drain()
    pool.flush_cache()
    pool.close()
    assert pool.drain()
    with pytest.raises(ic.SessionClosedError):
        pool.flush_cache()


def test_plans_know_pools(reference: Any) -> None:
    with reference.new_pool(n_parallel=3, n_ctx=64) as pool:
        asked = pool.owner.scheduler.context.config
    plan = reference.plan_memory(n_parallel=3, n_ctx=64)
    assert plan == reference.plan_memory(asked)
    assert plan == reference.plan_memory(ic.PoolConfig(n_parallel=3), n_ctx=64)
    assert plan.kv_bytes == 3 * reference.plan_memory(n_ctx=64).kv_bytes
    with pytest.raises(ic.InvalidInputError):
        reference.plan_memory(n_cells=8, n_ctx=64)


@pytest.mark.parametrize("config", [ic.ContextConfig(n_ctx=64), {}, "auto"], ids=repr)
def test_a_config_of_another_kind_is_refused(pack_path: Path, config: Any) -> None:
    with pytest.raises(ic.InvalidInputError):
        ic.open_pool(pack_path, config=config)
