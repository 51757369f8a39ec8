"""The command that serves: how it starts, and how signals end it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from infercore.serve import create_app
from serve.asking import CHAT, LONG
from served import eventually

httpx = pytest.importorskip("httpx", reason="the client that the tests use is not installed")

if TYPE_CHECKING:
    from pathlib import Path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "infercore", "serve", *arguments]


def refuses(url: str) -> bool:
    try:
        httpx.get(url)
    except httpx.TransportError:
        return True
    return False


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
    body = {**LONG, "max_tokens": 900, "stream": True}
    begun: list[psutil.Process] = []
    with subprocess.Popen(asked, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            url = next(line.split()[-1] for line in process.stderr if "serving at" in line)
            with httpx.stream("POST", f"{url}{CHAT}", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                starters = psutil.Process(process.pid).children()
                (worker,) = [child for starter in starters for child in starter.children()]
                begun += [*starters, worker, *worker.children(recursive=True)]
                worker.suspend()
                process.send_signal(signal.SIGTERM)
                eventually(lambda: refuses(url))
                process.send_signal(signal.SIGTERM)
                _, told = process.communicate(timeout=15)
        finally:
            code = process.poll()
            for each in (*begun, process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
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
