"""Parts of an isolated engine, each alone: no answer is lost, no reader, and no place in a text."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from infercore.isolated import wire, worker
from infercore.isolated.line import Line as WorkersLine
from infercore.isolated.logs import Told, ToProgram
from infercore.isolated.process import EngineProcess
from infercore.isolated.replay import NotedSampler, Replay
from infercore.sampling.portable import PortableSampler
from infercore.session.jobs import Item
from infercore.session.outbox import Outbox
from infercore.values.config import SamplingConfig

pytestmark = pytest.mark.skipif(os.name != "posix", reason="isolation needs POSIX")

SECONDS = 30.0


# -- a sampler that replays ------------------------------------------------------------------------


class Row:
    """A context that has one row."""

    def __init__(self, row: Any) -> None:
        self._row = row

    def logits(self, _: int) -> Any:
        return self._row


def new_sampler() -> Any:
    config = SamplingConfig(seed=5, temperature=1.0)
    tokenizer: Any = object()
    return PortableSampler(config, tokenizer=tokenizer, n_vocab=50)


def test_the_mark_of_a_replay_is_the_one_before_until_all_is_replayed() -> None:
    rng = np.random.default_rng(0)
    rows = [Row(rng.normal(size=50).astype(np.float32)) for _ in range(6)]
    before = NotedSampler(new_sampler())
    for row in rows[:4]:
        before.sample(row)
    made, mark = list(before.tokens), before.mark
    after = NotedSampler(new_sampler(), Replay(5, made, mark[1], 4))
    for row in rows[:4]:
        assert after.mark == mark
        after.sample(row)
    assert after.mark == mark
    assert after.sample(rows[4]) == before.sample(rows[4])
    assert after.mark == before.mark


# -- a worker's answers ----------------------------------------------------------------------------


class Line:
    """A program that asks twice; ``fails`` is what sending an answer raises."""

    def __init__(self, fails: BaseException | None = None) -> None:
        self.board = SimpleNamespace(begin_outside=lambda _: None)
        self.requests: list[list[Any]] = [[1, 0, "ping", [], {}], [2, 0, "token_bytes", [0, 1], {}]]
        self.sent: list[int] = []
        self._fails = fails

    def read(self) -> Any:
        if not self.requests:
            raise EOFError
        return self.requests.pop(0)

    def send(self, answer: list[Any]) -> None:
        if answer[0] == 2 and self._fails is not None:
            raise self._fails
        self.sent.append(answer[0])


def test_a_worker_that_cannot_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda _: ended.set())
    with pytest.raises(EOFError):
        worker.Worker(Line(MemoryError())).run()
    assert ended.wait(SECONDS)


def test_a_worker_ends_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda _: ended.set())
    working = worker.Worker(Line())
    working._scheduler = SimpleNamespace(fatal=RuntimeError())
    with pytest.raises(EOFError):
        working.run()
    assert ended.wait(SECONDS)


def test_an_answer_that_cannot_cross_is_an_error() -> None:
    requests, answers = os.pipe(), os.pipe()
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    line = WorkersLine.__new__(WorkersLine)
    line._answers, line._lock, line._posted = answers[1], threading.Lock(), deque()
    line.send([7, True, deep, None])
    with os.fdopen(answers[0], "rb") as file:
        number, is_well, error, _ = wire.read(file.read)
    assert (number, is_well, type(error).__name__) == (7, False, "InvalidInputError")
    for descriptor in (*requests, answers[1]):
        os.close(descriptor)


def test_a_fork_waits_for_no_thread_of_its_parent() -> None:
    process: Any = EngineProcess.__new__(EngineProcess)
    process._lock, process._child, process._keeper = threading.RLock(), None, None
    holder = threading.Thread(target=process._lock.acquire)
    holder.start()
    holder.join()
    process.forget()
    assert process._lock.acquire(blocking=False)


# -- the outbox ------------------------------------------------------------------------------------


def reader(on_item: Any = None) -> Any:
    return SimpleNamespace(
        items=SimpleQueue(), on_item=on_item, take_cuts=lambda: None, n_given=0, cancelled=False
    )


def test_a_reader_that_cannot_be_woken_stops_no_other() -> None:
    def fails() -> None:
        raise MemoryError

    outbox, bad, good = Outbox(), reader(fails), reader()
    for _ in range(3):
        outbox.give(bad, Item())
        outbox.give(good, Item())
        outbox.send()
    outbox.close()
    assert good.items.qsize() == 3
    assert bad.cancelled
    assert not good.cancelled


def test_a_call_that_is_refused_while_the_last_ones_are_handed_over_is_told() -> None:
    goes_on, late = threading.Event(), reader()
    outbox, slow = Outbox(), reader(lambda: goes_on.wait(10))
    for job in (slow, reader()):
        outbox.give(job, Item())
    outbox.send()  # two: a thread hands them over, and is held up
    closing = threading.Thread(target=outbox.close)
    closing.start()
    while not outbox._ended:
        time.sleep(0.001)
    outbox.give(late, Item())
    outbox.send()
    goes_on.set()
    closing.join()
    assert late.items.qsize() == 1


# -- what a worker logs ----------------------------------------------------------------------------


def test_a_line_is_logged_by_one_process_of_a_pool(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    for epoch in (1, 1, 2):
        told.log(epoch, "infercore.some", logging.WARNING, "100 % full", False)
    assert [record.getMessage() for record in caplog.records] == ["100 % full"] * 2


def test_an_engines_logger_is_silent_here_as_there() -> None:
    Told().log(1, "infercore.silent-engine", logging.WARNING, "x", True)
    (handler,) = logging.getLogger("infercore.silent-engine").handlers
    assert isinstance(handler, logging.NullHandler)


def test_a_level_between_those_that_have_names_is_one(caplog: pytest.LogCaptureFixture) -> None:
    Told().log(1, "infercore.plugin", 35, "x", False)
    assert [record.levelno for record in caplog.records] == [35]


def sent_of(text: str, *args: Any, error: Any = None) -> list[Any]:
    """Return what a worker sends of what its plugin logs."""
    sent: list[Any] = []
    exc_info = None if error is None else (type(error), error, None)
    ToProgram(sent.append).handle(
        logging.LogRecord("infercore.plugin", logging.ERROR, "", 1, text, args, exc_info)
    )
    return sent


def test_an_exception_is_told_too() -> None:
    ((_, _, (*_, text, _), _),) = sent_of("%s failed", "it", error=ValueError("of the plugin"))
    assert text == "it failed\nValueError: of the plugin"


def test_what_logs_wrongly_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert not sent_of("%d tokens", "many")
    assert "Logging error" in capsys.readouterr().err  # as everywhere


@pytest.mark.parametrize(
    "record",
    [("root", 30, "x"), ("infercorex", 30, "x"), ([], 30, "x"), ("infercore", 10, "x"),
     ("infercore", [], "x"), ("infercore", True, "x"), ("infercore", 30, b"x")],
)  # fmt: skip
def test_what_is_no_record_of_ours_is_refused(record: Any) -> None:
    with pytest.raises(ValueError, match="no log record"):
        Told().log(1, *record, False)
