"""What fails in a pool, and whom it may touch."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from infercore.session import snapshots
from infercore.session.roster import Roster
from infercore.session.scheduler import Scheduler
from session.pool_texts import tokens_of
from session.pool_waits import SECONDS, in_error, in_threads

if TYPE_CHECKING:
    from collections.abc import Callable

TEXTS = ("Once upon a time", "The baker had a dog", "A little girl", "tick tock tick tock")


@pytest.mark.parametrize("work", ["nothing", "half", "all"])
def test_a_failing_step_is_tried_alone_by_each_of_it(
    reference: Any, faults: Any, alone: Any, work: str
) -> None:
    expected = [alone(text, seed=4) for text in TEXTS]
    with reference.new_pool(n_parallel=4, n_ctx=256) as pool:
        sessions = [pool.open_session() for _ in TEXTS]
        faults.plan("decode_batch", MemoryError("no memory"), at=3, work=work)
        works = [
            lambda s=s, t=t: tokens_of(s, t, seed=4) for s, t in zip(sessions, TEXTS, strict=True)
        ]
        assert in_threads(*works) == expected


def test_who_fails_alone_ends_alone(reference: Any, faults: Any, alone: Any) -> None:
    with reference.new_pool(n_parallel=2, n_ctx=256) as pool, pool.open_session() as session:
        faults.plan("decode", MemoryError("no memory"))
        with pytest.raises(ic.OutOfMemoryError):
            session.ensure_prefix(TEXTS[0])
        assert tokens_of(session, TEXTS[0], temperature=0) == alone(TEXTS[0], temperature=0)


def test_what_failed_half_way_goes_on_in_another_session(
    reference: Any, faults: Any, alone: Any
) -> None:
    with reference.new_pool(n_parallel=2, n_ctx=256) as pool:
        session = pool.open_session()
        tokens_of(session, TEXTS[0], 2)
        faults.plan("decode_one", MemoryError("no memory"))
        with pytest.raises(ic.OutOfMemoryError):
            tokens_of(session, TEXTS[0], temperature=0)
        value = snapshots.value_of(session)
        assert value["parts"]["n_prefix"] + value["parts"]["n_generated"] <= len(value["tokens"])
        other = pool.open_session()
        snapshots.adopt(other, value)
        assert tokens_of(other, TEXTS[0], temperature=0) == alone(TEXTS[0], temperature=0)


def test_a_processor_that_raises_ends_its_own_stream(reference: Any, alone: Any) -> None:
    class Failing:
        def apply(self, logits: Any) -> Any:
            raise ZeroDivisionError("a processor of the caller's failed")

    with reference.new_pool(n_parallel=2, n_ctx=256) as pool:
        one, other = pool.open_session(), pool.open_session()
        found = in_threads(
            lambda: tokens_of(one, TEXTS[0], processors=[Failing()]),
            lambda: tokens_of(other, TEXTS[1], temperature=0),
        )
        assert isinstance(found[0], ZeroDivisionError)
        assert found[1] == alone(TEXTS[1], temperature=0)
        assert tokens_of(one, TEXTS[0], temperature=0) == alone(TEXTS[0], temperature=0)


def test_an_engine_that_fails_for_good_is_opened_anew(
    reference: Any, faults: Any, alone: Any
) -> None:
    expected = [alone(text, 12, seed=4) for text in TEXTS]
    with reference.new_pool(n_parallel=4, n_ctx=256) as pool:
        sessions = [pool.open_session() for _ in TEXTS]
        faults.plan("decode_batch", RuntimeError("the engine is broken"), at=4)
        works = [
            lambda s=s, t=t: tokens_of(s, t, 12, seed=4)
            for s, t in zip(sessions, TEXTS, strict=True)
        ]
        assert in_threads(*works) == expected
        assert pool.stats().n_restarts == 1


def test_what_fails_between_two_calls_ends_nobody(
    reference: Any, faults: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [alone(text, 12, seed=4) for text in TEXTS[:2]]
    with reference.new_pool(n_parallel=2, n_ctx=256) as pool:
        one, other = pool.open_session(), pool.open_session()
        assert tokens_of(one, TEXTS[0], 12, seed=4) == expected[0]
        tokens_of(other, TEXTS[1])
        faults.plan("seq_remove", ic.OutOfMemoryError("no memory"), times=1)
        other.close()
        assert pool.stats().n_restarts == 1
        errors = [ic.OutOfMemoryError("no memory")]
        places = pool.owner.scheduler.places
        have_room = places.have_room

        def fails_once(parts: Any) -> bool:
            if errors:
                raise errors.pop()
            return bool(have_room(parts))

        monkeypatch.setattr(places, "have_room", fails_once)
        assert tokens_of(one, TEXTS[1], 12, seed=4) == expected[1]
        assert pool.stats().n_restarts == 2


def test_too_many_failures_for_good_end_all_with_the_first_cause(
    reference: Any, faults: Any
) -> None:
    with reference.new_pool(n_parallel=2, n_ctx=256, max_restarts=0) as pool:
        sessions = [pool.open_session(), pool.open_session()]
        sessions[0].ensure_prefix("a")
        broken = RuntimeError("the engine is broken")
        faults.plan("decode", broken)
        with pytest.raises(ic.SessionFatalError) as caught:
            sessions[0].ensure_prefix(TEXTS[0])
        assert caught.value.cause is broken
        for session in sessions:
            with pytest.raises(ic.SessionFatalError) as caught:
                session.ensure_prefix(TEXTS[1])
            assert caught.value.cause is broken
            session.close()


def test_one_that_breaks_the_engine_ends_alone(reference: Any, faults: Any, alone: Any) -> None:
    """The same session is in the step of two ends in a row; its neighbours go on."""
    text = TEXTS[0] + " there was"

    class Breaking:
        """Lets the engine break in whatever step follows."""

        def apply(self, logits: Any) -> Any:
            faults.plan("decode_batch", RuntimeError("broken"), times=1000)
            faults.plan("decode_one", RuntimeError("broken"), times=1000)
            faults.plan("decode", RuntimeError("broken"), times=1000)
            return logits

    with reference.new_pool(n_parallel=2, n_ctx=256, max_restarts=50) as pool:
        bad = pool.open_session()
        found = in_threads(lambda: tokens_of(bad, text, 4, processors=[Breaking()]))
        assert isinstance(found[0], ic.SessionFatalError)
        faults.reset()
        with pool.open_session() as good:
            assert tokens_of(good, TEXTS[1], temperature=0) == alone(TEXTS[1], temperature=0)


def test_a_timeout_before_the_first_token_and_after_it(pool_of_one_step: Any) -> None:
    session = pool_of_one_step.open_session()
    started = time.perf_counter()
    with pytest.raises(ic.CallTimeoutError) as caught:
        session.ensure_prefix("the little dog and the baker " * 7, timeout=0.02)
    assert time.perf_counter() - started < SECONDS
    assert caught.value.elapsed_ms >= 20
    session.ensure_prefix("a")
    chunks = list(session.decode(timeout=0.3, ignore_eos=True, temperature=0))
    assert chunks[-1].finish_reason in ("timeout", "context")
    assert session.generate(" b", max_tokens=2)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there is no timer here")
def test_a_signal_handler_may_cancel_what_is_being_stopped(reference: Any) -> None:
    """It may come while the same thread, whose call is late, is stopping the engine."""
    text = "the little dog and the baker " * 100
    before = signal.getsignal(signal.SIGALRM)
    with reference.new_pool(n_ctx=1024, n_batch=1024) as pool, pool.open_session() as session:
        signal.signal(signal.SIGALRM, lambda *_: session.cancel())
        try:
            for i in range(10):
                signal.setitimer(signal.ITIMER_REAL, 0.02, 0.003)
                error = in_error(lambda n=i: session.ensure_prefix(f"{n} {text}", timeout=0.02))
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert isinstance(error, (ic.DecodeAbortedError, ic.CallTimeoutError))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert session.ensure_prefix("a b").prefix_tokens


@pytest.mark.parametrize("looks", [False, True])
def test_a_stream_that_is_cancelled_in_its_prompt_ends_at_once(
    reference: Any,
    looks: bool,
) -> None:
    text = "the little dog and the baker " * 100
    with reference.new_pool(n_ctx=1024, n_batch=1024) as pool, pool.open_session() as session:
        session.ensure_prefix(text)
        pool.owner.ask(lambda: pool.owner.scheduler.places.let_go_all())  # to be evaluated again
        stream = session.decode(max_tokens=4, prompt_logprobs=1 if looks else None)
        threading.Timer(0.02, stream.cancel).start()
        assert [chunk.finish_reason for chunk in stream][-1] == "cancelled"
        assert session.explain_context().held_tokens < 700
        assert session.generate(" b", max_tokens=2)


@pytest.mark.parametrize("end", ["timeout", "cancel"])
def test_a_cancel_just_before_the_engine_call_is_not_lost(
    reference: Any, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    text = "the little dog and the baker " * 100
    with reference.new_pool(n_ctx=1024, n_batch=1024) as pool, pool.open_session() as session:
        places = pool.owner.scheduler.places
        have_room, n_calls = places.have_room, [0]

        def late(parts: Any) -> bool:
            n_calls[0] += 1
            if end == "cancel":
                session.cancel()
            else:
                time.sleep(0.2)
            return bool(have_room(parts))

        monkeypatch.setattr(places, "have_room", late)
        timeout = 0.1 if end == "timeout" else None
        assert in_error(lambda: session.ensure_prefix(text, timeout=timeout)) is not None
        assert (session.explain_context().held_tokens, n_calls) == (0, [1])


@pytest.mark.parametrize("end", ["timeout", "cancel"])
def test_a_long_call_for_one_alone_ends_with_its_time(reference: Any, end: str) -> None:
    """The prompt is one engine call, which would otherwise go on to its end."""
    text = "the little dog and the baker " * 100
    with reference.new_pool(n_ctx=1024, n_batch=1024) as pool, pool.open_session() as session:
        n = session.ensure_prefix(text).prefix_tokens
        pool.flush_cache()
        if end == "cancel":
            threading.Timer(0.02, session.cancel).start()
        error = in_error(
            lambda: session.ensure_prefix(f"A {text}", timeout=0.02 if end == "timeout" else None)
        )
        expected = ic.CallTimeoutError if end == "timeout" else ic.DecodeAbortedError
        assert isinstance(error, expected)
        assert session.explain_context().held_tokens < n - 100
        assert session.ensure_prefix(text).prefix_tokens == n


@pytest.fixture
def pool_of_one_step(reference: Any) -> Any:
    with reference.new_pool(n_parallel=2, n_ctx=256, n_step_tokens=1) as pool:
        yield pool


def test_a_timeout_of_a_session_alone(reference: Any) -> None:
    with reference.new_session(n_ctx=256, n_batch=1) as session:
        with pytest.raises(ic.CallTimeoutError):
            session.ensure_prefix("the little dog and the baker " * 7, timeout=0.02)
        session.ensure_prefix("a")
        chunks = list(session.decode(timeout=0.2, ignore_eos=True, temperature=0))
        assert chunks[-1].finish_reason in ("timeout", "context")
        assert session.generate(" b", max_tokens=2)
        with pytest.raises(ic.InvalidInputError):
            session.ensure_prefix("a", timeout=-1)


def test_what_comes_back_where_nothing_can_be_removed_is_counted(recurrent: Any) -> None:
    text = "the little dog and the baker " * 3
    found = []
    with recurrent.new_pool(n_parallel=1, n_ctx=64, cache_bytes=2**26) as pool:
        for _ in range(2):
            with pool.open_session() as session:
                found.append(session.ensure_prefix(text))
    n = found[0].prefix_tokens
    assert [(s.reused_tokens, s.prefilled_tokens) for s in found] == [(0, n), (n, 0)]
    assert found[1].restored_tokens == n


def test_what_is_moved_out_comes_back(reference: Any, tmp_path: Any) -> None:
    text = "the little dog and the baker " * 3
    for fields in ({"cache_bytes": 2**26}, {"cache_dir": str(tmp_path / "cache")}):
        with reference.new_pool(n_parallel=1, n_cells=64, n_ctx=64, **fields) as pool:
            one, two = pool.open_session(), pool.open_session()
            n = one.ensure_prefix(text).prefix_tokens
            two.ensure_prefix("tick tock " * 12)
            assert one.explain_context().held_tokens == 0
            status = one.ensure_prefix(text)
            assert (status.restored_tokens, status.prefilled_tokens) == (n - 1, 1)
            assert pool.stats().n_moved_out
    with reference.new_pool(n_parallel=1, n_cells=64, n_ctx=64, **fields) as pool:
        assert pool.open_session().ensure_prefix(text).restored_tokens  # another program's
        stranger = pool.open_session(namespace="other")
        assert not stranger.ensure_prefix(text).restored_tokens
        pool.flush_cache()


def test_what_is_held_when_a_pool_is_closed_is_the_next_ones(reference: Any, tmp_path: Any) -> None:
    text, fields = "the little dog and the baker " * 3, {"cache_dir": str(tmp_path / "cache")}
    with reference.new_pool(n_parallel=1, n_ctx=64, **fields) as pool:
        session = pool.open_session()
        n = session.ensure_prefix(text).prefix_tokens
    with reference.new_pool(n_parallel=1, n_ctx=64, **fields) as pool:
        assert pool.open_session().ensure_prefix(text).restored_tokens == n - 1
    session.close()


def test_exact_bits_on_demand(reference: Any) -> None:
    """Rows beside others are those of a session alone in such a pool, bit for bit."""

    def rows(pool: Any, text: str) -> list[bytes]:
        seen: list[bytes] = []

        class Seeing:
            def apply(self, logits: Any) -> Any:
                seen.append(logits.tobytes())
                return logits

        with pool.open_session() as session:
            session.ensure_prefix(text)
            list(session.decode(max_tokens=12, temperature=0, processors=[Seeing()]))
            session.prefill_suffix(" and a cat and a house and the garden")
            list(session.decode(max_tokens=6, temperature=0, processors=[Seeing()]))
        return seen

    texts = [f"{text} there was a baker who had a dog" for text in TEXTS]
    fields: dict[str, Any] = {"n_parallel": 2, "n_ctx": 64, "n_cells": 100, "n_step_tokens": 8}
    expected = []
    for text in texts:
        with reference.new_pool(batch_invariant=True, **fields) as pool:
            expected.append(rows(pool, text))
    with reference.new_pool(batch_invariant=True, **fields) as pool:
        assert in_threads(*(lambda t=t: rows(pool, t) for t in texts)) == expected


@pytest.mark.parametrize("raised", [ZeroDivisionError, SystemExit])
def test_an_observer_hears_of_calls_and_steps(reference: Any, raised: type[BaseException]) -> None:
    heard: list[str] = []

    class Observer:
        def on_call_start(self, event: Any) -> None:
            heard.append(f"start {event.operation}")

        def on_step(self, event: Any) -> None:
            heard.append("step")
            raise raised("what an observer raises disturbs nobody")

        def on_call_end(self, event: Any) -> None:
            heard.append(f"end {event.operation}")

    ic.set_observer(Observer())
    try:
        with reference.new_pool(n_parallel=1, n_ctx=64) as pool, pool.open_session() as session:
            session.ensure_prefix("a b c")
    finally:
        ic.set_observer(None)
    assert heard == ["start ensure_prefix", "step", "end ensure_prefix"]
    with pytest.raises(ic.InvalidInputError):
        ic.set_observer(object())


@pytest.mark.parametrize("pooled", [False, True])
def test_an_observer_hears_of_the_end_of_each_stream(reference: Any, pooled: bool) -> None:
    ended: list[Any] = []

    class Observer:
        def on_call_end(self, event: Any) -> None:
            if event.operation == "stream":
                ended.append(event)

    opened = reference.new_pool(n_ctx=64) if pooled else contextlib.nullcontext()
    ic.set_observer(Observer())
    try:
        with opened as pool, (pool.open_session if pooled else new(reference))() as session:
            session.ensure_prefix("a b c")
            for _ in session.decode(max_tokens=3, temperature=0, ignore_eos=True):
                pass
            with session.decode(max_tokens=9, temperature=0, ignore_eos=True) as stream:
                next(stream)
            failing = session.decode(processors=[Failing()])
            with pytest.raises(ZeroDivisionError):
                next(failing)
    finally:
        ic.set_observer(None)
    read, closed, failed = ended
    assert read.usage.completion_tokens == 3
    assert (read.error, closed.usage, closed.error, failed.usage) == (None, None, None, None)
    assert isinstance(failed.error, ZeroDivisionError)


class Failing:
    def apply(self, logits: Any) -> Any:
        raise ZeroDivisionError("a processor of the caller's failed")


def new(model: Any) -> Callable[[], Any]:
    return lambda: model.new_session(n_ctx=64)


def test_guesses_are_refused_beside_batch_invariant(reference: Any) -> None:
    lookup = ic.SpeculativeConfig(kind="prompt_lookup")
    with (
        reference.new_pool(n_ctx=64, batch_invariant=True) as pool,
        pool.open_session() as session,
    ):
        session.ensure_prefix("a b c a b c a b")
        with pytest.raises(ic.UnsupportedFeatureError, match="batch_invariant"):
            session.decode(speculative=lookup)
        chunks = list(session.decode(speculative="auto", max_tokens=4, temperature=0))
        assert chunks[-1].usage.drafted_tokens == 0


def test_where_the_engine_cannot_go_back_states_are_found_by_others(recurrent: Any) -> None:
    text = "Once upon a time there was a little girl who had a dog and a cat"
    with recurrent.new_session(n_ctx=128) as single:
        expected = tokens_of(single, text, 6, temperature=0)
    with recurrent.new_pool(n_parallel=1, n_ctx=128, cache_bytes=2**26) as pool:
        with pool.open_session() as first:
            assert tokens_of(first, text, 6, temperature=0) == expected
        with pool.open_session() as other, pool.open_session(namespace="b") as apart:
            assert other.ensure_prefix(text).restored_tokens > 0
            found = [t for c in other.decode(max_tokens=6, temperature=0) for t in c.tokens]
            assert found == expected
            assert apart.ensure_prefix(text).restored_tokens == 0


@pytest.mark.parametrize("field", ["step_timeout", "load_timeout"])
def test_limits_that_nothing_would_keep_are_refused(reference: Any, field: str) -> None:
    with pytest.raises(ic.UnsupportedFeatureError) as caught:
        reference.new_pool(n_ctx=64, **{field: 5.0})
    assert caught.value.feature == field


def test_closing_an_idle_session_waits_for_no_step(reference: Any) -> None:
    in_step, ends = threading.Event(), threading.Event()

    def hold(sequences: Any) -> None:
        if sequences:
            in_step.set()
            assert ends.wait(SECONDS)

    with reference.new_pool(n_parallel=2, n_ctx=256) as pool:
        idle, busy = pool.open_session(), pool.open_session()
        tokens_of(idle, TEXTS[0], 2)
        pool.owner.scheduler.stepping.on_call = hold
        reader = threading.Thread(target=tokens_of, args=(busy, TEXTS[1], 2), daemon=True)
        reader.start()
        assert in_step.wait(SECONDS)
        closer = threading.Thread(target=idle.close, daemon=True)
        closer.start()
        closer.join(SECONDS)
        assert (idle.closed, closer.is_alive(), reader.is_alive()) == (True, False, True)
        ends.set()
        reader.join(SECONDS)
        busy.close()
        pool.flush_cache()
        assert (pool.stats().n_open, pool.stats().n_cells_used) == (0, 0)


def test_who_lets_another_go_ahead_still_waits_where_the_engine_fails() -> None:
    jobs: list[Any] = [SimpleNamespace(sequence=SimpleNamespace(namespace="")) for _ in range(3)]

    def place(job: Any) -> bool | None:
        if job is jobs[1]:
            raise ic.SessionFatalError("the engine is gone", cause=MemoryError())
        return None

    scheduler: Any = object.__new__(Scheduler)
    scheduler._engine = SimpleNamespace(n_places=4)
    scheduler.roster = Roster()
    scheduler.placing = SimpleNamespace(place=place)
    for job in jobs:
        scheduler.roster.waiting.append(job)
    with pytest.raises(ic.SessionFatalError):
        scheduler._admit()
    assert list(scheduler.roster.waiting) == jobs
