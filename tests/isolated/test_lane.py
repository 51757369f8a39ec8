"""The lane: a stream's chunks come straight to the thread that reads them, asked for on a page."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from infercore.isolated import wire
from infercore.isolated.board import SIZE, Board
from infercore.isolated.child import Child, DeathError
from infercore.isolated.held import Held, answer_of_shown
from infercore.isolated.lane import Lane
from infercore.isolated.session import IsolatedSession
from infercore.isolated.worker import Worker
from infercore.session.generation import Shown
from infercore.session.jobs import Latch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(os.name != "posix", reason="isolation needs POSIX")

TEXTS = ("Once upon a time", "The baker had a dog", "tick tock")
FIELDS = {"n_threads": 1, "n_threads_batch": 1, "n_ctx": 160, "n_parallel": 4, "step_timeout": 0.4}


@pytest.fixture(scope="module")
def pool(pack_path: Path, backend_name: str) -> Iterator[Any]:
    with ic.open_pool(pack_path, backend=backend_name, isolate=True, **FIELDS) as opened:
        yield opened


def stream_of(session: Any, text: str = TEXTS[0], n: int = 40, **fields: Any) -> Any:
    session.ensure_prefix(text)
    return session.decode(max_tokens=n, ignore_eos=True, temperature=0, **fields)


def read(session: Any, *args: Any, **fields: Any) -> list[int]:
    return [token for chunk in stream_of(session, *args, **fields) for token in chunk.tokens]


@pytest.fixture(scope="module")
def expected(pool: Any) -> list[int]:
    with pool.open_session() as session:
        return read(session)


def test_most_chunks_are_asked_for_on_the_page(
    pool: Any, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: list[bytes] = []
    post = Child._post
    monkeypatch.setattr(
        Child, "_post", lambda self, frame: (frames.append(frame), post(self, frame))
    )
    counts = []
    with pool.open_session() as session:
        for _ in range(6):  # on a busy machine the worker may be late with each of a stream
            stream = stream_of(session, n=40)
            next(stream)
            frames.clear()
            tokens = [token for chunk in stream for token in chunk.tokens]
            assert tokens == expected[-len(tokens) :]
            counts.append(len(frames))
            if counts[-1] < len(tokens) / 2:
                return
    pytest.fail(f"for {len(tokens)} chunks the worker's reader was woken {counts} times")


def test_a_request_that_nobody_saw_is_sent_again(
    pool: Any, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def unseen(_: Any, number: int, target: int) -> bool:
        calls.append(target)
        return len(calls) in (3, 5)  # as if the worker had looked just before

    monkeypatch.setattr(Child, "_ask_on_page", unseen)
    with pool.open_session() as session:
        assert read(session) == expected


@pytest.mark.parametrize("at", [1, 2, 7])
def test_an_interruption_that_loses_a_chunk_leaves_a_session_that_works(
    pool: Any, expected: list[int], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Ctrl-C comes when the chunk was read from the pipe and stands nowhere yet."""
    n_read, real = [0], Lane.read

    def losing(self: Lane) -> bytes:
        data = real(self)
        n_read[0] += data != wire.MARK
        if n_read[0] == at:
            n_read[0] += 1
            raise KeyboardInterrupt
        return data

    pid = pool.process.pid
    with pool.open_session() as session:
        stream = stream_of(session)
        monkeypatch.setattr(Lane, "read", losing)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        assert read(session) == expected
    assert pool.process.pid == pid
    assert not pool.process._child.calls


