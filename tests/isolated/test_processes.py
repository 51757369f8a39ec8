"""The engine's process and the program's: how each starts, is interrupted and ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import infercore as ic
from isolated.pools import FIELDS, SECONDS, TEXTS, kill, told, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(os.name != "posix", reason="isolation needs POSIX")


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
