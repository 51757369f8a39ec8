"""A replica that dies takes nothing with it: texts are equal, and no token comes twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from concurrent.futures import Future
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
from local import LocalReplicas, Response
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import DeploymentUnavailableError

import infercore
from infercore.errors import SessionClosedError, SessionFatalError
from infercore_ray.engines import Engines, ReplicaPool

PROMPT = "Once upon a time"
KINDS = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 11}]


@pytest.fixture(scope="module")
def replicas(model_path: str) -> Any:
    running = LocalReplicas(model_path, 2, n_ctx=512, n_parallel=4, n_threads=1)
    yield running
    running.close()


@pytest.fixture
def pool(replicas: LocalReplicas) -> Any:
    while len(replicas.replicas) < 2:
        replicas.start()
    with ReplicaPool(Engines(replicas)) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(model_path: str) -> Any:
    with infercore.open_session(model_path, n_ctx=512, n_threads=1) as session:
        yield session


def place_of(session: Any) -> str:
    return session._process.replica


@pytest.mark.parametrize("kind", KINDS, ids=["greedy", "seeded"])
@pytest.mark.parametrize("at", [0, 1, 7])
def test_a_stream_goes_on_elsewhere(
    replicas: LocalReplicas, pool: Any, alone: Any, kind: dict[str, Any], at: int
) -> None:
    alone.ensure_prefix(PROMPT)
    wanted = [c.text for c in alone.decode(max_tokens=16, **kind)]
    with pool.open_session() as session:
        session.ensure_prefix(PROMPT)
        stream = session.decode(max_tokens=16, **kind)
        found = [next(stream).text for _ in range(at)]
        first = place_of(session)
        replicas.kill(first)
        found += [chunk.text for chunk in stream]
        assert found == wanted
        assert place_of(session) != first
        assert session.explain_context().generated_tokens == 16
        assert session.generate("", max_tokens=4, temperature=0.0)


def test_a_session_goes_on_between_calls(replicas: LocalReplicas, pool: Any, alone: Any) -> None:
    alone.ensure_prefix(PROMPT)
    wanted = alone.generate(" there was", max_tokens=12, temperature=0.0)
    with pool.open_session() as session:
        session.ensure_prefix(PROMPT)
        replicas.kill(place_of(session))
        fork = session.fork()
        assert session.generate(" there was", max_tokens=12, temperature=0.0) == wanted
        replicas.start()
        replicas.kill(place_of(fork))
        with fork:
            assert fork.generate(" there was", max_tokens=12, temperature=0.0) == wanted
        assert session.explain_context().generated_tokens == 12


def test_a_call_that_kills_each_replica_ends_alone(replicas: LocalReplicas, pool: Any) -> None:
    with pool.open_session() as bad, pool.open_session() as good:
        good.ensure_prefix(PROMPT)
        send = replicas.remote

        def killing(route: Any, frame: bytes) -> Any:
            if b'"generating"' in frame:
                replicas.start()
                answer = send(route, frame)
                replicas.kill(replicas.routed[-1][0])
                return answer
            return send(route, frame)

        replicas.remote = killing
        try:
            with pytest.raises(SessionFatalError):
                bad.generate(PROMPT, max_tokens=100)
        finally:
            del replicas.remote
        assert good.generate(" there", max_tokens=3, temperature=0.0)
        with pytest.raises(SessionFatalError):
            bad.generate(PROMPT, max_tokens=1)


def test_a_stream_that_kills_each_replica_ends(replicas: LocalReplicas, pool: Any) -> None:
    send = replicas.remote
    n_deaths = 0

    def killing(route: Any, frame: bytes) -> Any:
        nonlocal n_deaths
        if b'"next"' not in frame:
            return send(route, frame)
        n_deaths += 1
        assert n_deaths < 10, "it goes on without end"
        replicas.start()
        replicas.kill(route.at)
        answer: Future[Any] = Future()
        answer.set_exception(ActorDiedError())
        return Response(answer)

    with pool.open_session() as bad:
        bad.ensure_prefix(PROMPT)
        replicas.remote = killing
        try:
            with pytest.raises(SessionFatalError):
                list(bad.decode(max_tokens=100))
        finally:
            del replicas.remote
    assert n_deaths == 6


def test_none_of_many_streams_is_lost(replicas: LocalReplicas, pool: Any, alone: Any) -> None:
    wanted = {}
    for seed in range(4):
        alone.ensure_prefix(PROMPT)
        wanted[seed] = "".join(c.text for c in alone.decode(max_tokens=40, seed=seed))
    draw = random.Random(5)
    left, wrong = threading.Semaphore(0), []

    def work(number: int) -> None:
        for turn in range(4):
            seed = (number + turn) % 4
            with pool.open_session() as session:
                session.ensure_prefix(PROMPT)
                text = "".join(c.text for c in session.decode(max_tokens=40, seed=seed))
                if text != wanted[seed]:
                    wrong.append((seed, text))
            left.release()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    n_kills = 0
    while any(thread.is_alive() for thread in threads):
        replicas.start()
        replicas.kill(draw.choice(list(replicas.replicas)[:-1]))
        n_kills += 1
        left.acquire(timeout=10.0)  # on a crowded machine three would meet one call
    for thread in threads:
        thread.join()
    assert not wrong
    assert n_kills > 2


def test_what_nobody_asks_about_is_closed_and_comes_again(model_path: str, alone: Any) -> None:
    alone.ensure_prefix(PROMPT)
    wanted = alone.generate(" there was", max_tokens=8, temperature=0.0)
    running = LocalReplicas(model_path, 1, n_ctx=512, n_parallel=4, n_threads=1)
    (replica,) = running.replicas.values()
    with ReplicaPool(Engines(running)) as pool, pool.open_session() as session:
        session.ensure_prefix(PROMPT)
        assert len(replica._worker._held) == 1
        replica._idle_s = 0.0
        replica.close_idle()
        assert not replica._worker._held
        assert session.generate(" there was", max_tokens=8, temperature=0.0) == wanted
    assert not replica._worker._held
    running.close()


def test_a_session_that_opens_while_its_program_leaves_is_closed(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = LocalReplicas(model_path, 1, n_ctx=512, n_parallel=4, n_threads=1)
    (replica,) = running.replicas.values()
    answer = replica._worker.answer

    def late(target: int, name: str, args: list[Any], fields: dict[str, Any]) -> Any:
        if name == "open_session":
            asyncio.run(replica.leave(running.routed[-1][1].origin))
        return answer(target, name, args, fields)

    monkeypatch.setattr(replica._worker, "answer", late)
    with ReplicaPool(Engines(running)) as pool, contextlib.suppress(SessionFatalError):
        pool.open_session()
        assert not replica._worker._held
        assert not replica._used
    running.close()


def test_a_replica_reports_which_calls_are_over(model_path: str) -> None:
    running = LocalReplicas(model_path, 1, n_ctx=512, n_parallel=4, n_threads=1)
    (replica,) = running.replicas.values()
    with ReplicaPool(Engines(running)) as pool, pool.open_session() as session:
        session.ensure_prefix("Once upon a time there was a dog. " * 12)
        report = asyncio.run(replica.record_routing_stats())
        ((origin, (n_working, last, numbers)),) = report["asked"].items()
        *_, (_, route) = running.routed
        assert (origin, last) == (route.origin, route.number)
        assert (n_working, numbers) == (0, ())
        assert set(route.blocks) <= set(report["held"])
        assert route.blocks
    running.close()


def test_a_replica_says_which_prompt_tokens_wait(model_path: str) -> None:
    running = LocalReplicas(model_path, 1, n_ctx=512, n_parallel=4, n_threads=1)
    (replica,) = running.replicas.values()
    blocks = (b"1", b"2", b"3")
    replica._held = frozenset(blocks[:1])
    replica._asked_by("here").running |= {1: blocks, 2: ()}
    assert asyncio.run(replica.record_autoscaling_stats()) == {"waiting_tokens": 128}
    running.close()


def test_a_pool_that_is_closed_leaves_nothing_at_the_replicas(
    replicas: LocalReplicas, model_path: str
) -> None:
    del model_path
    held = [replica._worker._held for replica in replicas.replicas.values()]
    n_before = sum(map(len, held))
    with ReplicaPool(Engines(replicas)) as pool:
        assert pool.config.n_parallel == 4
        sessions = [pool.open_session() for _ in range(3)]
        for session in sessions:
            session.ensure_prefix(PROMPT)
        sessions.append(sessions[0].fork())
        stream = sessions[0].decode(max_tokens=100)
        next(stream)
        assert sum(map(len, held)) == n_before + 4
    pool.close()
    assert sum(map(len, held)) == n_before
    with pytest.raises(SessionClosedError):
        list(stream)
    with pytest.raises(SessionClosedError):
        sessions[1].generate("", max_tokens=1)


def test_a_session_that_was_brought_elsewhere_stays_for_its_call(
    replicas: LocalReplicas, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaving(blocks: Any, *, at: str | None = None) -> list[str]:
        del blocks
        return sorted(replicas.replicas, key=lambda name: name == at)

    monkeypatch.setattr(replicas._routing, "choose", leaving)
    n_before = len(replicas.routed)
    with pool.open_session() as session:
        session.ensure_prefix(PROMPT)
        assert len(list(session.decode(max_tokens=4))) >= 4
    assert len(replicas.routed) - n_before < 20


def test_each_call_has_a_context_of_its_own(replicas: LocalReplicas, pool: Any) -> None:
    request: ContextVar[str | None] = ContextVar("request", default=None)
    seen = []
    send = replicas.remote

    def noting(route: Any, frame: bytes) -> Any:
        seen.append(request.get())
        return send(route, frame)

    replicas.remote = noting  # type: ignore[method-assign]
    request.set("of the front")
    try:
        with pool.open_session() as session:
            assert session.generate(PROMPT, max_tokens=2)
    finally:
        del replicas.remote
    assert seen
    assert not any(seen)


class _Waiting:
    """Answers nothing, as Serve does where it looks for a replica of what was deleted."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self.is_cancelled = False

    def result(self, timeout_s: float | None = None) -> Any:
        assert timeout_s is not None, "it would wait for ever"
        raise self._error

    def cancel(self) -> None:
        self.is_cancelled = True


def test_a_call_ends_that_waits_for_what_is_not_served_any_more(
    replicas: LocalReplicas, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, looks = [], []

    def forgotten(*request: Any) -> Any:
        error: Exception = TimeoutError()
        if not request and looks:
            deployment: Any = SimpleNamespace(name="model-tale", app_name="tale")
            error = DeploymentUnavailableError(deployment)
        (calls if request else looks).append(waiting := _Waiting(error))
        return waiting

    with pool.open_session() as session:
        session.ensure_prefix(PROMPT)
        monkeypatch.setattr(replicas, "remote", forgotten)
        with pytest.raises(SessionFatalError, match="not served any more"):
            session.generate("", max_tokens=1)
        monkeypatch.undo()
    assert calls[0].is_cancelled
    assert looks[0].is_cancelled  # it found no replica in time, which may come yet
