"""Pools and sessions whose engine lives in a process of its own: what crosses, and what dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import infercore as ic
from infercore.isolated import worker
from infercore.isolated.board import OF_POOL
from infercore.isolated.child import Request

sys.path.append(str(Path(__file__).parent))

import kill_cases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.skipif(os.name != "posix", reason="isolation needs POSIX")

FIELDS = {"n_threads": 1, "n_threads_batch": 1}
SECONDS = 60.0
TEXTS = ("Once upon a time", "The baker had a dog", "A little girl", "tick tock tick tock")


@pytest.fixture(scope="module")
def pool(pack_path: Path, backend_name: str) -> Iterator[Any]:
    """Return an isolated pool; each test may kill its worker."""
    with ic.open_pool(
        pack_path,
        backend=backend_name,
        isolate=True,
        **kill_cases.POOL,
        **kill_cases.LIMITS,
        **FIELDS,
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(model: Any) -> Iterator[Any]:
    """Return the same pool in this process."""
    with model.new_pool(**kill_cases.POOL, **FIELDS) as opened:
        yield opened


@pytest.fixture
def session(pool: Any) -> Iterator[Any]:
    with pool.open_session() as opened:
        yield opened


def told(session: Any, text: str = TEXTS[0], n: int = 24, **fields: Any) -> list[int]:
    session.ensure_prefix(text)
    return [t for chunk in session.decode(max_tokens=n, **fields) for t in chunk.tokens]


def told_here(plain: Any, *args: Any, **fields: Any) -> list[int]:
    with plain.open_session() as session:
        return told(session, *args, **fields)


def kill(pool: Any, name: str = "SIGKILL") -> None:
    os.kill(pool.process.pid, getattr(signal, name))


def wait_until(holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


# -- the same as in this process ---------------------------------------------------------------


def test_answers_are_those_of_a_pool_in_this_process(pool: Any, plain: Any) -> None:
    assert pool.model is None
    assert pool.info == plain.info
    assert pool.capabilities == plain.capabilities
    tokens = pool.tokenizer.encode("The little dog")
    assert tokens == plain.tokenizer.encode("The little dog")
    assert pool.tokenizer.decode(tokens) == plain.tokenizer.decode(tokens)
    assert pool.tokenizer.digest == plain.tokenizer.digest
    for fields in (
        {"temperature": 0},
        {"seed": 7},
        {"seed": 8, "mirostat": 2},
        {"seed": 9, "stop": ["."]},
    ):
        with pool.open_session() as ours, plain.open_session() as theirs:
            assert told(ours, **fields) == told(theirs, **fields), fields
            assert ours.state == theirs.state
            assert attrs_of(ours.explain_context()) == attrs_of(theirs.explain_context())
            assert ours.generate(" and then", max_tokens=8, **fields) == theirs.generate(
                " and then", max_tokens=8, **fields
            )


def attrs_of(report: Any) -> dict[str, Any]:
    return {name: getattr(report, name) for name in ("resident_tokens", "manifest", "state")}


def test_errors_have_their_types_and_facts(session: Any) -> None:
    with pytest.raises(ic.InvalidStateError):
        next(session.decode())
    with pytest.raises(ic.ContextOverflowError) as caught:
        session.ensure_prefix("word " * 400)
    assert caught.value.stage == "prefix"
    assert caught.value.n_ctx == kill_cases.POOL["n_ctx"]
    session.ensure_prefix("Once")
    with pytest.raises(ic.GrammarError) as wrong:
        session.decode(response_format={"type": "regex", "pattern": "("})
    assert wrong.value.source
    stream = session.decode(max_tokens=4)
    with pytest.raises(ic.SessionBusyError):
        session.ensure_prefix("other")
    stream.close()
    assert session.state in ("PREFIXED", "READY", "DECODED")


def test_what_cannot_cross_is_refused_by_name(session: Any, pack_path: Path) -> None:
    session.ensure_prefix("Once upon a time")
    before = session.explain_context()
    for fields in ({"processors": [lambda ids, row: row]}, {"response_format": dict.get}):
        with pytest.raises(ic.UnsupportedFeatureError, match=next(iter(fields))):
            session.decode(**fields)
    with pytest.raises(ic.UnsupportedFeatureError, match="implementation='native'"):
        session.decode(implementation="native")
    with pytest.raises(ic.UnsupportedFeatureError, match="progress"):
        ic.open_pool(pack_path, isolate=True, progress=print)
    assert session.explain_context() == before
    assert told(session, temperature=0)


def test_a_model_that_is_here_cannot_be_isolated(model: Any) -> None:
    with pytest.raises(ic.InvalidInputError, match="open_pool"):
        model.new_pool(isolate=True)
    with pytest.raises(ic.InvalidInputError, match="open_session"):
        ic.open_session(model, isolate=True)


def test_forks_snapshots_and_files(pool: Any, session: Any, tmp_path: Path) -> None:
    first = told(session, temperature=0, n=8)
    with session.fork() as twin:
        kill(pool)
        assert [t for c in twin.decode(max_tokens=6, temperature=0) for t in c.tokens] == [
            t for c in session.decode(max_tokens=6, temperature=0) for t in c.tokens
        ]
    session.save(tmp_path / "saved")
    with pool.open_session() as other:
        other.load(tmp_path / "saved")
        assert other.explain_context().generated_tokens == len(first) + 6


def test_a_session_alone_ends_its_process(pack_path: Path, backend_name: str) -> None:
    session = ic.open_session(
        pack_path, backend=backend_name, isolate=True, n_ctx=128, overflow="truncate", **FIELDS
    )
    pid = session.context.process.pid
    assert told(session, temperature=0, n=4)
    session.close()
    assert session.closed
    assert session.state == "CLOSED"
    assert not psutil.pid_exists(pid)


def test_tasks_read_at_the_same_time(pool: Any, plain: Any) -> None:
    async def one(text: str) -> list[int]:
        async with await pool.aopen_session() as session:
            await session.ensure_prefix(text)
            stream = session.decode(max_tokens=12, temperature=0)
            return [t async for chunk in stream for t in chunk.tokens]

    async def all_of_them() -> list[list[int]]:
        return list(await asyncio.gather(*map(one, TEXTS)))

    found = asyncio.run(all_of_them())
    assert found == [told_here(plain, text, 12, temperature=0) for text in TEXTS]


# -- deaths ------------------------------------------------------------------------------------

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


def test_messages_that_are_changed_meanwhile_change_no_answer(pool: Any, plain: Any) -> None:
    messages = [{"role": "user", "content": "Tell me of Mira."}]
    fields = {"max_tokens": 16, "temperature": 0}
    with plain.open_session() as session:
        expected = [t for chunk in session.chat(messages, **fields) for t in chunk.tokens]
    with pool.open_session() as session:
        stream = session.chat(messages, **fields)
        found = list(next(stream).tokens)
        messages[0]["content"] = "Tell me of the wood."
        messages.append({"role": "assistant", "content": ""})
        kill(pool)
        assert found + [t for chunk in stream for t in chunk.tokens] == expected


def test_a_hang_is_a_death(pool: Any, plain: Any) -> None:
    expected = told_here(plain, temperature=0)
    with pool.open_session() as session:
        session.ensure_prefix(TEXTS[0])
        stream = session.decode(max_tokens=24, temperature=0)
        found = list(next(stream).tokens)
        kill(pool, "SIGSTOP")
        found += [t for chunk in stream for t in chunk.tokens]
    assert found == expected


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


def test_statistics_are_there_when_the_worker_has_just_died(
    pack_path: Path, backend_name: str
) -> None:
    with ic.open_pool(pack_path, backend=backend_name, isolate=True, n_ctx=256, **FIELDS) as pool:
        kill(pool)
        assert pool.stats().n_restarts == 0


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


def test_a_process_that_is_asked_whether_it_works_says_so_and_goes_on(
    pool: Any, session: Any
) -> None:
    assert told(session, n=4)
    child = pool.process._child
    asked = child.heard_at
    child.ask_whether_it_works()
    wait_until(lambda: child.heard_at > asked)
    assert told(session, n=4)
    assert pool.process._child is child, "a call may take longer than the seconds to a question"


def test_a_cancel_right_behind_its_call_is_heard(pool: Any, session: Any) -> None:
    process, target = pool.process, session._target
    asked = {"max_tokens": 120, "temperature": 0, "ignore_eos": True}
    session.ensure_prefix(TEXTS[0])
    whole = session.generate(" b", **asked)
    n_whole = 0
    for _ in range(8):
        session.ensure_prefix(TEXTS[0])
        call = process.send(process.epoch, target, "generate", [" b"], asked)
        process.send(process.epoch, target, "cancel")
        call.done.wait()
        n_whole += call.error is None and call.result == whole
    assert n_whole <= 1  # this thread may wait between its two lines; without the mark: 7 of 8


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("tempfile.TemporaryFile", FileNotFoundError("it is not to be had")),
        ("threading.Thread.start", RuntimeError("it is not to be had")),
    ],
)
def test_a_process_that_cannot_be_started_is_a_typed_error(
    pool: Any, session: Any, monkeypatch: pytest.MonkeyPatch, name: str, error: Exception
) -> None:
    def fails(*_: object) -> None:
        raise error

    kill(pool)
    wait_until(lambda: pool.process.pid is None)
    with monkeypatch.context() as patch:
        patch.setattr(name, fails)
        with pytest.raises(ic.ModelLoadError, match="not to be had"):
            session.ensure_prefix(TEXTS[0])
    assert told(session, n=4)


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


# -- processes ---------------------------------------------------------------------------------

CALLER = """
import signal, sys, infercore as ic
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
pool = ic.open_pool(sys.argv[1], backend=sys.argv[2], isolate=True, n_ctx=256, n_threads=1)
session = pool.open_session()
session.ensure_prefix("Once upon a time")
try:
    print(pool.process.pid, flush=True)
    while True:
        for chunk in session.decode(max_tokens=100, ignore_eos=True):
            pass
        session.ensure_prefix("Once upon a time")
