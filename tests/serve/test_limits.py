"""Limits and queues: too long, too many, too late."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from serve.asking import ASK, CHAT, LONG
from served import eventually, serving

httpx = pytest.importorskip("httpx", reason="the client that the tests use is not installed")
openai = pytest.importorskip("openai", reason="the client that the tests use is not installed")

if TYPE_CHECKING:
    from pathlib import Path


def test_limits(pool: Any) -> None:
    with serving({"tale": pool}, max_body_bytes=2_000, max_tokens=3) as served:
        large = {**ASK, "messages": [{"role": "user", "content": "x" * 3_000}]}
        assert httpx.post(f"{served.url}{CHAT}", json=large).status_code == 413
        pieces = (b"x" * 500 for _ in range(10))  # a body without a length
        assert httpx.post(f"{served.url}{CHAT}", content=pieces).status_code == 413
        usage = served.client().chat.completions.create(**ASK).usage
        assert usage.completion_tokens == 3


def slowly(logits: Any) -> Any:
    time.sleep(0.05)
    return logits


class Slow:
    """A processor that keeps its session's place for a while."""

    apply = staticmethod(slowly)


def test_too_many_are_told_when_to_come_back(model: Any) -> None:
    with (
        model.new_pool(n_ctx=256, n_parallel=1, max_waiting=0, n_threads=1) as pool,
        serving({"tale": pool}) as served,
        pool.open_session() as session,
    ):
        session.ensure_prefix("Once upon a time")
        with session.decode(max_tokens=100, ignore_eos=True, processors=[Slow()]) as stream:
            next(stream)
            reader = threading.Thread(target=list, args=(stream,))
            reader.start()
            answer = httpx.post(f"{served.url}{CHAT}", json=ASK)
            session.cancel()
            reader.join()
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        told = answer.json()["error"]["message"]
        assert "ask again" in told
        assert "open" not in told, "a client opens no pool"
        assert httpx.post(f"{served.url}{CHAT}", json=ASK).status_code == 200


def test_more_answers_than_there_is_ever_room_for(model: Any) -> None:
    with (
        model.new_pool(n_ctx=256, n_parallel=2, max_waiting=1, n_threads=1) as pool,
        serving({"tale": pool}) as served,
    ):
        text = {"model": "tale", "max_tokens": 2}
        for path, body, status, param in (
            (CHAT, {**ASK, "n": 3}, 200, None),
            (CHAT, {**ASK, "n": 4}, 400, "n"),
            (CHAT, {**ASK, "n": 4, "stream": True}, 400, "n"),
            ("/v1/completions", {**text, "prompt": ["a"] * 4}, 400, "prompt"),
            ("/v1/completions", {**text, "prompt": ["a"] * 2, "n": 2}, 400, "n"),
        ):
            answer = httpx.post(f"{served.url}{path}", json=body)
            assert answer.status_code == status, answer.text
            if status == 400:
                told = answer.json()["error"]
                assert (told["code"], told["param"]) == ("too_many_answers", param)
                assert "4 answers are more than the 3" in told["message"]


def test_the_public_client_comes_back_when_it_is_told_to(model: Any) -> None:
    with (
        model.new_pool(n_ctx=256, n_parallel=1, max_waiting=0, n_threads=1) as pool,
        serving({"tale": pool}) as served,
        pool.open_session() as session,
    ):
        session.ensure_prefix("Once upon a time")
        with session.decode(ignore_eos=True, processors=[Slow()]) as stream:
            next(stream)
            reader = threading.Thread(target=list, args=(stream,))
            reader.start()
            with pytest.raises(openai.RateLimitError):
                served.client(max_retries=0).chat.completions.create(**ASK)
            threading.Timer(0.3, session.cancel).start()
            assert served.client(max_retries=5).chat.completions.create(**ASK).choices
            reader.join()


def ask_as(url: str, key: str, number: int) -> int:
    text = f"{number} " + "Mira bakes bread. " * 40
    body = {**ASK, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{url}{CHAT}", json=body, headers=headers, timeout=60)
    assert answer.status_code != 429 or int(answer.headers["retry-after"]) >= 1
    return answer.status_code


def test_a_backlog_of_one_key_shuts_out_no_other(pack_path: Path) -> None:
    with (
        ic.open_pool(pack_path, isolate=True, n_ctx=512, n_parallel=1, n_threads=1) as pool,
        serving({"tale": pool}, api_keys=["a", "b"], n_warm=0) as served,
        ThreadPoolExecutor(24) as threads,
    ):
        of_a = [threads.submit(ask_as, served.url, "a", number) for number in range(24)]
        # The first may be answered before the last is asked.
        eventually(lambda: sum(served.app._guard._n_active.values()) >= 16)
        assert ask_as(served.url, "b", 0) == 200
        n_left = sum(not each.done() for each in of_a)
        assert {each.result() for each in of_a} == {200}
    assert n_left > 8, "the other key does not wait for the end of the backlog"


def test_a_full_queue_refuses_and_keeps_room_for_another_key(pack_path: Path) -> None:
    fields = {"n_ctx": 512, "n_parallel": 1, "max_waiting": 2, "n_threads": 1}
    with (
        ic.open_pool(pack_path, isolate=True, **fields) as pool,
        serving({"tale": pool}, api_keys=["a", "b"], n_warm=0) as served,
        ThreadPoolExecutor(12) as threads,
    ):
        of_a = [threads.submit(ask_as, served.url, "a", number) for number in range(12)]
        eventually(lambda: any(each.done() and each.result() == 429 for each in of_a))
        assert ask_as(served.url, "b", 0) == 200
        assert {each.result() for each in of_a} == {200, 429}


def test_a_request_of_one_key_too_many(pool: Any) -> None:
    many = {**LONG, "n": 32, "stream": True}
    with (
        serving({"tale": pool}, max_requests_per_key=32) as served,
        httpx.Client(base_url=served.url) as other,
        httpx.stream("POST", f"{served.url}{CHAT}", json=many) as first,
    ):
        next(first.iter_lines())
        assert other.post(CHAT, json=ASK).status_code == 429, "each of the 32 answers counts"
        first.close()
        eventually(lambda: other.post(CHAT, json=ASK).status_code == 200)


def test_time_is_over_before_the_first_token(pool: Any) -> None:
    with serving({"tale": pool}, request_timeout=0.001) as served:
        answer = httpx.post(f"{served.url}{CHAT}", json=LONG)
    if answer.status_code != 408:  # a first token came in time: it ends soon after
        assert answer.json()["usage"]["completion_tokens"] < LONG["max_tokens"]
