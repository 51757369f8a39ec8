"""Calls that come back together begin in one engine call; nobody else waits for them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from infercore.session import roster, scheduler
from infercore.session.cost_model import CostModel
from infercore.session.jobs import Job
from infercore.session.places import Places
from infercore.session.placing import Placing
from infercore.session.sequence import Sequence
from infercore.session.session import CoreSession
from session.pool_waits import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONG_S = 3.0
"""So long the pool waits here for calls that may come."""
SHORT_S = LONG_S / 4
PLACES = 3


class Steps:
    """Notes how many sequences each engine call with a prompt had, and counts all calls."""

    def __init__(self) -> None:
        self.prompts: list[int] = []
        self.sequences: list[int] = []
        self.n = 0

    def on_step(self, step: Any) -> None:
        self.n += 1
        self.sequences.append(step.n_sequences)
        if step.n_prompt > 1:
            self.prompts.append(step.n_sequences)


@pytest.fixture
def steps() -> Iterator[Steps]:
    steps = Steps()
    ic.set_observer(steps)
    yield steps
    ic.set_observer(None)


@pytest.fixture
def opened(reference: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Opens a pool that waits long."""
    monkeypatch.setattr(scheduler, "_GATHERING_S", LONG_S)
    monkeypatch.setattr(scheduler, "_GATHERING_S_EACH", LONG_S)
    monkeypatch.setattr(scheduler, "_GATHERING_MOST_S", 2 * LONG_S)
    monkeypatch.setattr(CostModel, "step_ms", lambda *_: LONG_S / scheduler._GATHERING_STEPS * 1e3)
    monkeypatch.setattr(roster, "_EXPECTED_S", LONG_S)
    pools = []

    def opened(batching: str = "always") -> Any:
        pools.append(
            reference.new_pool(n_parallel=PLACES, n_ctx=128, batching=batching, n_step_tokens=64)
        )
        return pools[-1]

    yield opened
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(opened: Callable[..., Any]) -> Any:
    return opened()


def answer(pool: Any, text: str, **fields: Any) -> float:
    """Return the seconds that an answer took."""
    started = time.perf_counter()
    with pool.open_session() as session:
        session.generate(text, max_tokens=3, temperature=0, ignore_eos=True, **fields)
    return time.perf_counter() - started


def overlap(pool: Any) -> None:
    """Let several answers end, whose callers may come back."""
    with ExitStack() as stack:
        sessions = [stack.enter_context(pool.open_session()) for _ in range(PLACES)]
        for session, text in zip(sessions, ("A girl", "A boy had", "One day"), strict=True):
            session.ensure_prefix(text)
        streams = [s.decode(max_tokens=4, temperature=0, ignore_eos=True) for s in sessions]
        for stream in streams:
            next(stream)
        for stream in streams:
            list(stream)


@pytest.fixture
def waits(pool: Any) -> Iterator[tuple[Any, ThreadPoolExecutor]]:
    """A session whose call, in another thread, waits for others that do not come."""
    with ThreadPoolExecutor(PLACES) as threads, pool.open_session() as session:
        overlap(pool)
        yield session, threads


def begin(waits: tuple[Any, ThreadPoolExecutor], **fields: Any) -> Any:
    session, threads = waits
    call = threads.submit(session.generate, "The miller said", max_tokens=3, **fields)
    time.sleep(0.1)
    assert not call.done()
    return call


def test_callers_that_come_back_together_begin_together(pool: Any, steps: Steps) -> None:
    overlap(pool)
    steps.prompts.clear()
    with ThreadPoolExecutor(PLACES) as threads:
        calls = []
        for text in ("Mira went", "The old man", "In the wood"):
            calls.append(threads.submit(answer, pool, text))
            time.sleep(0.1)
        assert max(call.result() for call in calls) < SHORT_S + 0.2
    assert steps.prompts[0] == PLACES


@pytest.mark.parametrize(
    ("limit", "seconds", "n_together"),
    [("_GATHERING_S", 1.0, PLACES), ("_GATHERING_MOST_S", 0.9, PLACES - 1)],
    ids=["each renews the wait", "and not without end"],
)
def test_callers_that_come_one_after_the_other_begin_together(
    pool: Any,
    steps: Steps,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    seconds: float,
    n_together: int,
) -> None:
    monkeypatch.setattr(scheduler, limit, seconds)
    overlap(pool)
    steps.prompts.clear()
    with ThreadPoolExecutor(PLACES) as threads:
        for text in ("Mira went", "The old man", "In the wood"):
            threads.submit(answer, pool, text)
            time.sleep(0.6)
    assert steps.prompts[0] == n_together