except KeyboardInterrupt:
    print(pool.process.pid, len("".join(c.text for c in session.decode(max_tokens=5))), flush=True)
"""


@contextlib.contextmanager
def caller(pack_path: Path, backend_name: str) -> Iterator[tuple[Any, int]]:
    """Give a program from standard input that has an isolated pool, and its worker."""
    process = subprocess.Popen(
        [sys.executable, "-", str(pack_path), backend_name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(CALLER)
    process.stdin.close()
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("is_stopped", [False, True], ids=["at work", "stopped"])
def test_a_caller_that_is_killed_leaves_no_worker(
    pack_path: Path, backend_name: str, *, is_stopped: bool
) -> None:
    with caller(pack_path, backend_name) as (_, pid):
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    wait_until(lambda: is_gone(pid), 5.0)
    assert time.monotonic() - started < 2.0  # a second, on a machine that has others to serve


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it ends itself, once it works")
def test_a_caller_that_is_killed_leaves_nobody_who_starts_workers(
    pack_path: Path, backend_name: str
) -> None:
    process = subprocess.Popen([sys.executable, "-c", CALLER, str(pack_path), backend_name])
    found: list[psutil.Process] = []

    def has_begun() -> bool:
        found[:] = psutil.Process(process.pid).children()
        return any("isolated" in " ".join(each.cmdline()) for each in found)

    try:
        wait_until(has_begun)
        time.sleep(0.01)  # the caller's next lines; the keeper needs far longer until it works
        found[0].suspend()
    finally:
        process.kill()
        process.wait()
    try:
        wait_until(lambda: is_gone(found[0].pid), 5.0)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[0].kill()


def test_an_interruption_is_the_callers(pack_path: Path, backend_name: str) -> None:
    with caller(pack_path, backend_name) as (process, pid):
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().split()[0] == str(pid)
        assert process.wait(SECONDS) == 0
    wait_until(lambda: not psutil.pid_exists(pid), 5.0)


def test_nothing_is_left_of_a_pool(pack_path: Path, backend_name: str) -> None:
    me = psutil.Process()
    fields = {"backend": backend_name, "isolate": True, "n_ctx": 64, **FIELDS}
    with ic.open_pool(pack_path, **fields) as first, first.open_session() as session:
        told(session, n=2)
    n_files, n_threads = me.num_fds(), threading.active_count()
    pids = []
    for how in ("closed", "dropped", "killed"):
        pool = ic.open_pool(pack_path, **fields)
        pids.append(pool.process.pid)
        session = pool.open_session()
        told(session, n=2)
        if how == "killed":
            kill(pool)
        if how != "dropped":
            pool.close()
        del pool, session
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), 10.0)
    wait_until(lambda: me.num_fds() <= n_files, 10.0)
    wait_until(lambda: threading.active_count() <= n_threads, 10.0)


@pytest.fixture
def hears_interruptions() -> Iterator[None]:
    """Raise at SIGINT, which background jobs of a shell ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_interruptions")
