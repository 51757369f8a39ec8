"""Sessions of a pool: the same sessions, many at once on one engine."""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from infercore.testing import reference_settings
from session.pool_waits import SECONDS, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TEXTS = (
    "Once upon a time",
    "The baker had a dog",
    "Once upon a time there was",
    "A little girl",
    "Once upon a",
    "tick tock tick tock",
)


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """Return what each of ``works`` returns, all of them begun at once."""
    found: list[Any] = [None] * len(works)

    def do(i: int) -> None:
        try:
            found[i] = works[i]()
        except BaseException as error:  # noqa: BLE001  (the test looks at it)
            found[i] = error

    threads = [threading.Thread(target=do, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a call of a pool hangs"
    return found


def tokens_of(session: Any, text: str, n: int = 10, **fields: Any) -> list[int]:
    session.ensure_prefix(text)
    return [t for chunk in session.decode(max_tokens=n, **fields) for t in chunk.tokens]


@pytest.fixture
def alone(reference: Any) -> Callable[..., list[int]]:
    def tokens(text: str, n: int = 10, **fields: Any) -> list[int]:
        with reference.new_session(n_ctx=256) as session:
            return tokens_of(session, text, n, **fields)

    return tokens


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


def test_who_has_begun_answers_before_the_others_are_read(reference: Any) -> None:
    """Else a call waits twice: for its prompt, and behind all others' prompts for its answer."""
    n_calls, order = 6, list[Any]()
    with reference.new_pool(n_parallel=1, n_ctx=64) as pool:
        scheduler = pool.owner.scheduler
        sessions = [pool.open_session() for _ in range(n_calls)]

        def note(sequences: list[Any]) -> None:
            time.sleep(0.02)  # callers are back before the next step, as with a real engine
            order.extend(sequences)

        pool.owner.ask(lambda: setattr(scheduler.stepping, "on_call", note))
        in_threads(
            *(
                lambda i=i, session=session: session.generate(TEXTS[i], max_tokens=4)
                for i, session in enumerate(sessions)
            )
        )
    answered = len(order) - order[::-1].index(order[0])
    assert len(set(order)) == n_calls
    assert len(set(order[:answered])) <= 2


@pytest.mark.parametrize("text", [TEXTS[0], (5, 6, 7)], ids=["text", "tokens"])
def test_a_prompt_that_is_generated_from_is_one_call(reference: Any, text: Any) -> None:
    """Its first token had one of its own."""
    with reference.new_pool(n_parallel=2, n_ctx=64) as pool, pool.open_session() as session:
        with reference.new_session(n_ctx=64) as alone:
            expected = alone.generate(text, max_tokens=1, temperature=0)
        assert session.generate(text, max_tokens=1, temperature=0) == expected
        assert pool.stats().n_steps == 1


def test_a_prompt_that_was_not_evaluated_leaves_the_session_empty(reference: Any) -> None:
    with reference.new_pool(n_parallel=1, n_ctx=64) as pool, pool.open_session() as session:
        with pytest.raises(ic.CallTimeoutError):
            session.generate(TEXTS[0], max_tokens=1, timeout=1e-9)
        assert session.state == "EMPTY"
        assert session.generate(TEXTS[0], max_tokens=1, temperature=0)


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


def test_a_first_token_waits_for_no_step_behind_it(
    reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reference.new_pool(n_ctx=256) as pool, pool.open_session() as session:
        session.ensure_prefix("Once upon a time")
        kind = type(pool.owner.scheduler.context)
        evaluate, goes_on = kind.decode_one, threading.Event()

        def held(*args: Any, **fields: Any) -> Any:
            goes_on.wait(SECONDS / 6)
            return evaluate(*args, **fields)

        monkeypatch.setattr(kind, "decode_one", held)
        with session.decode(max_tokens=2, temperature=0, ignore_eos=True) as stream:
            begun = time.monotonic()
            assert next(stream).tokens
            assert time.monotonic() - begun < SECONDS / 7, "it came with the second"
            goes_on.set()
            assert list(stream)


def test_a_call_has_its_sequences_in_their_order(
    reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with cells apart evaluates neighbours together, and cuts a call elsewhere."""
    calls: list[list[int]] = []
    with reference.new_pool(n_parallel=4, n_ctx=128, batching="always", n_step_tokens=64) as pool:
        kind = type(pool.owner.scheduler.context)
        each, spans = kind.decode_each, kind.decode_spans

        def seen_each(self: Any, tokens: Any, seq_ids: Any) -> Any:
            calls.append(list(seq_ids))
            return each(self, tokens, seq_ids)

        def seen_spans(self: Any, found: Any) -> Any:
            calls.append([seq_id for seq_id, *_ in found])
            return spans(self, found)

        monkeypatch.setattr(kind, "decode_each", seen_each)
        monkeypatch.setattr(kind, "decode_spans", seen_spans)
        sessions = [pool.open_session() for _ in range(4)]
        for session, text in zip(sessions, TEXTS, strict=False):
            session.ensure_prefix(text)
        streams = [s.decode(max_tokens=12, ignore_eos=True) for s in reversed(sessions)]
        late = pool.open_session()
        assert all(next(stream).tokens for stream in streams)
        in_threads(*(lambda s=s: list(s) for s in streams), lambda: late.ensure_prefix("tick tock"))
    assert any(len(ids) > 1 for ids in calls)
    assert all(ids == sorted(ids) for ids in calls), calls


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
        first.cancel()
        second.cancel()
        goes_on.set()
        for thread in threads:
            thread.join(SECONDS)
        after = third.explain_context()
        assert (after.state, after.resident_tokens) == (before.state, before.resident_tokens)
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


@pytest.mark.parametrize("n", [1, 3])
def test_samples_of_one_call_do_not_wait_for_one_another(reference: Any, n: int) -> None:
    with reference.new_pool(n_parallel=n, n_ctx=64, max_waiting=0) as pool:
        session = pool.open_session()
        session.ensure_prefix("Once upon a time")
        assert len(session.sample_many(2 * n, max_tokens=3)) == 2 * n


def test_closing_the_pool_ends_every_call(reference: Any) -> None:
    pool = reference.new_pool(n_parallel=2, n_ctx=256, n_step_tokens=1)
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
    for thread in threads:
        thread.join(SECONDS)
    assert [type(error) for error in found] == [ic.SessionClosedError] * 4
    assert pool.closed
    with pytest.raises(ic.SessionClosedError):
        pool.open_session()
    with pytest.raises(ic.SessionClosedError):
        sessions[0].ensure_prefix("x")
    for session in sessions:
        session.close()


def in_error(work: Callable[[], Any]) -> BaseException | None:
    try:
        work()
    except ic.InferCoreError as error:
        return error
    return None


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


def test_an_answer_without_a_step_has_a_batch_of_one(reference: Any) -> None:
    with reference.new_pool(n_ctx=64) as pool, pool.open_session() as session:
        session.ensure_prefix(TEXTS[0])
        list(session.decode(max_tokens=1, temperature=0))
        session.ensure_prefix(TEXTS[0])
        *_, last = session.decode(max_tokens=1, temperature=0)
        assert isinstance(last.usage.mean_batch, float)
        assert last.usage.mean_batch >= 1.0


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


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "always"),
        ({"batching": "always"}, "always"),
        ({"batching": "never"}, "never"),
        ({"batch_invariant": True}, "never"),
    ],
)
def test_statistics_say_whether_sessions_share_calls(
    reference: Any, fields: dict[str, Any], expected: str
) -> None:
    with reference.new_pool(n_parallel=2, n_ctx=64, **fields) as pool:
        assert pool.stats().batching == expected


@pytest.mark.parametrize(("most", "places"), [(16, 16), (5, 4), (4, 4), (3, 2), (1, 1)])
def test_an_engine_of_few_sequences_has_a_pool_of_as_many(
    reference: Any, monkeypatch: pytest.MonkeyPatch, most: int, places: int
) -> None:
    allowed = tuple(range(1, most + 1))
    monkeypatch.setitem(reference_settings._CONTEXT_VALUES, "n_seq_max", allowed)
    with reference.new_pool(n_ctx=64, n_parallel=4, batching="always") as pool:
        assert pool._owner.scheduler.context.n_seq_max == places
        texts = [pool.open_session().generate("Once", max_tokens=2, temperature=0) for _ in "ab"]
    assert texts[0] == texts[1]
