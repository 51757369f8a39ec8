"""Load and faults: keys, limits, clients that leave, engines that are busy, the end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import infercore as ic
from infercore.serve import create_app, errors, running
from infercore.serve.answering import answers
from served import eventually, serving

httpx = pytest.importorskip("httpx", reason="the client that the tests use is not installed")
openai = pytest.importorskip("openai", reason="the client that the tests use is not installed")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from served import Served

CHAT = "/v1/chat/completions"
ASK = {
    "model": "tale",
    "messages": [{"role": "user", "content": "Tell me of Mira."}],
    "temperature": 0,
    "max_tokens": 8,
}
LONG = {**ASK, "max_tokens": 400, "ignore_eos": True}


def metrics(served: Served, headers: dict[str, str] | None = None) -> dict[str, float]:
    text = httpx.get(f"{served.url}/metrics", headers=headers).text
    rows = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in rows}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_work(served: Served, pool: Any, *, stream: bool) -> None:
    before = pool.stats().generated_tokens
    with httpx.Client(base_url=served.url) as http:
        if stream:
            with http.stream("POST", CHAT, json={**LONG, "stream": True}) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post(CHAT, json=LONG, timeout=0.15)
    eventually(lambda: pool.stats().n_running == 0)
    assert pool.stats().generated_tokens - before < 390
    assert served.client().chat.completions.create(**ASK).choices


def test_while_it_waits_a_stream_says_so(pool: Any) -> None:
    with (
        serving({"tale": pool}, keep_alive=0.001) as served,
        httpx.stream("POST", f"{served.url}{CHAT}", json={**LONG, "stream": True}) as answer,
    ):
        assert any(line == ": still at work" for line in answer.iter_lines())


def test_a_comment_that_was_sent_when_the_next_was_due_ends_nothing() -> None:
    import asyncio

    from infercore.serve.responding import COMMENT, _Client

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(_: Any) -> None:
        pass

    async def stream() -> bool:
        client = _Client(receive, send, 100.0, 100.0)
        sent = asyncio.ensure_future(client.take(COMMENT))
        await sent
        client._comment = asyncio.ensure_future(client.take(COMMENT))
        client._leave(sent)
        has_left = client.has_left
        await client._comment
        await client.close()
        return has_left

    assert not asyncio.run(stream())


def test_a_client_that_takes_nothing_is_left(pool: Any, caplog: pytest.LogCaptureFixture) -> None:
    body = {**LONG, "n": 8, "stream": True, "logprobs": True, "top_logprobs": 20}
    text = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n\r\n"
    with serving({"tale": pool}, reader_timeout=0.5) as served, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(served.url.rsplit(":", 1)[1])))
        client.sendall(head.encode() + text)
        eventually(lambda: pool.stats().n_running > 0)
        eventually(lambda: "its client takes nothing" in caplog.text)
        assert pool.stats().n_running == 0
        assert served.client().chat.completions.create(**ASK).choices


def test_a_head_that_does_not_come(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "HEAD_S", 0.3)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving({"tale": pool}) as served:
        address = ("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
        for sent in (b"", b"GET /health HT", whole + b"GET /hea"):
            with socket.create_connection(address, timeout=20) as client:
                client.sendall(sent)
                answer = b"".join(iter(lambda: client.recv(4096), b""))
                assert answer.count(b"200 OK") == (sent[:20] == whole[:20])


def test_keys(pool: Any) -> None:
    with serving({"tale": pool}, api_keys=["first", "second"]) as served:
        for headers in ({}, {"Authorization": "Bearer third"}, {"Authorization": "first"}):
            answer = httpx.post(f"{served.url}{CHAT}", json=ASK, headers=headers)
            assert answer.status_code == 401
        assert httpx.get(f"{served.url}/metrics").status_code == 401
        assert httpx.get(f"{served.url}/health").status_code == 200
        cached = []
        for key in ("first", "first", "second", "second"):
            usage = served.client(api_key=key).chat.completions.create(**ASK).usage
            cached.append(usage.prompt_tokens_details.cached_tokens > 0)
        assert cached == [False, True, False, True], "keys share no prefixes"


def test_the_document_says_of_each_route_whether_it_asks_for_a_key(pool: Any) -> None:
    with serving({"tale": pool}, api_keys=["first"]) as served:
        key = {"Authorization": "Bearer first"}
        document = httpx.get(f"{served.url}/openapi.json", headers=key).json()
        asked = {
            (method, path): ("security" in told, "401" in told["responses"])
            for path, methods in document["paths"].items()
            for method, told in methods.items()
        }
        for (method, path), told in asked.items():
            url = f"{served.url}{path}".replace("{name}", "tale")
            is_refused = httpx.request(method, url).status_code == 401
            assert told == (is_refused, is_refused), path
            if method == "get":
                assert httpx.get(url, headers=key).status_code == 200
    posts = {f"/v1/{name}" for name in ("chat/completions", "completions", "embeddings", "rerank")}
    posts |= {"/v1/responses", "/tokenize", "/detokenize"}
    gets = {"/v1/models", "/v1/models/{name}", "/health", "/metrics", "/openapi.json", "/"}
    assert set(asked) == {("post", path) for path in posts} | {("get", path) for path in gets}


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


def slow_to_load(path: Path, seconds: float) -> Any:
    def opens() -> Any:
        time.sleep(seconds)
        return ic.open_pool(path, n_ctx=256, n_threads=1)

    return opens


def test_loading_takes_its_part_of_a_requests_time(pack_path: Path) -> None:
    import asyncio

    from infercore.serve.app import App
    from infercore.serve.config import ServeConfig
    from infercore.serve.models import Models

    models = Models({"tale": slow_to_load(pack_path, 0.5)}, n_warm=0)
    app = App(models, ServeConfig(request_timeout=0.1))
    asks = [(CHAT, ASK), ("/v1/embeddings", {"model": "tale", "input": "a"})]
    asks += [("/tokenize", {"model": "tale", "prompt": "a"})]

    async def story() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            answers = await asyncio.gather(*(http.post(path, json=body) for path, body in asks))
            assert [answer.status_code for answer in answers] == [408, 408, 408]
            for answer in answers:
                assert answer.json()["error"]["code"] == "timeout"
        await models.get("tale").close()

    asyncio.run(story())


def test_a_model_makes_room_where_memory_is_short(pack_path: Path) -> None:
    import asyncio

    from infercore.serve.app import App
    from infercore.serve.config import ServeConfig
    from infercore.serve.models import Models

    def opens_alone(other: str) -> Any:
        def opens() -> Any:
            if models.get(other).pool is not None:
                raise ic.OutOfMemoryError("no room")
            return ic.open_pool(pack_path, n_ctx=256, n_threads=1)

        return opens

    models = Models({"one": opens_alone("two"), "two": opens_alone("one")}, n_warm=4)

    async def story() -> None:
        transport = httpx.ASGITransport(App(models, ServeConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            for name, other in (("one", "two"), ("two", "one")):
                answer = await http.post(CHAT, json={**ASK, "model": name}, timeout=60)
                assert answer.status_code == 200
                assert models.get(other).pool is None
            async with models.get("two").used():
                answer = await http.post(CHAT, json={**ASK, "model": "one"}, timeout=60)
                assert answer.status_code == 503, "what is in use stays"
        for name in ("one", "two"):
            await models.get(name).close()

    asyncio.run(story())


def break_for_good(pool: Any) -> None:
    error = ic.SessionFatalError("the engine has died", cause=RuntimeError("gone"))
    pool.owner.ask(lambda: pool.owner.scheduler.endings.fail(error))


def test_a_pool_that_failed_for_good_is_opened_anew(pack_path: Path) -> None:
    import asyncio

    from infercore.serve.app import App
    from infercore.serve.config import ServeConfig
    from infercore.serve.models import Models

    models = Models({"tale": slow_to_load(pack_path, 0)}, n_warm=4)

    async def story() -> None:
        transport = httpx.ASGITransport(App(models, ServeConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            first = await http.post(CHAT, json=ASK, timeout=60)
            broken = models.get("tale").pool
            await asyncio.to_thread(break_for_good, broken)
            assert (await http.get("/health")).status_code == 200, "the next request opens it"
            again = await http.post(CHAT, json=ASK, timeout=60)
            assert models.get("tale").pool is not broken
            texts = [a.json()["choices"][0]["message"]["content"] for a in (first, again)]
            assert texts[0] == texts[1]
        await models.get("tale").close()

    asyncio.run(story())


def test_a_pool_of_the_callers_that_failed_is_told_by_health(model: Any) -> None:
    with model.new_pool(n_ctx=256, n_threads=1) as pool, serving({"tale": pool}) as served:
        assert httpx.get(f"{served.url}/health").status_code == 200
        break_for_good(pool)
        health = httpx.get(f"{served.url}/health")
        assert (health.status_code, health.json()["models"]) == (503, ["tale"])
        assert httpx.post(f"{served.url}{CHAT}", json=ASK).status_code == 503


@pytest.mark.parametrize(
    "error",
    [
        ic.SessionFatalError(
            "this context can no longer be trusted: lost; close it and open a new one",
            cause=RuntimeError("lost"),
        ),
        ic.SessionFatalError(
            "this pool's engine died too often: lost; open a new pool", cause=RuntimeError("lost")
        ),
        ic.SessionClosedError("this pool is closed; open a new one"),
        ic.PoolFullError(n_waiting=3),
        ic.CallTimeoutError(elapsed_ms=20, resident_tokens=7),
    ],
)
def test_an_error_advises_what_a_client_can_do(error: Exception) -> None:
    told = errors.api_error(error).message
    assert "ask again" in told
    assert not {"open", "close", "call again"} & set(re.findall(r"call again|\w+", told)), told


def test_a_stream_of_responses_that_fails_says_so(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*arguments: Any) -> Any:
        async for item in answers(*arguments):
            yield item
            raise ic.SessionFatalError("the engine has died", cause=RuntimeError("gone"))

    monkeypatch.setattr("infercore.serve.responses.answers", failing)
    ask = {"model": "tale", "input": "Tell me of Mira.", "stream": True}
    with served.client().responses.create(**ask) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "SessionFatalError"


def test_names_that_somebody_points_here(pool: Any) -> None:
    with serving({"tale": pool}, allowed_hosts=["Proxy.example"]) as served:
        port = served.url.rsplit(":", 1)[1]
        for host, status in (
            (f"localhost:{port}", 200),
            ("[::1]", 200),
            ("proxy.example", 200),
            (f"evil.example:{port}", 403),
            ("127.0.0.1.evil.example", 403),
            ("", 403),
        ):
            answer = httpx.get(f"{served.url}/v1/models", headers={"Host": host})
            assert answer.status_code == status, host
    with serving({"tale": pool}, api_keys=["k"]) as served:
        headers = {"Host": "evil.example", "Authorization": "Bearer k"}
        assert httpx.get(f"{served.url}/v1/models", headers=headers).status_code == 200


def said(served: Served, request: bytes, *, half_closes: bool = False) -> bytes:
    """Return all that the server says to ``request`` until it closes the connection."""
    address = ("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(request)
        if half_closes:
            connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_an_old_client_that_names_no_host(served: Served) -> None:
    assert said(served, b"GET /v1/models HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    refused = said(served, b"GET /v1/models HTTP/1.0\r\nHost: evil.example\r\n\r\n")
    assert refused.startswith(b"HTTP/1.1 403 ")


def test_a_client_that_says_it_sends_no_more_is_gone(served: Served, pool: Any) -> None:
    """The end of its half looks like that of a client that left, whose work has to end."""
    body = json.dumps(LONG).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    before = pool.stats().generated_tokens
    assert said(served, head.encode() + body, half_closes=True) == b""
    eventually(lambda: pool.stats().n_running == 0)
    assert pool.stats().generated_tokens - before < 390


def check_what_a_client_leaves_is_counted(served: Served) -> None:
    n_prompt = served.client().chat.completions.create(**ASK).usage.prompt_tokens
    before = metrics(served)

    def grown(kind: str) -> float:
        name = f'infercore_{kind}_tokens_total{{model="tale"}}'
        return metrics(served)[name] - before[name]

    with httpx.stream("POST", served.url + CHAT, json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()
        for _ in range(20):
            next(lines)
    eventually(lambda: grown("generated") >= 5)
    assert [grown("prompt"), grown("cached")] == [n_prompt, n_prompt - 1]


def test_metrics_count_a_request_whose_client_left(served: Served, model: Any) -> None:
    check_what_a_client_leaves_is_counted(served)
    with model.new_pool(n_ctx=512, n_threads=1) as pool, serving({"tale": pool}) as here:
        check_what_a_client_leaves_is_counted(here)


def test_metrics_count(served: Served) -> None:
    before = metrics(served)
    usage = served.client().chat.completions.create(**ASK).usage
    after = metrics(served)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown('infercore_prompt_tokens_total{model="tale"}') == usage.prompt_tokens
    assert grown('infercore_generated_tokens_total{model="tale"}') == usage.completion_tokens
    assert grown('infercore_requests_total{status="200"}') >= 1
    assert grown('infercore_time_to_first_token_seconds_count{model="tale"}') == 1
    for gauge in ("sessions_running", "sessions_waiting", "cells_used"):
        assert f'infercore_{gauge}{{model="tale"}}' in after
    names = {name.partition("{")[0] for name in after}
    assert "infercore_cached_tokens_total" in names
    for histogram in ("time_between_tokens_seconds", "queue_seconds", "batch_size"):
        assert f"infercore_{histogram}_count" in names
    assert all(name.startswith("infercore_") for name in names)


def test_metrics_count_the_prompt_of_each_answer_and_of_vectors(served: Served) -> None:
    name = 'infercore_prompt_tokens_total{model="tale"}'

    def grown(ask: Callable[[], Any]) -> tuple[float, int]:
        before = metrics(served).get(name, 0.0)
        usage = ask().usage
        return metrics(served)[name] - before, usage.prompt_tokens

    client = served.client()
    n_counted, n_prompt = grown(lambda: client.chat.completions.create(**ASK, n=3))
    assert n_counted == 3 * n_prompt
    text = httpx.get(f"{served.url}/metrics").text
    assert "# HELP infercore_prompt_tokens_total Tokens of prompts, once for each answer" in text
    n_counted, n_prompt = grown(lambda: client.embeddings.create(model="tale", input=["a", "b c"]))
    assert n_counted == n_prompt > 0


def test_pages_of_other_origins(pool: Any) -> None:
    with serving({"tale": pool}, cors_origins=["http://mine"]) as served:
        for origin, allowed in (("http://mine", "http://mine"), ("http://other", None)):
            answer = httpx.get(f"{served.url}/v1/models", headers={"Origin": origin})
            assert answer.headers.get("access-control-allow-origin") == allowed
            exposed = answer.headers.get("access-control-expose-headers")
            assert exposed == (allowed and "Retry-After")
        headers = {
            "Origin": "http://mine",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "x-stainless-lang,content-type",
        }
        answer = httpx.options(f"{served.url}{CHAT}", headers=headers)
        assert answer.status_code == 204
        asked = headers["Access-Control-Request-Headers"]
        assert answer.headers["access-control-allow-headers"] == asked


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "infercore", "serve", *arguments]


def test_the_command_serves_until_it_is_told_to_end_and_starts_warm(
    pack_path: Path, backend_name: str, tmp_path: Path
) -> None:
    asked = command(
        f"tale={pack_path}", "--port", "0", "--n-ctx", "512", "--backend", backend_name, "-np", "2",
        "--n-threads", "1", "--cache-dir", str(tmp_path / "cache"),
    )  # fmt: skip
    body = {**LONG, "stream": True, "stream_options": {"include_usage": True}}
    evaluated = []
    for _ in range(2):
        with subprocess.Popen(asked, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            url = next(line.split()[-1] for line in process.stderr if "serving at" in line)
            with httpx.stream("POST", f"{url}{CHAT}", json=body, timeout=600) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                *_, usage, _, done, _ = lines
            assert done == "data: [DONE]", "what has begun ends"
            process.stderr.read()
            assert process.wait(60) == 0
        counted = json.loads(usage.removeprefix("data: "))["usage"]
        n_cached = counted["prompt_tokens_details"]["cached_tokens"]
        evaluated.append(counted["prompt_tokens"] - n_cached)
    assert evaluated[0] > evaluated[1] == 1, "all but the last token comes back from the folder"


def refuses(url: str) -> bool:
    try:
        httpx.get(url)
    except httpx.TransportError:
        return True
    return False


def test_a_second_signal_ends_it_at_once_without_a_trace(
    pack_path: Path, backend_name: str
) -> None:
    asked = command(
        f"tale={pack_path}", "--port", "0", "--n-ctx", "1024", "--backend", backend_name,
        "--n-threads", "1",
    )  # fmt: skip
    body = {**LONG, "max_tokens": 900}
    with (
        subprocess.Popen(asked, stderr=subprocess.PIPE, text=True) as process,
        ThreadPoolExecutor(1) as threads,
    ):
        assert process.stderr is not None
        url = next(line.split()[-1] for line in process.stderr if "serving at" in line)
        try:
            with httpx.stream("POST", f"{url}{CHAT}", json={**body, "stream": True}) as answer:
                lines = answer.iter_lines()
                next(lines)
                whole = threads.submit(httpx.post, f"{url}{CHAT}", json=body, timeout=60)
                running = 'sessions_running{model="tale"} 2.0'
                eventually(lambda: running in httpx.get(f"{url}/metrics").text)
                process.send_signal(signal.SIGINT)
                eventually(lambda: refuses(url))
                process.send_signal(signal.SIGINT)
                told = process.stderr.read()
                process.wait(60)
                *_, last, _ = lines
        finally:
            code = process.poll()
            process.kill()
    assert code == 0
    assert "Traceback" not in told
    assert whole.result().status_code == 503
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "closed"


@pytest.mark.skipif(os.name != "posix", reason="isolation needs POSIX")
def test_a_second_signal_ends_it_while_an_engine_stands_still(
    pack_path: Path, backend_name: str
) -> None:
    asked = command(
        f"tale={pack_path}", "--port", "0", "--n-ctx", "1024", "--backend", backend_name,
        "--n-threads", "1",
    )  # fmt: skip
    with subprocess.Popen(asked, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = next(line.split()[-1] for line in process.stderr if "serving at" in line)
        body = {**LONG, "max_tokens": 900, "stream": True}
        try:
            with httpx.stream("POST", f"{url}{CHAT}", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                starters = psutil.Process(process.pid).children()
                (worker,) = [child for starter in starters for child in starter.children()]
                worker.suspend()
                process.send_signal(signal.SIGTERM)
                eventually(lambda: refuses(url))
                process.send_signal(signal.SIGTERM)
                began = time.monotonic()
                told = process.stderr.read()
                process.wait(60)
                assert time.monotonic() - began < 15
        finally:
            code = process.poll()
            process.kill()
    assert code == 0
    assert "Traceback" not in told
    assert not worker.is_running()


def test_who_is_not_answered_before_the_end_is_told_to_ask_again(pool: Any) -> None:
    body = [{"type": "http.request", "body": json.dumps(LONG).encode()}]
    sent: list[Any] = []

    async def receive() -> Any:
        return body.pop() if body else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def story() -> None:
        app = create_app({"tale": pool})
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b""}
        answering = asyncio.create_task(app(scope, receive, send))
        await asyncio.to_thread(eventually, lambda: pool.stats().n_running)
        answering.cancel()  # as the server does whose time to end is over
        await answering

    asyncio.run(story())
    assert sent[0]["status"] == 503
    assert (b"retry-after", b"5") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["code"] == "closed"


def test_a_first_piece_waits_for_no_acknowledgement() -> None:
    with running._bound("127.0.0.1", 0, 60.0) as bound:
        assert bound.proto == socket.IPPROTO_TCP, "what asyncio sends at once on"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--host", "192.0.2.1"), "--api-key-file"),
        (("--host", "example.org"), "--api-key-file"),
        (("--idle-timeout", "0"), "--idle-timeout"),
        (("--idle-timeout", "nan"), "--idle-timeout"),
        (("--api-key-file", "no-such-file"), "no-such-file"),
    ],
)
def test_a_wrong_command_line(pack_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = subprocess.run(
        command(str(pack_path), *arguments), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert said in done.stderr


def test_a_name_that_no_answer_can_hold_is_refused(pool: Any) -> None:
    with pytest.raises(ic.InvalidInputError, match="another name"):
        create_app({"tale-\udcff": pool})  # what a file of that name gives on the command line


def test_a_request_while_an_idle_model_is_unloaded(
    pack_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    from infercore.serve.models import Models, Warm

    models = Models({"tale": lambda: ic.open_pool(pack_path, n_ctx=256, n_threads=1)}, n_warm=4)
    tale = models.get("tale")

    async def story() -> None:
        closing, go = asyncio.Event(), asyncio.Event()

        async def close(_: Warm) -> None:
            closing.set()
            await go.wait()

        async with tale.used():
            pass
        with monkeypatch.context() as patched:
            patched.setattr(Warm, "close", close)
            unloading = asyncio.create_task(tale.unload_when_idle(0))
            await closing.wait()
            asyncio.get_running_loop().call_later(0.1, go.set)
            async with tale.used() as pool:
                await unloading
                assert not pool.closed
        await tale.close()

    asyncio.run(story())


def test_models_are_loaded_when_asked_for_and_unloaded_when_idle(pack_path: Path) -> None:
    import asyncio

    from infercore.serve.app import App
    from infercore.serve.config import ServeConfig
    from infercore.serve.models import Models

    models = Models({"tale": lambda: ic.open_pool(pack_path, n_ctx=256, n_threads=1)}, n_warm=4)
    app = App(models, ServeConfig(), idle_timeout=0.2)

    async def story() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            row = (await http.get("/v1/models")).json()["data"][0]
            assert row["meta"]["loaded"] is False
            answer = await http.post(CHAT, json=ASK, timeout=60)
            assert answer.status_code == 200
            tale = models.get("tale")
            assert tale.pool is not None
            await tale.unload_when_idle(3600)
            assert tale.pool is not None
            await asyncio.sleep(0.3)
            await tale.unload_when_idle(0.2)
            assert tale.pool is None
            again = await http.post(CHAT, json=ASK, timeout=60)
            text = again.json()["choices"][0]["message"]["content"]
            assert text == answer.json()["choices"][0]["message"]["content"]
            await tale.close()

    asyncio.run(story())


def test_heavy_schemas_whose_clients_left_keep_nobody(served: Served) -> None:
    def leave(i: int) -> None:
        patterns = [{"pattern": f".*{chr(97 + n % 26)}{i}.*"} for n in range(60)]
        schema = {"name": "s", "schema": {"type": "string", "allOf": patterns}}
        body = {**ASK, "response_format": {"type": "json_schema", "json_schema": schema}}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.url}{CHAT}", json=body, timeout=0.5)

    served.client().chat.completions.create(**ASK)
    with ThreadPoolExecutor(8) as clients:
        list(clients.map(leave, range(8)))
    started = time.monotonic()
    regex = {"regex": f"a{started}"}  # a grammar that waits where others are worked on
    assert served.client(timeout=60).chat.completions.create(**ASK, extra_body=regex).choices
    assert time.monotonic() - started < 5
