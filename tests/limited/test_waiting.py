"""Who waits for a process with limits, for how long, and what ends that."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from infercore.chat.template import render
from infercore.limited import caller, process, wire
from infercore.sampling import compile_constraint, grammar
from infercore.testing import load_toy_model

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="where the kernel keeps the limits")
USER = [{"role": "user", "content": "hello"}]
GROWING = "{% for i in range(40) %}{% set n.a = [n.a, n.a] %}{% endfor %}"
SLOW = "{% set n = namespace(a=1) %}" + GROWING + "{{ n.a }}"
WORK = "infercore.chat.worker:answer", SLOW, {}, (0.0, 0.0, "UTC")


def heavy(name: str) -> dict[str, Any]:
    """Return a schema that takes all of its time to compile."""
    patterns = [{"pattern": f".*{chr(97 + i % 26)}{name}.*"} for i in range(60)]
    return {"type": "string", "allOf": patterns}


@contextmanager
def working(limited: process.LimitedProcess, seconds: float) -> Iterator[None]:
    """Let a process have work for so many seconds."""
    with ThreadPoolExecutor(1) as threads:
        work = threads.submit(limited.run, *WORK, seconds=seconds)
        time.sleep(0.3)
        assert not work.done()
        yield
        assert work.result(60)[0] == wire.STOPPED


@pytest.fixture
def limited() -> Iterator[process.LimitedProcess]:
    own = process.LimitedProcess()
    own.run("infercore.chat.worker:answer", "", {}, (0.0, 0.0, "UTC"))
    yield own
    own.close()


def test_no_template_waits_behind_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_SECONDS", 1.5)
    tokenizer = load_toy_model().tokenizer
    texts = {"add_generation_prompt": True, "tools": None}
    render("a", USER, **texts)
    compile_constraint({"type": "regex", "pattern": "started"}, tokenizer)
    with ThreadPoolExecutor(1) as threads:
        tried = threads.submit(compile_constraint, heavy("behind"), tokenizer)
        time.sleep(0.2)
        assert render("b", USER, **texts) == "b"
        assert not tried.done()
        assert isinstance(tried.exception(60), ic.GrammarError)


def test_waiting_is_bounded(
    limited: process.LimitedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "MAX_WAIT_S", 0.2)
    with working(limited, 1.5), pytest.raises(ic.TransientEngineError) as caught:
        limited.run(*WORK)
    assert caught.value.retry_after


class GoneError(Exception):
    pass


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "works"])
def test_a_caller_ends_it(limited: process.LimitedProcess, waits: bool) -> None:
    until = time.monotonic() + 0.5

    def look() -> None:
        if time.monotonic() > until:
            raise GoneError

    def asked() -> None:
        with caller.looked_at(look), pytest.raises(GoneError):
            limited.run(*WORK)
        assert time.monotonic() < until + 0.7

    if waits:
        with working(limited, 1.7):
            asked()
    else:
        asked()


def test_closing_ends_what_runs(limited: process.LimitedProcess) -> None:
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(limited.run, *WORK, seconds=4)
        time.sleep(0.3)
        started = time.monotonic()
        limited.close()
        assert run.result(60)[0] == wire.STOPPED
        assert time.monotonic() - started < 2


@pytest.fixture(params=["own", "pool"])
def session(request: pytest.FixtureRequest) -> Iterator[Any]:
    model = load_toy_model()
    if request.param == "own":
        with model.new_session() as opened:
            yield opened
        return
    with model.new_pool(n_ctx=256) as pool, pool.open_session() as opened:
        yield opened


def test_a_timeout_ends_a_grammar(session: Any) -> None:
    started = time.monotonic()
    with pytest.raises(ic.CallTimeoutError):
        session.generate("a", response_format=heavy("late"), timeout=0.4)
    assert time.monotonic() - started < 2
    assert session.generate("a", max_tokens=1, timeout=30) is not None


def test_a_cancel_ends_a_grammar(session: Any) -> None:
    timer = threading.Timer(0.4, session.cancel)
    started = time.monotonic()
    timer.start()
    with pytest.raises(ic.DecodeAbortedError):
        session.generate("a", response_format=heavy("cancelled"))
    assert time.monotonic() - started < 2
    assert session.generate("a", max_tokens=1) is not None


def test_a_pool_that_closes_ends_a_grammar() -> None:
    with load_toy_model().new_pool(n_ctx=256) as pool:
        session = pool.open_session()
        timer = threading.Timer(0.4, pool.close)
        started = time.monotonic()
        timer.start()
        with pytest.raises(ic.SessionClosedError):
            session.generate("a", response_format=heavy("closed"))
        assert time.monotonic() - started < 2
        timer.join()
