"""Clients that leave, take nothing, send half a request or hear nothing for long."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from infercore.serve import running
from serve.asking import ASK, CHAT, LONG
from served import eventually, serving

httpx = pytest.importorskip("httpx", reason="the client that the tests use is not installed")
openai = pytest.importorskip("openai", reason="the client that the tests use is not installed")

if TYPE_CHECKING:
    from served import Served


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


def said(served: Served, request: bytes, *, half_closes: bool = False) -> bytes:
    """Return all that the server says to ``request`` until it closes the connection."""
    address = ("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(request)
        if half_closes:
            connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_client_that_says_it_sends_no_more_is_gone(served: Served, pool: Any) -> None:
    """The end of its half looks like that of a client that left, whose work has to end."""
    body = json.dumps(LONG).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    before = pool.stats().generated_tokens
    assert said(served, head.encode() + body, half_closes=True) == b""
    eventually(lambda: pool.stats().n_running == 0)
    assert pool.stats().generated_tokens - before < 390


def test_an_old_client_that_names_no_host(served: Served) -> None:
    assert said(served, b"GET /v1/models HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    refused = said(served, b"GET /v1/models HTTP/1.0\r\nHost: evil.example\r\n\r\n")
    assert refused.startswith(b"HTTP/1.1 403 ")


def test_a_first_piece_waits_for_no_acknowledgement() -> None:
    with running._bound("127.0.0.1", 0, 60.0) as bound:
        assert bound.proto == socket.IPPROTO_TCP, "what asyncio sends at once on"


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
