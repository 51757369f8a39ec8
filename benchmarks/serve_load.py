"""Clients that chat over HTTP, half of which leave in mid-stream: a file for locust.

    locust -f benchmarks/serve_load.py --headless -u 8 -r 8 -t 5m --host http://127.0.0.1:8000

Each user opens a conversation and goes on with it for some turns; every second answer is left
after a few pieces. Beside what locust counts of its own, it is told of each first piece ("first"),
each later one ("gap") and of whole answers' tokens ("token", content length 1 each). Any server of
the OpenAI protocol can be asked, so that two are compared with the same file. Errors are all
answers but 200, and 429, which is counted apart. Model and lengths: the environment variables
``LOAD_MODEL`` (default "tale") and ``LOAD_TOKENS`` (default 48). With ``LOAD_PID``, the server's
process, the resident memory of it and its children is printed at the end, ten times over the run.
With ``LOAD_CHECK`` so many of the answers are asked for once more at the end, one after the other:
with its seed an answer has the same text alone, but for near ties.
"""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

import gevent
import psutil
import requests
from locust import HttpUser, between, events, task

MODEL = os.environ.get("LOAD_MODEL", "tale")
TOKENS = int(os.environ.get("LOAD_TOKENS", "48"))
TURNS = 4
WORDS = ("Mira", "walked", "along", "the", "road", "to", "an", "old", "mill", "by", "lamps")

CHECK = int(os.environ.get("LOAD_CHECK", "0"))
LOOK_S = 1.0
SECONDS = 600.0
_sizes: list[float] = []
_answers: list[tuple[dict[str, Any], str, bool]] = []
"""What was asked, what was read, and whether that was all of it."""


@events.test_start.add_listener
def watch(**_: object) -> None:
    """Note the server's memory while clients talk."""
    if pid := os.environ.get("LOAD_PID"):
        gevent.spawn(_note, psutil.Process(int(pid)))


def _note(server: psutil.Process) -> None:
    while server.is_running():
        family = [server, *server.children(recursive=True)]
        _sizes.append(sum(each.memory_info().rss for each in family) / 2**20)
        gevent.sleep(LOOK_S)


@events.quitting.add_listener
def show(**_: object) -> None:
    """Print what was noted."""
    if _sizes:
        places = [round(i * (len(_sizes) - 1) / 9) for i in range(10)]
        print("MiB resident over the run:", *(f"{_sizes[place]:.0f}" for place in places))


@events.quitting.add_listener
def check(environment: Any, **_: object) -> None:
    """Ask for some of the answers once more, alone, and print how many have other texts."""
    asked = random.Random(0).sample(_answers, min(CHECK, len(_answers)))
    others = [
        (text, alone)
        for body, text, is_whole in asked
        if (alone := _alone(environment.host, body)) != text
        and (is_whole or not alone.startswith(text))
    ]
    print(f"{len(asked)} of {len(_answers)} answers asked for alone: {len(others)} other texts")
    for text, alone in others:
        print(f"    {text!r}\n    {alone!r} alone")


def _alone(host: str, body: dict[str, Any]) -> str:
    answer = requests.post(
        f"{host}/v1/chat/completions", json={**body, "stream": False}, timeout=60
    )
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


class Talker(HttpUser):
    """Somebody who talks for some turns, then begins anew."""

    wait_time = between(0, 0.1)

    def on_start(self) -> None:
        """Begin a conversation."""
        self._random = random.Random(id(self))
        self._messages: list[dict[str, str]] = []
        self._n_answers = 0

    @task
    def talk(self) -> None:
        """Ask, and read the answer, or a part of it."""
        if len(self._messages) >= 2 * TURNS:
            self._messages = []
        text = " ".join(self._random.choices(WORDS, k=12))
        asked = [*self._messages, {"role": "user", "content": text}]
        self._n_answers += 1
        leaves = self._n_answers % 2 == 0
        answer = self._read(asked, n_pieces=5 if leaves else None)
        if answer and not leaves:
            self._messages = [*asked, {"role": "assistant", "content": answer}]

    def _read(self, messages: list[dict[str, str]], n_pieces: int | None) -> str:
        body = {"model": MODEL, "messages": messages, "max_tokens": TOKENS, "stream": True}
        body["seed"] = self._random.randrange(2**31)
        began = last = time.perf_counter()
        pieces: list[str] = []
        with self.client.post(
            "/v1/chat/completions", json=body, stream=True, catch_response=True, name="chat"
        ) as response:
            if response.status_code == 429:  # noqa: PLR2004  (told to come back later)
                response.request_meta["name"] = "busy"
                response.success()
                return ""
            if response.status_code != 200:  # noqa: PLR2004
                response.failure(f"{response.status_code}: {response.text[:200]}")
                return ""
            for line in response.iter_lines():
                text = _text_of(line)
                if not text:
                    continue
                now = time.perf_counter()
                self._tell("gap" if pieces else "first", now - (last if pieces else began))
                last = now
                pieces.append(text)
                if len(pieces) == n_pieces:
                    break
            response.success()
        if CHECK and pieces:
            _answers.append((body, "".join(pieces), len(pieces) != n_pieces))
        return "".join(pieces)

    def _tell(self, name: str, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type="sse", name=name, response_time=1000 * seconds, response_length=1,
            exception=None, context={},
        )  # fmt: skip


def _text_of(line: bytes) -> str:
    if not line.startswith(b"data: {"):
        return ""
    event = json.loads(line[6:])
    if "error" in event:
        raise RuntimeError(str(event["error"]))
    delta = event["choices"][0]["delta"] if event.get("choices") else {}
    return delta.get("content") or delta.get("reasoning_content") or ""
