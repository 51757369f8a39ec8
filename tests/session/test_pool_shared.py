"""What sessions of a pool share: parts of texts, where their identity is the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from infercore.session.places import Places
from session.pool_texts import TEXTS
from session.pool_waits import in_threads

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def pool(reference: Any) -> Iterator[Any]:
    with reference.new_pool(n_parallel=4, n_ctx=256) as pool:
        yield pool


def test_a_prefix_is_copied_and_not_evaluated_again(pool: Any) -> None:
    with pool.open_session() as first, pool.open_session() as second:
        n = first.ensure_prefix(TEXTS[2]).prefilled_tokens
        status = second.ensure_prefix(TEXTS[2])
        assert (status.reused_tokens, status.prefilled_tokens) == (n - 1, 1)
        with pool.open_session(namespace="other") as stranger:
            assert stranger.ensure_prefix(TEXTS[2]).reused_tokens == 0


@pytest.mark.parametrize("cache_bytes", [0, 2**26])
def test_another_identity_starts_cold_whatever_others_hold(
    reference: Any, cache_bytes: int
) -> None:
    text = "the little dog and the baker " * 8
    other = ic.PrefixInput(text=text, manifest=ic.ContextManifest(model_digest="0" * 64))
    with reference.new_pool(n_parallel=2, n_ctx=256, cache_bytes=cache_bytes) as pool:
        with pool.open_session(namespace="kept") as session:
            session.ensure_prefix(text)
        for namespace in ("", "kept"):
            with pool.open_session(namespace=namespace) as held:
                n = held.ensure_prefix(text).prefix_tokens
                with pool.open_session(namespace=namespace) as session:
                    status = session.ensure_prefix(other)
                    assert status.reset_reason == "model_digest changed"
                    assert (status.reused_tokens, status.prefilled_tokens) == (0, n)
                    assert session.ensure_prefix(text).reused_tokens == n
                    assert held.ensure_prefix(other).prefilled_tokens == n


@pytest.mark.parametrize("label", [{"profile_id": "a"}, {"prompt_format": "b"}])
def test_sessions_of_another_identity_share_nothing(
    reference: Any, label: dict[str, str], tmp_path: Path
) -> None:
    text = "the little dog and the baker " * 8
    fields = {"n_parallel": 2, "n_ctx": 256, "cache_dir": tmp_path}
    with (
        reference.new_pool(**fields) as pool,
        pool.open_session() as plain,
        pool.open_session(**label) as one,
    ):
        n = plain.ensure_prefix(text).prefix_tokens
        assert one.ensure_prefix(text).reused_tokens == 0
        with pool.open_session(**label) as like:
            assert like.ensure_prefix(text).shared_tokens == n - 1
        with one.fork() as fork:
            assert fork.ensure_prefix(text).reused_tokens == n
    with reference.new_pool(**fields) as pool:  # what closed sessions left is on the disk
        with pool.open_session(**dict.fromkeys(label, "c")) as other:
            assert other.ensure_prefix(text).reused_tokens == 0
        with pool.open_session(**label) as like:
            assert like.ensure_prefix(text).restored_tokens == n - 1
        pool.flush_cache()
        with pool.open_session(**label) as like:
            assert like.ensure_prefix(text).reused_tokens == 0


def test_a_shared_part_is_evaluated_once_though_both_come_at_once(reference: Any) -> None:
    text = "the little dog and the baker " * 6
    with reference.new_pool(n_parallel=4, n_ctx=256, n_step_tokens=4) as pool:
        sessions = [pool.open_session() for _ in range(3)]
        statuses = in_threads(*(lambda s=s: s.ensure_prefix(text) for s in sessions))
        n = statuses[0].prefix_tokens
        assert sum(status.prefilled_tokens for status in statuses) <= n + 2 * 5


@pytest.mark.parametrize("cut", ["n_batch", "n_step_tokens"])
def test_bits_of_ones_own_do_not_forbid_sharing(reference: Any, cut: str) -> None:
    """Calls end at multiples of the most tokens that a call may have."""
    text = "the little dog and the baker " * 12
    with reference.new_pool(n_ctx=256, batch_invariant=True, **{cut: 32}) as pool:
        one, other = pool.open_session(), pool.open_session()
        n = one.ensure_prefix(text).prefix_tokens
        assert n > 96
        assert other.ensure_prefix(text).shared_tokens == n - n % 32


def test_cells_that_several_sessions_hold_are_counted_once(pool: Any, reference: Any) -> None:
    n = len(reference.tokenizer.encode(TEXTS[2]))
    with pool.open_session() as one, pool.open_session() as two:
        one.ensure_prefix(TEXTS[2])
        assert (pool.stats().n_cells_used, pool.stats().n_cells_shared) == (n, 0)
        shared = two.ensure_prefix(TEXTS[2]).shared_tokens
        assert n - 1 <= shared <= n
        assert pool.stats().n_cells_shared == shared
        assert pool.stats().n_cells_used == 2 * n - shared
    assert (pool.stats().n_cells_used, pool.stats().n_cells_shared) == (0, 0)


@pytest.fixture
def crowded(reference: Any, request: pytest.FixtureRequest) -> Iterator[tuple[Any, list[Any]]]:
    """A pool all of whose sequences are held by idle sessions, the least recently used first."""
    with reference.new_pool(n_parallel=2, n_ctx=512, cache_bytes=request.param) as pool:
        n = pool.owner.scheduler.context.n_seq_max
        sessions = [pool.open_session() for _ in range(n)]
        for i, session in enumerate(sessions):
            session.ensure_prefix("the little dog and the baker" if not i else f"{i} cats sat")
        assert all(session.context.held_tokens for session in sessions)
        yield pool, sessions


@pytest.mark.parametrize("crowded", [0, 2**26], indirect=True)
def test_who_has_to_go_leaves_a_common_beginning_behind(crowded: tuple[Any, list[Any]]) -> None:
    pool, (oldest, *others) = crowded
    status = pool.open_session().ensure_prefix("the little dog sat")
    assert status.shared_tokens > 2
    assert status.restored_tokens == 0
    assert oldest.context.held_tokens == 0
    assert all(session.context.held_tokens for session in others)
    again = oldest.ensure_prefix("the little dog and the baker")  # what it held was moved out
    assert again.restored_tokens == (again.prefix_tokens - 1 if pool.config.cache_bytes else 0)


@pytest.mark.parametrize("crowded", [0], indirect=True)
def test_who_has_to_go_later_keeps_its_cells(crowded: tuple[Any, list[Any]]) -> None:
    pool, (oldest, second, *_) = crowded
    second.ensure_prefix("the old man")
    pool.open_session().ensure_prefix("the old man and the little dog")
    assert (oldest.context.held_tokens, second.context.held_tokens > 0) == (0, True)


@pytest.mark.parametrize("crowded", [2**26], indirect=True)
def test_what_is_stored_whole_is_restored_and_not_taken_in_parts(
    crowded: tuple[Any, list[Any]],
) -> None:
    pool, (oldest, *others) = crowded
    late = pool.open_session()
    late.ensure_prefix("the little cat")  # for which the oldest has to go
    assert oldest.context.held_tokens == 0
    for session in others:
        session.ensure_prefix("One day")
    assert late.context.held_tokens  # it has to go next, and has a part of what is asked for
    again = oldest.ensure_prefix("the little dog and the baker")
    assert (again.shared_tokens, again.restored_tokens) == (0, again.prefix_tokens - 1)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_cells_that_were_taken_over_give_the_same_tokens(
    reference: Any, monkeypatch: pytest.MonkeyPatch, batch_invariant: bool
) -> None:
    texts = ["the little dog and the baker " * n for n in (2, 3, 5)] + ["the little cat"]
    fields = {"max_tokens": 12, "temperature": 0}
    with reference.new_pool(n_parallel=1, n_ctx=256, cache_bytes=0) as pool:
        expected = []
        for text in texts:
            with pool.open_session(namespace=text) as session:
                expected.append(session.generate(text, **fields))
    taken, take_over = [], Places.take_over

    def noted(*args: Any) -> bool:
        taken.append(take_over(*args))
        return taken[-1]

    monkeypatch.setattr(Places, "take_over", noted)
    own = {"cache_bytes": 0, "batch_invariant": batch_invariant, "n_step_tokens": 4}
    with reference.new_pool(n_parallel=2, n_ctx=256, **own) as pool:
        sessions = [pool.open_session() for _ in range(pool.owner.scheduler.context.n_seq_max + 3)]
        for i, session in enumerate(sessions * 3):
            text, wanted = texts[i % 4], expected[i % 4]
            assert session.generate(text, **fields) == wanted
    assert any(taken)