def test_an_interruption_in_a_long_request_leaves_the_pipe_whole(pool: Any) -> None:
    with pool.open_session() as long, pool.open_session() as other:
        told(other, n=1)  # a worker is there
        pid, n_before = pool.process.pid, pool.stats().n_restarts
        os.kill(pid, signal.SIGSTOP)  # the pipe fills
        timers = [
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)),
            threading.Timer(0.6, os.kill, (pid, signal.SIGCONT)),
        ]
        for timer in timers:
            timer.start()
        with pytest.raises(KeyboardInterrupt):
            long.ensure_prefix("ab " * 50_000)
        for timer in timers:
            timer.join()
        assert told(other, n=5, temperature=0)
        assert pool.stats().n_restarts == n_before


# -- for tasks and servers ---------------------------------------------------------------------


def test_streams_of_tasks_wait_in_no_threads(pool: Any, plain: Any) -> None:
    expected = told_here(plain, TEXTS[0], 30, temperature=0)

    async def one(number: int) -> list[int]:
        async with await pool.aopen_session(namespace=str(number % 2)) as session:
            await session.ensure_prefix(TEXTS[0])
            found: list[int] = []
            async for chunk in session.decode(max_tokens=30, temperature=0):
                found += chunk.tokens
                if number == 3 and len(found) == 10:
                    kill(pool)
            return found

    async def all_of_them() -> tuple[list[list[int]], int]:
        before = threading.active_count()
        found = await asyncio.gather(*map(one, range(24)))
        return list(found), threading.active_count() - before

    found, n_threads = asyncio.run(all_of_them())
    assert found == [expected] * 24
    n_openers = min(32, (os.cpu_count() or 1) + 4)  # of asyncio.to_thread
    assert n_threads <= len(found) + n_openers + 3  # one for each call that waits


