"""Sessions whose engine is killed under them: they go on, and who kills each time ends alone."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import infercore as ic
from infercore.isolated.board import OF_POOL
from infercore.isolated.child import Request
from isolated.pools import (
    FIELDS,
    SECONDS,
    TEXTS,
    kill,
    kill_cases,
    told,
    told_here,
    wait_until,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(os.name != "posix", reason="isolation needs POSIX")


FORCED = "(one|two) and the little baker of the town (is|was) [a-z]{5,80}"


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"seed": 5, "logprobs": 2},
        {"seed": 6, "mirostat": 2, "repeat_penalty": 1.2},
        {"seed": 7, "response_format": {"type": "regex", "pattern": "[a-z ,.]{0,80}"}},
        {"seed": 8, "speculative": ic.SpeculativeConfig()},
        {"seed": 9, "logprobs": 2, "response_format": {"type": "regex", "pattern": FORCED}},
    ],
    ids=str,
)
def test_a_stream_goes_on_with_equal_text(pool: Any, plain: Any, fields: dict[str, Any]) -> None:
    expected = told_here(plain, **fields)
    with pool.open_session() as session:
        session.ensure_prefix(TEXTS[0])
        found: list[int] = []
        for i, chunk in enumerate(session.decode(max_tokens=24, **fields)):
            found += chunk.tokens
            if i in (4, 7):
                kill(pool, "SIGSEGV")
        assert found == expected
        assert chunk.usage is not None
        assert chunk.usage.completion_tokens == len(expected)
        assert session.explain_context().generated_tokens == len(expected)


def test_a_hang_is_a_death(pool: Any, plain: Any) -> None:
    expected = told_here(plain, temperature=0)
    with pool.open_session() as session:
        session.ensure_prefix(TEXTS[0])
        stream = session.decode(max_tokens=24, temperature=0)
        found = list(next(stream).tokens)
        kill(pool, "SIGSTOP")
        found += [t for chunk in stream for t in chunk.tokens]
    assert found == expected


@pytest.mark.parametrize("then", ["decode", "snapshot", "read", "close"])
def test_a_cancelled_stream_whose_worker_died_keeps_what_was_shown(
    pool: Any, plain: Any, then: str
) -> None:
    expected = told_here(plain, temperature=0, ignore_eos=True)
    with pool.open_session() as session:
        session.ensure_prefix(TEXTS[0])
        stream = session.decode(max_tokens=24, temperature=0, ignore_eos=True)
        found = [token for _ in range(4) for token in next(stream).tokens]
        session.cancel()
        kill(pool)
        if then == "snapshot":
            session.snapshot()
        if then == "close":
            stream.close()
        if then == "read":
            found += [token for chunk in stream for token in chunk.tokens]
        assert session.explain_context().generated_tokens == len(found)
        rest = session.decode(max_tokens=24 - len(found), temperature=0, ignore_eos=True)
        assert found + [token for chunk in rest for token in chunk.tokens] == expected


def test_tokens_that_nobody_read_are_not_counted_after_a_death(pool: Any) -> None:
    with pool.open_session() as session:
        session.ensure_prefix(TEXTS[0])
        before = pool.stats().generated_tokens
        stream = session.decode(max_tokens=24, temperature=0, ignore_eos=True)
        found = [*next(stream).tokens]
        wait_until(lambda: pool.stats().generated_tokens > before + 1)  # it is ahead of its reader
        found += next(stream).tokens
        kill(pool)
        assert session.explain_context().generated_tokens == len(found) == 2
        stream.close()


def test_closing_a_stream_whose_worker_died(pool: Any, plain: Any) -> None:
    with pool.open_session() as session, plain.open_session() as other:
        for each in (session, other):
            each.ensure_prefix(TEXTS[0])
            stream = each.decode(max_tokens=24, seed=3)
            shown = [t for _ in range(5) for t in next(stream).tokens]
            if each is session:
                kill(pool)
            stream.close()
            assert each.explain_context().generated_tokens == len(shown)
        ours, theirs = (
            [t for c in each.decode(max_tokens=5, temperature=0) for t in c.tokens]
            for each in (session, other)
        )
        assert ours == theirs


def test_random_kills(pool: Any, model: Any, backend_name: str) -> None:
    first = 10 if backend_name == "llamacpp" else 20
    counts = [
        kill_cases.check(pool, model, seed, n_kills=3, **FIELDS) for seed in (first, first + 1)
    ]
    assert sum(count["kills"] for count in counts)


def test_no_memory_ends_a_worker_and_no_session(pool: Any, plain: Any) -> None:
    resource = pytest.importorskip("resource")
    if not hasattr(resource, "prlimit"):
        pytest.skip("limits of another process are Linux's")
    expected = told_here(plain, temperature=0)
    with pool.open_session() as session:
        told(session, n=2)
        pid = pool.process.pid
        limit = psutil.Process(pid).memory_info().vms
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
        try:
            assert told(session, temperature=0) == expected
        except ic.OutOfMemoryError:
            kill(pool)  # it was told of, and the worker lives with too little
        assert told(session, temperature=0) == expected
        kill(pool)  # the next one has no limit


def test_nobody_waits_for_a_call_that_is_not_made_again(pool: Any, session: Any) -> None:
    process = pool.process
    session.ensure_prefix(TEXTS[0])
    call = Request(0, "open_session")  # as one that was in work when its process died
    call.mark = OF_POOL | 10**6
    process._child.calls[10**6] = call
    process._child.board.begin_outside([call.mark])
    kill(pool)
    wait_until(lambda: process.pid is None)
    assert not process._first
    process._first = {10**6 + 1}  # who does not come back
    process._first_until = 0.0
    assert told(session, n=4)
    assert not process._first


def in_step(pool: Any) -> list[int] | None:
    child = pool.process._child
    return None if child is None or child.death is not None else child.board.in_call


def test_who_kills_each_time_ends_alone(pack_path: Path, backend_name: str) -> None:
    with ic.open_pool(
        pack_path, backend=backend_name, isolate=True, n_ctx=1024, max_restarts=5, **FIELDS
    ) as pool:
        done = threading.Event()

        def kill_for(target: int) -> None:
            while not done.is_set():
                found = in_step(pool)
                if found is not None and target in found:
                    kill(pool)
                    time.sleep(0.05)

        with pool.open_session() as bad, pool.open_session() as good:
            found: list[int] = []
            killer = threading.Thread(target=kill_for, args=(bad._target,), daemon=True)
            reader = threading.Thread(
                target=lambda: found.extend(told(good, n=60, temperature=0)), daemon=True
            )
            reader.start()
            killer.start()
            with pytest.raises(ic.SessionFatalError, match="process of the engine") as caught:
                bad.ensure_prefix("word " * 900)
            done.set()
            killer.join(SECONDS)
            reader.join(SECONDS)
            assert isinstance(caught.value.cause, ChildProcessError)
            assert bad.state == "FATAL"
            assert len(found) == 60
            with pytest.raises(ic.SessionFatalError):
                bad.ensure_prefix("Once")
            assert told(good, n=4)
        assert 2 <= pool.stats().n_restarts <= 5


def test_too_many_deaths_end_all(pack_path: Path, backend_name: str) -> None:
    with (
        ic.open_pool(
            pack_path, backend=backend_name, isolate=True, n_ctx=64, max_restarts=1, **FIELDS
        ) as pool,
        pool.open_session() as session,
        pool.open_session() as other,
    ):
        session.ensure_prefix("Once")
        kill(pool, "SIGSEGV")
        session.ensure_prefix("Once upon")
        kill(pool)
        wait_until(lambda: pool.process.pid is None)
        for each in (session, other):
            with pytest.raises(ic.SessionFatalError, match="SIGSEGV"):
                each.ensure_prefix("Once upon a time")
            assert each.state == "FATAL"
        with pytest.raises(ic.SessionFatalError):
            pool.open_session()
        assert pool.drain(), "nothing runs any more"


def test_a_timeout_is_of_the_whole_whatever_died_meanwhile(pool: Any) -> None:
    with pool.open_session() as session:
        session.ensure_prefix("Once")
        started = time.monotonic()
        stream = session.decode(max_tokens=150, ignore_eos=True, timeout=4.0)
        next(stream)
        time.sleep(2.0)
        kill(pool)
        reasons = []
        for chunk in stream:
            reasons.append(chunk.finish_reason)
            time.sleep(0.05)
        assert reasons[-1] == "timeout"
        assert time.monotonic() - started < 5.8  # begun anew at the death it would be 6


def test_a_call_that_is_made_again_has_the_time_that_is_left(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[float] = []
    send = pool.process.send

    def dies_first(epoch: int, target: int, name: str, args: Any = (), fields: Any = None) -> Any:
        if name == "open":
            times.append(args[2]["timeout"] if args[0] == "chat" else args[1][-1].timeout)
            if len(times) == 1:
                time.sleep(0.3)
                kill(pool)
        return send(epoch, target, name, args, fields)

    messages = [{"role": "user", "content": "Tell me of Mira."}]
    with pool.open_session() as session:
        for call in (partial(session.chat, messages), partial(session.completion, "Once")):
            times.clear()
            with monkeypatch.context() as patch:
                patch.setattr(pool.process, "send", dies_first)
                assert list(call(max_tokens=4, timeout=30.0))
            assert times[0] == 30.0
            assert times[1] <= 29.7
        times.clear()
        with monkeypatch.context() as patch:
            patch.setattr(pool.process, "send", dies_first)
            with pytest.raises(ic.CallTimeoutError) as caught:
                session.chat([{**messages[0], "content": "Tell " * 60}], timeout=0.2)
        assert caught.value.elapsed_ms > 300
