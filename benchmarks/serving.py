"""What `infercore serve` costs and gives: beside its own pool, and beside other servers.

    python benchmarks/serving.py PART MODEL... [--bin DIR] [--python PROGRAM] [--json FILE]

Parts: ``added`` (what HTTP adds to the pool that the server opens: first token of a warm turn, and
each later piece), ``server`` (llama.cpp's own server, in the folder ``--bin``, on the same file
with as many slots: tokens a second of all clients, first token of a warm turn), ``python``
(``llama_cpp.server``, run by ``--python``: tokens a second of all clients). Tokens a second are
those of answers over the time for prompts and answers; the other server is stopped while one is
measured.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count, islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

import goals
import pairs
import pool_rivals
import pooled
import rivals

import infercore as ic
from infercore.values.pool import served_fields

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from typing_extensions import Self

OURS = "infercore serve"
NAME = "tale"
N_CTX = 1024
CHAT = "/v1/chat/completions"
SECONDS, END_S = 600, 60
N_FIRST = 3
"""Turns of which none counts: the first is cold, and clients connect."""
N_WARM = 3
"""Conversations a round: they are short, and a machine's speed changes from one to the next."""
ALIKE = """
import runpy
import sys
import llama_cpp.llama_cpp as api
from infercore_llamacpp import layout

own, kept = api.llama_model_default_params, []

def params():
    found = own()
    kept.append(layout.choose(found, sys.argv[sys.argv.index("--model") + 1], has_gpu=False))
    return found

api.llama_model_default_params = params
runpy.run_module("llama_cpp.server", run_name="__main__")
"""
"""`llama_cpp.server` with the layout of weights that infercore gives them here."""