def test_a_task_that_is_cancelled_leaves_a_session_that_works(pool: Any) -> None:
    async def cancelled() -> None:
        async with await pool.aopen_session() as session:
            await session.ensure_prefix(TEXTS[0])

            async def read() -> None:
                async for _ in session.decode(max_tokens=10_000, ignore_eos=True, stop=["@@"]):
                    pass

            task = asyncio.ensure_future(read())
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await session.generate(" and", max_tokens=3)

    asyncio.run(cancelled())


def test_statistics_wait_for_nobody_and_outlive_a_worker(pool: Any) -> None:
    with pool.open_session() as session:
        told(session, n=5)
        before = pool.stats()
        kill(pool, "SIGSTOP")
        seconds = []
        for _ in range(3):  # the machine has others to serve
            started = time.monotonic()
            assert pool.stats().n_steps >= before.n_steps
            seconds.append(time.monotonic() - started)
        assert min(seconds) < 0.5
        kill(pool)
        told(session, n=5)
        now = pool.stats()
    assert now.generated_tokens > before.generated_tokens
    assert now.prompt_tokens > before.prompt_tokens
    assert now.n_restarts == before.n_restarts + 1


@pytest.mark.parametrize("isolate", [True, False])
def test_a_closed_pool_reports_what_it_did_and_nothing_open(
    pack_path: Path, backend_name: str, *, isolate: bool
) -> None:
    pool = ic.open_pool(pack_path, backend=backend_name, isolate=isolate, n_ctx=64, **FIELDS)
    with pool:
        n_told = len(told(pool.open_session(), n=5))
        assert pool.stats().n_open == 1
    stats = pool.stats()
    assert (stats.n_open, stats.n_running, stats.n_waiting, stats.n_cells_used) == (0, 0, 0, 0)
    assert stats.generated_tokens >= n_told > 0


