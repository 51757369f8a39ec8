"""The server of the examples, over real sockets."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SERVER = Path(__file__).parents[2] / "examples" / "async_server.py"
PROMPTS = (" Mira was very", " Her best friend was", " One evening a letter", " So she packed")
N_SESSIONS = 3


class Server:
    """A running server: its port, and what it has printed so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self._printed = process.stdout
        line = self._printed.readline()
        assert f"with {N_SESSIONS} sessions" in line
        self.port = int(re.findall(r":(\d+) ", line)[0])

    def end(self, number: signal.Signals) -> None:
        """Send it a signal, and see it end well."""
        self._process.send_signal(number)
        _, errors = self._process.communicate(timeout=60)
        assert (self._process.returncode, errors) == (0, "")

    def line(self) -> str:
        """Return what it says of the next request, when it does."""
        return self._printed.readline().strip()

    def send(self, **request: Any) -> socket.socket:
        """Send a request, and return its socket."""
        return self.post(json.dumps(request).encode())

    def post(self, body: bytes, n_announced: int | None = None) -> socket.socket:
        """Send a request with a body, and return its socket."""
        length = len(body) if n_announced is None else n_announced
        wire = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        head = f"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
        wire.sendall(head.encode() + body)
        return wire

    def ask(self, prompt: str, **options: Any) -> tuple[str, dict[str, Any]]:
        """Return the text for a prompt, and the last line that came."""
        with self.send(prompt=prompt, temperature=0, **options) as wire:
            status, lines = answer_on(wire)
        assert status == 200
        assert all("finish_reason" not in line for line in lines[:-1])
        return "".join(line["text"] for line in lines), lines[-1]

    def refused(self, body: bytes, n_announced: int | None = None) -> str:
        """Return why a request is refused."""
        with self.post(body, n_announced) as wire:
            status, lines = answer_on(wire)
        assert status == 400
        assert self.line().startswith("refused: ")
        return str(lines[0]["error"])


def answer_on(wire: socket.socket) -> tuple[int, list[dict[str, Any]]]:
    """Return an answer's status, and its lines."""
    response = http.client.HTTPResponse(wire)
    response.begin()
    return response.status, [json.loads(line) for line in response.read().splitlines()]


@pytest.fixture
def server(engine: str, environment: Callable[[str], Mapping[str, str]]) -> Iterator[Server]:
    """Start a server on a free port; end it with Ctrl-C."""
    with subprocess.Popen(
        [sys.executable, str(SERVER), path_for(engine), "0"],
        env=environment(engine),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    ) as process:
        try:
            server = Server(process)
            yield server
            if process.poll() is None:
                server.end(signal.SIGINT)
        finally:
            process.kill()


def path_for(engine: str) -> str:
    import infercore_models

    return str(infercore_models.path("storyteller", {**pack.FORMATS, "reference": "hf"}[engine]))


def test_many_clients_at_once_get_what_each_gets_alone(server: Server) -> None:
    alone = {prompt: server.ask(prompt, max_tokens=24) for prompt in PROMPTS}
    text, last = alone[" Mira was very"]
    assert text.startswith(" patient, and everyone on the road knew it. Her best friend was Tom")
    assert last["finish_reason"] == "length"
    assert last["cached"] >= 15  # the system text was warm

    n_clients = 4 * N_SESSIONS
    together = threading.Barrier(n_clients, timeout=60)

    def client(number: int) -> tuple[str, str]:
        prompt = PROMPTS[number % len(PROMPTS)]
        together.wait()
        return prompt, server.ask(prompt, max_tokens=24)[0]

    with ThreadPoolExecutor(n_clients) as clients:
        for prompt, told in clients.map(client, range(n_clients)):
            assert told == alone[prompt][0]
    for _ in range(len(PROMPTS) + n_clients):
        assert server.line() == "answered with 24 tokens"


def test_the_text_comes_piece_by_piece(server: Server) -> None:
    _, last = server.ask(" Mira", max_tokens=8)
    assert last["finish_reason"] == "length"
    with server.send(prompt=" Mira", temperature=0, max_tokens=8) as wire:
        _, lines = answer_on(wire)
    assert len(lines) > 4


def test_a_client_that_hangs_up_frees_its_session(server: Server) -> None:
    for _ in range(2 * N_SESSIONS):  # more than there are sessions
        server.send(prompt=" Mira", max_tokens=400).close()
        assert server.line() == "hung up; its session is free"
    assert server.ask(" Mira was very", max_tokens=3)[0] == " patient, and"
    assert server.line() == "answered with 3 tokens"


def test_a_client_may_hang_up_in_the_middle(server: Server) -> None:
    said = []
    for _ in range(5):  # where this process is held up for long, the answer may be complete
        wire = server.send(prompt=" Mira", max_tokens=400, temperature=0)
        assert wire.recv(100).startswith(b"HTTP/1.1 200 OK")
        wire.close()
        said.append(server.line())
        assert server.ask(" Mira was very", max_tokens=3)[0] == " patient, and"
        assert server.line() == "answered with 3 tokens"
    assert "hung up; its session is free" in said


def test_what_is_wrong_is_refused_and_the_next_is_served(server: Server) -> None:
    assert "Expecting value" in server.refused(b"no JSON")
    assert "send an object" in server.refused(b"[1]")
    assert "send an object" in server.refused(b'{"prompt": "", "temperatur": 1}')
    assert "temperature" in server.refused(b'{"prompt": "", "temperature": -1}')
    assert "512" in server.refused(json.dumps({"prompt": " word" * 600}).encode())
    assert "suffix=7" in server.refused(b'{"prompt": 7}')
    assert "at most" in server.refused(b"", n_announced=2**20 + 1)
    assert server.ask(" Mira was very", max_tokens=3)[0] == " patient, and"


def test_an_answer_under_way_does_not_keep_it_from_ending(server: Server) -> None:
    with server.send(prompt=" Mira", max_tokens=400) as wire:
        assert wire.recv(100).startswith(b"HTTP/1.1 200 OK")
        server.end(signal.SIGTERM)