def test_streams_that_threads_read_at_the_same_time_share_no_chunk(pool: Any) -> None:
    alone: dict[str, list[int]] = {}
    for text in TEXTS:
        with pool.open_session() as session:
            alone[text] = read(session, text)
    found: dict[tuple[str, int], list[int]] = {}

    def work(text: str) -> None:
        with pool.open_session() as session:
            for i in range(3):
                found[text, i] = read(session, text)

    threads = [threading.Thread(target=work, args=(text,)) for text in TEXTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [key for key, tokens in found.items() if len(tokens) != len(alone[key[0]])] == []


def test_streams_that_one_thread_reads_in_turn_share_no_chunk(
    pool: Any, expected: list[int]
) -> None:
    with pool.open_session() as one, pool.open_session() as other:
        first, second = stream_of(one), stream_of(other)
        found: tuple[list[int], list[int]] = [], []
        for a, b in zip(first, second, strict=True):
            found[0].extend(a.tokens)
            found[1].extend(b.tokens)
        assert len(found[0]) == len(found[1]) == len(expected)


def test_a_request_to_a_process_that_died_is_written_to_no_other_file(
    pool: Any, tmp_path: Path
) -> None:
    for attempt in range(4):
        with pool.open_session() as session:  # in a process that lives, whatever was killed before
            read(session)
        child = pool.process._child
        os.kill(child.pid, signal.SIGKILL)
        until = time.monotonic() + 60
        while child._files:
            assert time.monotonic() < until
            time.sleep(0.01)
        with contextlib.ExitStack() as stack:
            paths = [tmp_path / f"{attempt}-{i}" for i in range(8)]
            files = [stack.enter_context(path.open("wb")) for path in paths]
            has_its_number = child._to in [file.fileno() for file in files]
            call = child.send(0, "stats", (), {})
            call.done.wait(60)
        assert isinstance(call.error, DeathError)
        assert [path.read_bytes() for path in paths] == [b""] * 8
        if has_its_number:
            return
    pytest.fail("the number of the file went to others each time")


def test_the_lane_is_for_one_and_is_closed_behind_the_last() -> None:
    lane, user, other = Lane(), Latch(), Latch()
    assert lane.enter(user)
    assert not lane.enter(other)
    lane.wake(other)
    lane.wake(user)
    assert lane.read() == wire.MARK
    lane.close()
    files = lane._file, lane.theirs
    assert all(os.fstat(file) for file in files)
    lane.leave(user)
    assert not lane.enter(other)
    for file in files:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(file)


def test_who_was_interrupted_before_leaving_keeps_nobody_out() -> None:
    lane, user = Lane(), Latch()
    assert lane.enter(user)
    del user
    assert lane.enter(Latch())
    lane.close()


@pytest.mark.parametrize("cut", [1, 7, 9, 20])
def test_a_frame_that_is_not_whole_is_an_error(cut: int) -> None:
    frame = wire.pack_chunk(3, "text", [1], [1], None)
    assert list(wire.bodies(wire.MARK + frame + frame)) == [frame[8:]] * 2
    with pytest.raises(wire.FrameError):
        list(wire.bodies(wire.MARK + frame[:cut]))


def test_threads_that_ask_out_of_turn_are_both_answered(
    pool: Any, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asks, asked, told, answered = (threading.Event() for _ in range(4))
    late: list[threading.Thread] = []
    expect = Child._expect

    def slow(child: Child, number: int, call: Any) -> None:
        is_late = call.name == "next" and not late
        if is_late:  # it has the lower number, and is noted behind the higher one
            late.append(threading.current_thread())
            asks.set()
            asked.wait(20)
        expect(child, number, call)
        if is_late:
            told.set()
            answered.wait(20)
        elif call.name == "next" and not asked.is_set():
            asked.set()
            told.wait(20)

    with pool.open_session() as a, pool.open_session() as b:
        streams, tokens = [stream_of(a), stream_of(b)], []
        n_before = pool.stats().n_restarts
        monkeypatch.setattr(Child, "_expect", slow)
        reader = threading.Thread(target=lambda: tokens.extend(streams[0]))
        reader.start()
        assert asks.wait(20)
        try:
            found = list(next(streams[1]).tokens)
        finally:
            answered.set()
        found += [token for chunk in streams[1] for token in chunk.tokens]
        reader.join()
        assert [t for chunk in tokens for t in chunk.tokens] == found == expected
    assert pool.stats().n_restarts == n_before


def test_what_one_session_asks_on_the_page_no_other_answers(tmp_path: Path) -> None:
    with (tmp_path / "page").open("wb+") as file:
        file.truncate(SIZE)
        worker = object.__new__(Worker)
        worker._board, worker._lane, worker._lane_lock = Board(file.fileno()), 7, threading.Lock()
        worker._fence = threading.Lock()
    held, source = (
        SimpleNamespace(answered=28, lock=threading.Lock()),
        SimpleNamespace(is_empty=False),
    )
    worker._board.armed = 6
    assert worker._board.ask(30, 6)  # who had the lane before
    assert worker._asked_for(held, source, 7) == 0
    assert not worker._board.ask(31, 7), "nobody looks: it is to be sent"
    worker._board.armed = 7
    assert worker._board.ask(31, 7)
    assert worker._asked_for(held, source, 7) == 31
    worker._board.close()


def test_what_another_thread_has_just_answered_is_not_answered_again(tmp_path: Path) -> None:
    with (tmp_path / "page").open("wb+") as file:
        file.truncate(SIZE)
        worker = object.__new__(Worker)
        worker._board, worker._lane, worker._lane_lock = Board(file.fileno()), 7, threading.Lock()

    class Lock:
        """Is free again, once another thread has answered."""

        def acquire(self, *, blocking: bool) -> bool:
            held.answered = 31
            return not blocking

        def release(self) -> None:
            pass

    held = SimpleNamespace(answered=30, lock=Lock())
    worker._board.armed = 7
    assert worker._board.ask(31, 7)
    assert worker._asked_for(held, SimpleNamespace(is_empty=False), 7) == 0
    worker._board.close()


def test_a_reader_is_looked_after_behind_text_that_is_held_back(tmp_path: Path) -> None:
    """As half a mark of a tool call: it is no chunk, and the one that follows is asked for anew."""
    sent: list[bytes] = []

    class Source:
        """Brings items as the decode does: whoever asked last is called."""

        is_empty = property(lambda self: not self.items)

        def __init__(self) -> None:
            self.items: list[Shown] = []
            self.came: Any = None

        def ask(self, came: Any) -> bool:
            self.came = came
            return True

        listen = ask

        def claim(self) -> Shown:
            return self.items.pop(0)

        given = claim

        def bring(self, text: str) -> None:
            self.items.append(Shown(text, (1,)))
            self.came()

    class Shouting(Held):
        """A stream of chat that shows no text but in capitals."""

        source = Source()

        def text(self, item: Shown) -> list[Any] | None:
            chunk = ic.StreamChunk(text=item.text, tokens=item.tokens)
            return [chunk, [], None] if item.text.isupper() else None

    with (tmp_path / "page").open("wb+") as file:
        file.truncate(SIZE)
        board = Board(file.fileno())
    worker = Worker(SimpleNamespace(board=board, send_in_lane=sent.append))  # type: ignore[arg-type]
    held = Shouting(SimpleNamespace(sample_through=lambda _: None))
    held.stream = object()
    held.lock.acquire()
    worker._next_of(held, 1, 7, in_lane=True)
    held.source.bring("A")
    assert len(sent) == 1
    for number, texts in ((2, ["B"]), (3, ["c", "C"]), (4, ["D"])):
        assert board.ask(number, 7), "nobody looks"
        for text in texts:
            held.source.bring(text)
        assert len(sent) == number, "an item lies there, and nobody takes it"
    board.close()


def test_text_that_has_no_small_frame_is_an_answer_of_the_other_pipe() -> None:
    """What comes in the lane is small frames alone."""
    owned: list[Shown] = []
    held = SimpleNamespace(stream=SimpleNamespace(own=owned.append), chosen=lambda: ([5], None))
    shown = Shown("\ud800", (5,))
    is_well, (chunk, chosen, _), value = answer_of_shown(held, 3, shown)
    assert (is_well, chunk.text, chosen, value, owned) == (True, "\ud800", [5], None, [shown])


def test_an_interruption_before_the_wait_leaves_the_lane(
    pool: Any, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise KeyboardInterrupt

    for where, name in ((Child, "_unless_dead"), (IsolatedSession, "_wait")):
        with pool.open_session() as session:
            stream = stream_of(session)
            next(stream)
            with monkeypatch.context() as patch:
                patch.setattr(where, name, broken)
                with pytest.raises(KeyboardInterrupt):
                    next(stream)
                assert not pool.process._child.lane._has_user
        with pool.open_session() as session:
            assert read(session) == expected
