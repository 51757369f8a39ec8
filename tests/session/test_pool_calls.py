"""How calls of a pool begin and end: in one piece, refused, drained, interrupted."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import infercore as ic
from session.pool_waits import SECONDS, wait_for


def test_a_stream_that_has_not_begun_does_not_begin_in_a_drained_pool(reference: Any) -> None:
    with reference.new_pool(n_parallel=2, n_ctx=64) as pool:
        session = pool.open_session()
        session.ensure_prefix("Once upon a time")
        stream = session.decode(max_tokens=4)
        assert pool.drain() is True
        with pytest.raises(ic.SessionClosedError):
            next(stream)
        assert pool.stats().n_running == 0


BEGUN: dict[str, Any] = {
    "chat": lambda session: session.chat([{"role": "user", "content": "Hi"}], max_tokens=4),
    "completion": lambda session: session.completion("Once upon a time", max_tokens=4),
}


@pytest.mark.parametrize("kind", BEGUN)
def test_a_drain_waits_for_a_call_whose_answer_nobody_reads_yet(reference: Any, kind: str) -> None:
    with reference.new_pool(n_parallel=2, n_ctx=64) as pool, ThreadPoolExecutor(1) as threads:
        stream, dropped = (BEGUN[kind](pool.open_session()) for _ in range(2))
        drained = threads.submit(pool.drain)
        time.sleep(0.1)
        assert not drained.done()
        assert sum(len(chunk.tokens) for chunk in stream) == 4
        del dropped
        gc.collect()
        assert drained.result(SECONDS) is True


@pytest.mark.parametrize("kind", BEGUN)
def test_a_drain_that_is_late_cancels_what_nobody_reads(reference: Any, kind: str) -> None:
    with reference.new_pool(n_parallel=2, n_ctx=64) as pool:
        stream = BEGUN[kind](pool.open_session())
        assert pool.drain(timeout=0.05) is False
        assert list(stream)[-1].finish_reason == "cancelled"
        assert pool.drain() is True


def test_a_completion_is_a_prefix_and_a_decode_in_one_call(reference: Any) -> None:
    with reference.new_pool(n_parallel=2, n_ctx=64) as pool:
        one, other = pool.open_session(), pool.open_session()
        one.ensure_prefix("The miller had")
        expected = [chunk.tokens for chunk in one.decode(max_tokens=6, seed=3)]
        for _ in range(2):
            stream = other.completion("The miller had", max_tokens=6, seed=3)
            assert [chunk.tokens for chunk in stream] == expected
        assert other.explain_context().prefix_tokens == one.explain_context().prefix_tokens


@pytest.mark.parametrize("n", [0, 64, 65])
def test_a_completion_without_room_evaluates_nothing(reference: Any, n: int) -> None:
    with reference.new_pool(n_parallel=2, n_ctx=64) as pool:
        session = pool.open_session()
        with pytest.raises((ic.ContextOverflowError, ic.InvalidStateError)) as caught:
            session.completion([5] * n)
        stages = {0: None, 64: "decode", 65: "prefix"}
        assert getattr(caught.value, "stage", None) == stages[n]
        assert (session.state, pool.stats().n_steps) == ("EMPTY", 0)


@pytest.mark.parametrize("prompt", [[10**6], "a b c d e " * 40])
def test_a_refused_generate_leaves_an_empty_session_empty(reference: Any, prompt: Any) -> None:
    with reference.new_pool(n_parallel=2, n_ctx=64) as pool:
        session = pool.open_session()
        with pytest.raises(ic.InferCoreError):
            session.generate(prompt)
        assert session.state == "EMPTY"
        assert session.explain_context().resident_tokens == 0


def test_a_drain_waits_for_texts_that_are_being_embedded(
    reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    with ic.open_pool(reference, n_parallel=2, n_ctx=64) as pool, ThreadPoolExecutor(3) as threads:
        embed = pool._embedder._embed

        def slow(*args: Any) -> Any:
            begun.set()
            assert go_on.wait(SECONDS)
            return embed(*args)

        monkeypatch.setattr(pool._embedder, "_embed", slow)
        first = threads.submit(pool.embed, ["a"], pooling="mean")
        assert begun.wait(SECONDS)
        second = threads.submit(pool.embed, ["b"], pooling="mean")
        wait_for(lambda: pool._embedder.n_unfinished == 2)
        assert pool.drain(timeout=0.05) is False
        drained = threads.submit(pool.drain)
        assert not drained.done()
        go_on.set()
        assert first.result(SECONDS).shape == (1, reference.info.n_embd)
        with pytest.raises(ic.SessionClosedError):  # it had not begun when the time was over
            second.result(SECONDS)
        assert drained.result(SECONDS) is True


def test_an_interrupted_caller_leaves_the_others_their_texts(
    reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    with ic.open_pool(reference, n_parallel=2, n_ctx=64) as pool, ThreadPoolExecutor(3) as threads:
        embed, interrupted = pool._embedder._embed, [False]

        def faulty(texts: Any, pooling: Any) -> Any:
            if not begun.is_set():
                begun.set()
                assert go_on.wait(SECONDS)
            elif len(texts) > 1 and not interrupted[0]:
                interrupted[0] = True
                raise KeyboardInterrupt
            return embed(texts, pooling)

        monkeypatch.setattr(pool._embedder, "_embed", faulty)
        asked = [threads.submit(pool.embed, ["a"], pooling="mean")]
        assert begun.wait(SECONDS)
        asked += [threads.submit(pool.embed, [text], pooling="mean") for text in ("b", "c")]
        wait_for(lambda: pool._embedder.n_unfinished == 3)
        go_on.set()
        errors = [type(call.exception(SECONDS)) for call in asked]
        assert sorted(kind.__name__ for kind in errors) == ["KeyboardInterrupt", *["NoneType"] * 2]
