"""A generation in its own thread: cancelled by Ctrl-C at any point, and never left running."""

from __future__ import annotations

import itertools
import os
import signal
import threading

import pytest

import infercore
from infercore.cli.generate import Generation

LONG = "Once upon a time there was a baker named Mira. " * 30


@pytest.fixture
def session(reference):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield from _opened(reference)
    signal.signal(signal.SIGINT, before)


def _opened(reference):
    with (
        infercore.load_model(reference.path, backend="reference") as model,
        model.new_session(n_ctx=512, n_batch=16) as opened,
    ):
        yield opened


def test_interrupt_reaches_a_prefill(session) -> None:
    handler = signal.getsignal(signal.SIGINT)

    def begin():
        os.kill(os.getpid(), signal.SIGINT)
        for number in itertools.count():  # it ends by being cancelled alone
            session.ensure_prefix(f"{number} {LONG}")
        yield

    with Generation(session, begin) as generation:
        assert list(generation) == []
    assert generation.interrupted
    assert signal.getsignal(signal.SIGINT) is handler
    assert session.ensure_prefix("Once").prefix_tokens > 0


def test_second_interrupt_is_not_held_back(session) -> None:
    free = threading.Event()

    def begin():
        os.kill(os.getpid(), signal.SIGINT)
        while not generation.interrupted:  # two at once would count as one
            free.wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        free.wait(60)
        yield

    generation = Generation(session, begin)

    def read():
        with generation:
            try:
                return list(generation)
            finally:
                free.set()

    with pytest.raises(KeyboardInterrupt):
        read()


def test_interrupt_that_is_ignored_stays_so(session) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def begin():
        os.kill(os.getpid(), signal.SIGINT)
        session.ensure_prefix("Once upon a time")
        yield from session.decode(max_tokens=2, temperature=0)

    with Generation(session, begin) as generation:
        reasons = [chunk.finish_reason for chunk in generation]
    assert (reasons[-1], generation.interrupted) == ("length", False)


def test_leaving_early_cancels(session) -> None:
    session.ensure_prefix("Once upon a time")

    def begin():
        yield from session.decode(ignore_eos=True, temperature=0)

    with Generation(session, begin) as generation:
        next(iter(generation))
    assert not generation.interrupted
    assert session.state == "DECODED"
    assert session.explain_context().generated_tokens < 400


def test_errors_come_out_where_it_is_read(session) -> None:
    def begin():
        session.ensure_prefix(LONG * 10)
        yield

    with Generation(session, begin) as generation, pytest.raises(infercore.ContextOverflowError):
        list(generation)


def test_pending_tokens_count_down_while_a_text_is_evaluated(session) -> None:
    reports = []

    def look() -> bool:
        reports.append(session.explain_context())
        return False

    session.context.set_abort_callback(look)
    n_tokens = session.ensure_prefix(LONG[:1000]).prefix_tokens
    session.context.set_abort_callback(None)
    pending = [report.pending_tokens for report in reports]
    held = [report.resident_tokens + report.warm_tail_tokens for report in reports]
    assert pending[0] == n_tokens > 100
    assert pending == sorted(pending, reverse=True)
    assert len(set(pending)) == -(-n_tokens // 16)
    assert {a + b for a, b in zip(pending, held, strict=True)} == {n_tokens}
    assert session.explain_context().pending_tokens == 0