class Server:
    """A server in a process of its own, on a free port."""

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._process = subprocess.Popen(  # noqa: S603
            [*command, "--port", str(self.port)],
            env=dict(os.environ if environment is None else environment),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> Self:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise SystemExit(f"{self._process.args} ended with {self._process.returncode}")
            try:
                if self._status("/health") in (200, 404) and self._status("/v1/models") == 200:  # noqa: PLR2004
                    return self
            except OSError:
                pass
            time.sleep(0.1)
        raise SystemExit(f"{self._process.args} does not answer")

    def __exit__(self, *_: object) -> None:
        self.go_on()
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # as llama-server did once
            self._process.kill()
            self._process.wait()

    def _status(self, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()

    def stop(self) -> None:
        """Let it do nothing: threads of an engine may spin for a while."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it work again."""
        self._process.send_signal(signal.SIGCONT)

    def events(
        self, path: str, body: Mapping[str, Any], connection: http.client.HTTPConnection
    ) -> Iterator[dict[str, Any]]:
        """Give the events of a streamed answer."""
        text = json.dumps({"model": NAME, "temperature": 0, "stream": True, **body})
        connection.request("POST", path, text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:  # noqa: PLR2004
            raise SystemExit(f"{answer.status}: {answer.read()[:300]!r}")
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])

    def connection(self) -> http.client.HTTPConnection:
        """Return a connection to it."""
        opened = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        opened.connect()
        opened.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return opened


def ours(path: str, options: argparse.Namespace) -> Server:
    command = [sys.executable, "-m", "infercore", "serve", f"{NAME}={path}", "-c", str(N_CTX)]
    command += ["-np", str(options.clients), "-t", str(options.threads)]
    return Server([*command, *([] if options.isolate else ["--no-isolate"])])


def llama_server(path: str, options: argparse.Namespace) -> Server:
    command, environment = pool_rivals.program(options, "llama-server")
    command += ["-m", path, "-a", NAME, "-c", str(options.clients * N_CTX)]
    command += ["-np", str(options.clients), "-t", str(options.threads)]
    if not rivals.may_lay_out(options):
        command.append("--no-repack")
    return Server(command, environment=environment)


def llama_cpp_server(path: str, options: argparse.Namespace) -> Server:
    command = [options.python, "-c", ALIKE, "--model", path, "--model_alias", NAME]
    command += ["--n_ctx", str(N_CTX), "--n_threads", str(options.threads)]
    return Server([*command, "--interrupt_requests", "False"])


# -- what clients see ------------------------------------------------------------------------------


def piece(event: Mapping[str, Any]) -> str:
    """Return the text of a chat's event."""
    delta = event["choices"][0]["delta"] if event.get("choices") else {}
    return delta.get("content") or delta.get("reasoning_content") or ""


class Clients:
    """Clients that complete texts one after the other, each on a connection of its own."""

    def __init__(self, path: str, options: argparse.Namespace) -> None:
        self._n_tokens = options.tokens
        self._n_answers = options.answers
        self._n = options.clients
        with ic.load_model(path) as model:
            self._texts = iter(pooled.prompts(model.tokenizer, 4096))
            ends = filter(model.tokenizer.is_eog, range(model.tokenizer.n_vocab))
            self._no_end = {str(token): -100 for token in ends}

    def rate(self, server: Server) -> float:
        """Return tokens of answers a second, from the first request to the end of the last answer.

        The work is fixed: clients that ask at the same time go on in step, so that what a window of
        time counts depends on where in an answer it begins and ends.
        """

        def ask() -> None:
            for _ in range(self._n_answers):
                connection = server.connection()
                body = {"prompt": next(self._texts), "max_tokens": self._n_tokens}
                body["logit_bias"] = self._no_end
                reasons = [
                    event["choices"][0]["finish_reason"]
                    for event in server.events("/v1/completions", body, connection)
                    if event.get("choices")
                ]
                connection.close()
                if "length" not in reasons:
                    raise SystemExit(f"an answer ended with {reasons[-1:]}")

        begun = perf_counter()
        with ThreadPoolExecutor(self._n) as threads:
            for asked in [threads.submit(ask) for _ in range(self._n)]:
                asked.result()
        return self._n * self._n_answers * self._n_tokens / (perf_counter() - begun)


def warm_turn(server: Server, n_tokens: int, number: int) -> float:
    """Return the milliseconds to the first token of a conversation's later turns."""
    text = f"{number} You tell of Mira and the mill. " * 20
    messages = [{"role": "system", "content": text}]
    found = []
    for turn in range(4):
        connection = server.connection()
        question = f"Turn {turn}: what did the old miller say by the river in the evening?"
        messages.append({"role": "user", "content": question})
        begun, first, answer = perf_counter(), 0.0, ""
        asked = {"messages": messages, "max_tokens": n_tokens}
        for event in server.events(CHAT, asked, connection):
            said = piece(event)
            if said and not answer:
                first = perf_counter() - begun
            answer += said
        connection.close()
        messages.append({"role": "assistant", "content": answer})
        if turn and answer:
            found.append(1e3 * first)
    return statistics.median(found)


# -- parts -----------------------------------------------------------------------------------------


async def times_of(pieces: AsyncIterator[str]) -> list[float]:
    """Return when each piece came, after the moment before the first was asked for."""
    return [perf_counter(), *[perf_counter() async for text in pieces if text]]


async def of_pool(session: Any, fields: Mapping[str, Any]) -> AsyncIterator[str]:
    """Give the pieces of a chat of a session."""
    async for chunk in session.chat(temperature=0, **fields):
        yield chunk.text


async def of_server(server: Server, fields: Mapping[str, Any], connection: Any) -> Any:
    """Give the pieces of a chat over HTTP; nothing else runs in this loop meanwhile."""
    for event in server.events(CHAT, fields, connection):
        yield piece(event)


def added(path: str, options: argparse.Namespace) -> list[pairs.Row]:
    """HTTP beside the pool that it is in front of: both isolated, or neither."""
    messages = [{"role": "user", "content": "Tell me of Mira."}]
    fields = {"messages": messages, "max_tokens": options.tokens, "ignore_eos": True}
    found: dict[str, list[list[float]]] = {OURS: [], "its pool": []}
    of_own = {"n_ctx": N_CTX, "n_parallel": options.clients, "n_threads": options.threads}
    with (
        ic.open_pool(path, **served_fields(of_own), isolate=options.isolate) as pool,
        ours(path, options) as server,
    ):
        connection = server.connection()

        async def story() -> None:
            async with await pool.aopen_session() as session:
                for _ in range(N_FIRST + options.rounds):
                    found["its pool"].append(await times_of(of_pool(session, fields)))
                    over_http = of_server(server, fields, connection)
                    found[OURS].append(await times_of(over_http))

        asyncio.run(story())
        connection.close()
    rows = []
    name = pairs.name_of(path)
    for figure, of_times in (
        ("first token of a warm turn", lambda times: times[1] - times[0]),
        ("a later piece", lambda times: (times[-1] - times[1]) / (len(times) - 2)),
    ):
        values = {by: [1e3 * of_times(t) for t in found[by][N_FIRST:]] for by in found}
        both = zip(values[OURS], values["its pool"], strict=True)
        values["added by HTTP"] = [one - other for one, other in both]
        rows += pairs.rows_of(values, model=name, figure=figure, unit="ms", own=[])
    return rows


def each_alone(
    servers: Mapping[str, Server], work: Callable[[Server], float]
) -> Iterator[tuple[str, float]]:
    """Give what ``work`` finds of each, while the others are stopped."""
    for measured in servers:
        for by, server in servers.items():
            server.go_on() if by == measured else server.stop()
        yield measured, work(servers[measured])


def beside(
    path: str, options: argparse.Namespace, rival: str, other: Callable[..., Server], *, warm: bool
) -> list[pairs.Row]:
    """Two servers in turns.

    Each round starts both anew: where a process has its memory changes its speed by some percent.
    """
    clients, starts = Clients(path, options), {OURS: ours, rival: other}
    rates: dict[str, list[float]] = {by: [] for by in starts}
    firsts: dict[str, list[float]] = {by: [] for by in starts}
    numbers = count()
    for turn in range(options.rounds):
        with ExitStack() as stack:
            order = sorted(starts, reverse=bool(turn % 2))
            servers = {by: stack.enter_context(starts[by](path, options)) for by in order}
            for _ in each_alone(servers, clients.rate):  # for nothing
                pass
            for by, value in each_alone(servers, clients.rate):
                rates[by].append(value)
            for number in islice(numbers, N_WARM if warm else 0):
                for by, value in each_alone(
                    servers, partial(warm_turn, n_tokens=16, number=number)
                ):
                    firsts[by].append(value)
        told = ", ".join(f"{by} {rates[by][-1]:.1f} tokens/s" for by in starts)
        print(f"round {turn + 1} of {options.rounds}: {told}", file=sys.stderr, flush=True)
    name = pairs.name_of(path)
    figure = f"{options.clients} clients, {options.answers} times "
    figure += f"{pooled.N_BEFORE} + {options.tokens} tokens"
    rows = pairs.rows_of(rates, model=name, figure=figure, unit="tokens/s")
    if warm:
        figure = "first token of a warm turn"
        rows += pairs.rows_of(firsts, model=name, figure=figure, unit="ms")
    return rows


def server(path: str, options: argparse.Namespace) -> list[pairs.Row]:
    return beside(path, options, "llama-server", llama_server, warm=True)


def python(path: str, options: argparse.Namespace) -> list[pairs.Row]:
    return beside(path, options, "llama_cpp.server", llama_cpp_server, warm=False)


PARTS: dict[str, Callable[[str, argparse.Namespace], list[pairs.Row]]] = {
    "added": added,
    "server": server,
    "python": python,
}


def main() -> None:
    parser = pairs.parser(__doc__, rounds=3)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("models", nargs="+", help="GGUF files; for added OpenVINO folders too")
    rivals.add_programs(parser)
    parser.add_argument(
        "--python", default=sys.executable, help="runs llama_cpp.server, with the plugin"
    )
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--answers", type=int, default=2, help="that each client asks for, a turn")
    parser.add_argument("--no-isolate", dest="isolate", action="store_false")
    options = parser.parse_args()
    rows = [row for path in options.models for row in PARTS[options.part](path, options)]
    pairs.finish("serving", rows, options)
    goals.tell(f"serving-{options.part}", rows)


if __name__ == "__main__":
    main()