def test_an_observer_hears_of_steps(pool: Any) -> None:
    heard: list[Any] = []

    class Observer:
        def on_step(self, step: Any) -> None:
            heard.append(step)
            raise SystemExit(3)  # which disturbs nobody

        def on_call_end(self, event: Any) -> None:
            if event.operation == "stream":
                ended.append(event.usage is None)

    ended: list[bool] = []
    ic.set_observer(Observer())
    try:
        with pool.open_session(namespace="observed") as session:
            assert len(told(session, n=6, ignore_eos=True)) == 6
            with session.decode(max_tokens=9, ignore_eos=True) as stream:
                next(stream)
    finally:
        ic.set_observer(None)
    assert ended == [False, True], "the second one was closed before its end"
    assert sum(step.n_running for step in heard) >= 5
    assert sum(step.n_prompt for step in heard) >= 4


def test_a_warning_of_the_engines_process_is_logged_here_once(
    pack_path: Path, backend_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    fields = {**FIELDS, "cache_dir": str(tmp_path / "file" / "cache")}
    with (
        caplog.at_level(logging.WARNING),
        ic.open_pool(pack_path, backend=backend_name, isolate=True, **fields) as opened,
        opened.open_session() as session,
    ):
        text = session.generate("Once", max_tokens=4, temperature=0)
        kill(opened)
        assert session.generate("Once", max_tokens=4, temperature=0) == text
    told = [(r.name, r.levelno) for r in caplog.records if "cache_dir" in r.getMessage()]
    assert told == [("infercore.session", logging.WARNING)]


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


def test_bytes_of_tokens_are_those_of_the_tokenizer(pool: Any, plain: Any) -> None:
    ours, theirs = pool.tokenizer, plain.tokenizer
    assert [ours.token_bytes(i) for i in range(ours.n_vocab)] == [
        theirs.token_bytes(i) for i in range(ours.n_vocab)
    ]
    with pytest.raises(ic.InvalidTokenError):
        ours.token_bytes(ours.n_vocab)


def test_who_calls_late_for_an_item_takes_none_from_the_next_request(plain: Any) -> None:
    """A delivery may be held up between an item and its call, while a reader has the item."""
    given: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    with plain.open_session() as session:
        session.ensure_prefix(TEXTS[0])
        held = worker._Held(session)
        held.open("decode", [], {"max_tokens": 40, "ignore_eos": True}, None)
        held.next()
        for number in range(20):
            assert held.ask(number, lambda n, item: given.put((n, item)))
            until = time.monotonic() + SECONDS
            while given.empty() and time.monotonic() < until:
                held.stream._job.on_item()
            n, item = given.get(timeout=SECONDS)
            assert (n, given.empty()) == (number, True)
            assert held.next(item)[0].tokens
        job = held.stream._job
        held.end()
        held.open("decode", [], {"max_tokens": 4}, None)
        assert not held.ask(20, lambda n, item: given.put((n, item))), "it has not begun"
        job.items.put("an end that is announced late, beside the next stream")
        job.on_item()
        assert given.empty()


def test_a_task_that_is_cancelled_while_the_engine_starts_anew_leaves_its_session_free(
    pool: Any,
) -> None:
    async def read(stream: Any) -> list[Any]:
        return [chunk async for chunk in stream]

    async def main() -> None:
        async with await pool.aopen_session() as session:
            await session.ensure_prefix(TEXTS[0])
            stream = session.decode(max_tokens=20, ignore_eos=True)
            await stream.__anext__()
            kill(pool)
            reading = asyncio.create_task(read(stream))
            await asyncio.sleep(0.05)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # where it has not ended before
                await reading
            await stream.aclose()
            assert await read(session.decode(max_tokens=2, ignore_eos=True))

    asyncio.run(main())