def test_it_waits_no_longer_than_that(pool: Any) -> None:
    overlap(pool)
    assert answer(pool, "Mira went") < 2 * LONG_S


def test_who_is_alone_waits_for_nobody(pool: Any) -> None:
    assert sum(answer(pool, text) for text in ("Once upon", "The baker", "A cat")) < SHORT_S


def test_nobody_waits_for_callers_long_gone(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    overlap(pool)
    monkeypatch.setattr(roster, "_EXPECTED_S", 0.1)
    time.sleep(0.2)
    assert sum(answer(pool, text) for text in ("Once upon", "The baker", "A cat")) < SHORT_S


def test_answers_of_one_caller_do_not_renew_that_others_are_expected(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_GATHERING_S", 0.2)
    monkeypatch.setattr(roster, "_EXPECTED_S", 0.5)
    overlap(pool)
    until = time.perf_counter() + 0.8
    while time.perf_counter() < until:
        answer(pool, "Once upon")
    assert max(answer(pool, text) for text in ("The baker", "A cat", "A dog")) < 0.15


def test_who_went_away_is_not_expected(pool: Any) -> None:
    with pool.open_session() as one, pool.open_session() as other:
        streams = [session.chat([{"role": "user", "content": "Hi"}]) for session in (one, other)]
        for stream in streams:
            next(stream)
        for stream in streams:
            stream.close()
    assert answer(pool, "Once upon a time") < SHORT_S


@pytest.mark.parametrize("batching", ["never", "always"])
def test_turns_and_a_full_pool_wait_for_nobody(opened: Callable[..., Any], batching: str) -> None:
    pool = opened(batching)
    overlap(pool)
    n = 1 if batching == "never" else PLACES
    for _ in range(PLACES):
        pool.owner.scheduler.roster.expect(Job(Sequence("")))
    with ThreadPoolExecutor(n) as threads:
        calls = [threads.submit(answer, pool, text) for text in ("Mira", "The man", "A wood")[:n]]
        assert max(call.result() for call in calls) < SHORT_S


def test_who_generates_waits_for_nobody(pool: Any) -> None:
    with pool.open_session() as session, ThreadPoolExecutor(1) as threads:
        session.ensure_prefix("A girl had a dog")
        stream = session.decode(max_tokens=100, temperature=0, ignore_eos=True)
        next(stream)
        overlap(pool)
        next(stream)
        late = threads.submit(answer, pool, "The miller said")
        started = time.perf_counter()
        for _ in range(8):
            next(stream)
        assert time.perf_counter() - started < SHORT_S
        stream.close()
        late.result()


CALLS: dict[str, Callable[[Any], Any]] = {
    "generate": lambda session: session.generate("The miller said", max_tokens=9),
    "completion": lambda session: list(session.completion("The miller said", max_tokens=9)),
    "chat": lambda session: list(session.chat([{"role": "user", "content": "Hi"}], max_tokens=9)),
}


@pytest.mark.parametrize("kind", CALLS)
def test_an_answer_has_the_engine_call_behind_its_prompt_s(
    pool: Any, steps: Steps, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    begin, delays = CoreSession.stream_of, [0.1]

    def late(session: CoreSession, *args: Any, **fields: Any) -> Any:
        time.sleep(delays.pop() if delays else 0.0)
        return begin(session, *args, **fields)

    monkeypatch.setattr(scheduler, "_FOLLOWING_S", LONG_S)
    with pool.open_session() as one, pool.open_session() as other, ThreadPoolExecutor(1) as threads:
        one.ensure_prefix("A girl had a dog")
        stream = one.decode(max_tokens=100, temperature=0, ignore_eos=True)
        next(stream)
        monkeypatch.setattr(CoreSession, "stream_of", late)
        steps.sequences.clear()
        asked = threads.submit(CALLS[kind], other)
        while not asked.done():
            next(stream, None)
        asked.result()
    behind = steps.sequences[steps.sequences.index(2) + 1 :]
    assert not delays
    assert behind.index(2) < 5  # not at once where the other's reader is late


@pytest.mark.parametrize(
    ("n_here", "n_coming", "part"), [(1, 2, 1 / 3), (1, 1, 1 / 4), (8, 1, 1 / 8)]
)
def test_the_more_of_a_step_is_on_its_way_the_longer_it_is_waited_for(
    pool: Any, monkeypatch: pytest.MonkeyPatch, n_here: int, n_coming: int, part: float
) -> None:
    step_s = LONG_S / scheduler._GATHERING_STEPS
    monkeypatch.setattr(scheduler, "_FOLLOWING_S", 2 * LONG_S)
    own = pool.owner.scheduler  # which no thread works for before the first call
    own.roster.running += [Job(Sequence("")) for _ in range(n_here)]
    for _ in range(n_coming):
        job = Job(Sequence(""))
        job.leads_on = True
        own.roster.expect(job)
    waits_s = own.gathers_until() - time.perf_counter()
    own.roster.running.clear()
    assert waits_s == pytest.approx(part * step_s, abs=0.1)


def test_who_comes_while_others_are_placed_begins_with_them(
    pool: Any, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, inbox, n_placed = Placing.place, pool.owner.scheduler.inbox, 0

    def slow(self: Placing, job: Job) -> bool | None:
        nonlocal n_placed
        n_placed += 1
        if n_placed == 1:
            threads.submit(answer, pool, "The old man")
            wait_for(lambda: inbox.qsize() > 1)  # a session, and its call
        return place(self, job)

    monkeypatch.setattr(Placing, "place", slow)
    with ThreadPoolExecutor(2) as threads:
        answer(pool, "Mira went")
    assert steps.prompts == [2]


def test_a_stream_that_rested_goes_on_at_once(pool: Any) -> None:
    with pool.open_session() as session:
        session.ensure_prefix("A girl had a dog")
        stream = session.decode(max_tokens=100, temperature=0, ignore_eos=True)
        next(stream)
        with ThreadPoolExecutor(PLACES) as threads:
            time.sleep(0.1)  # it is ahead of its reader
            overlap(pool)
            late = threads.submit(answer, pool, "The miller said")
            time.sleep(0.1)
            started = time.perf_counter()
            for _ in range(8):
                next(stream)
            assert time.perf_counter() - started < SHORT_S
            stream.close()
            late.result()


def test_who_is_cancelled_meanwhile_ends_at_once(waits: Any) -> None:
    call = begin(waits)
    started = time.perf_counter()
    waits[0].cancel()
    with pytest.raises(ic.InferCoreError):
        call.result()
    assert time.perf_counter() - started < SHORT_S


def test_a_deadline_meanwhile_holds(waits: Any) -> None:
    started = time.perf_counter()
    call = begin(waits, timeout=0.3)
    with pytest.raises(ic.CallTimeoutError):
        call.result()
    assert time.perf_counter() - started < SHORT_S


def test_a_pool_closes_meanwhile(pool: Any, waits: Any) -> None:
    call = begin(waits)
    started = time.perf_counter()
    pool.close()
    with pytest.raises(ic.SessionClosedError):
        call.result()
    assert time.perf_counter() - started < SHORT_S


def test_what_sessions_ask_of_the_owner_is_done_meanwhile(pool: Any, waits: Any) -> None:
    with pool.open_session() as other:
        other.ensure_prefix("In the wood")
        overlap(pool)
        begin(waits)
        started = time.perf_counter()
        other.fork().close()
        assert time.perf_counter() - started < SHORT_S


def test_a_first_token_is_read_before_the_engine_goes_on(
    pool: Any, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_FIRST_S", LONG_S)
    with pool.open_session() as session:
        session.ensure_prefix("A girl had a dog")
        stream = session.decode(max_tokens=8, temperature=0, ignore_eos=True)
        n_steps = steps.n
        next(stream)
        time.sleep(0.2)
        assert steps.n == n_steps  # the prefix was evaluated with its row
        started = time.perf_counter()
        list(stream)
        assert time.perf_counter() - started < SHORT_S


def test_others_do_not_wait_for_who_reads_no_first_token(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_FIRST_S", LONG_S)
    with pool.open_session() as session, pool.open_session() as other:
        session.ensure_prefix("A girl had a dog")
        other.ensure_prefix("One day")
        first = session.decode(max_tokens=8, temperature=0, ignore_eos=True)
        next(first)
        started = time.perf_counter()
        list(other.decode(max_tokens=8, temperature=0, ignore_eos=True))
        list(first)
        assert time.perf_counter() - started < SHORT_S


def test_a_place_is_given_beside_those_that_run() -> None:
    context = SimpleNamespace(n_seq_max=8)
    running = [SimpleNamespace(sequence=SimpleNamespace(seq_id=i)) for i in (0, 2, 5)]
    known: Any = SimpleNamespace(running=running)
    engine: Any = SimpleNamespace(context=context)
    nothing: Any = None
    places = Places(engine, known, set(), nothing, nothing)
    places.free_ids = [7, 6, 4, 1, 3]
    taken = []
    for _ in range(5):
        sequence: Any = SimpleNamespace(seq_id=None)
        assert places.take_id(sequence)
        taken.append(sequence.seq_id)
        running.append(SimpleNamespace(sequence=sequence))
    assert taken == [1, 3, 4, 6, 7]
