"""Replicas and nodes that die on a real Ray, and where the turns of a conversation go.

INFERCORE_RAY_REQUESTS=1000 runs the long ones too: so many requests while replicas are killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

import infercore

PROMPT = "Once upon a time"
N_REQUESTS = int(os.environ.get("INFERCORE_RAY_REQUESTS", "0"))
KILL_EVERY_S = 10.0
long = pytest.mark.skipif(not N_REQUESTS, reason="long: INFERCORE_RAY_REQUESTS is not set")


@pytest.fixture(scope="module")
def alone(model_path: str) -> Any:
    with infercore.open_session(model_path, n_ctx=512, n_threads=1) as session:
        yield session


@pytest.fixture(scope="module")
def client(port: int, tale: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0)


def where(tale: Any) -> dict[str, tuple[int, str]]:
    """Return process and node of each replica that answers."""
    answers = tale.process._handle.broadcast("where").results(return_exceptions=True)
    return {name: (pid, node) for name, pid, node in answers if name}


def wait_for_two(tale: Any) -> dict[str, tuple[int, str]]:
    until = time.monotonic() + 60
    while len(found := where(tale)) < 2:
        assert time.monotonic() < until, "no other replica came"
        time.sleep(0.2)
    return found


@long
def test_the_turns_of_a_conversation_go_where_it_is_held(
    client: openai.OpenAI, tale: Any, alone: Any
) -> None:
    wait_for_two(tale)
    before = tale.stats()
    names = ["Mira", "Tom", "Anna", "Otto", "Ida", "Emil"]
    texts = [f"Once upon a time {name} went out. " * 10 for name in names]
    evaluated = ideal = n_follow = n_held = 0
    held = [0] * len(names)
    for turn in range(4):
        for number in range(len(names)):
            made = client.completions.create(
                model="tale", prompt=texts[number], max_tokens=12, temperature=0
            )
            usage = made.usage
            cached = usage.prompt_tokens_details.cached_tokens
            evaluated += usage.prompt_tokens - cached
            ideal += usage.prompt_tokens - (held[number] if turn else 0)
            if turn:
                n_follow += 1
                n_held += cached >= held[number] - 2
            texts[number] += made.choices[0].text
            held[number] = usage.total_tokens - 1
            texts[number] += f" And then {names[number]} said so. "
    assert n_held >= 0.95 * n_follow
    assert evaluated <= 1.1 * ideal + 64 * len(names)
    assert tale.stats().cached_tokens > before.cached_tokens


def test_a_stream_survives_its_replica(client: openai.OpenAI, tale: Any, alone: Any) -> None:
    alone.ensure_prefix(PROMPT)
    wanted = "".join(c.text for c in alone.decode(max_tokens=200, seed=3, temperature=1.0))
    wait_for_two(tale)
    with tale.open_session() as session:
        session.ensure_prefix(PROMPT)
        found, gap = "", 0.0
        last = None
        for number, chunk in enumerate(session.decode(max_tokens=200, seed=3, temperature=1.0)):
            now = time.monotonic()
            gap = max(gap, 0.0 if last is None else now - last)
            found += chunk.text
            if number == 9:
                first = session._process.replica
                os.kill(where(tale)[first][0], signal.SIGKILL)
            last = time.monotonic()
        assert found == wanted
        assert session._process.replica != first
        sys.stderr.write(f"longest wait for a token: {gap * 1e3:.0f} ms\n")
        assert gap < 1.0


@long
def test_no_request_is_lost_while_replicas_are_killed(
    client: openai.OpenAI, tale: Any, alone: Any
) -> None:
    wanted = []
    for seed in range(4):
        alone.ensure_prefix(PROMPT)
        wanted.append("".join(c.text for c in alone.decode(max_tokens=100, seed=seed)))
    ended = threading.Event()
    kills: list[str] = []
    draw = random.Random(7)

    def kill() -> None:
        while not ended.wait(KILL_EVERY_S):
            found = where(tale)
            if len(found) > 1:
                name = draw.choice(sorted(found))
                os.kill(found[name][0], signal.SIGKILL)
                kills.append(name)

    def ask(number: int) -> bool:
        chunks = client.completions.create(
            model="tale", prompt=PROMPT, max_tokens=100, seed=number % 4, stream=True,
            temperature=1.0,
        )  # fmt: skip
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        return text == wanted[number % 4]

    wait_for_two(tale)
    killer = threading.Thread(target=kill)
    killer.start()
    began = time.monotonic()
    try:
        with ThreadPoolExecutor(4) as threads:
            right = list(threads.map(ask, range(N_REQUESTS)))
            while not kills and time.monotonic() < began + 60:
                right += threads.map(ask, range(4))
    finally:
        ended.set()
        killer.join()
    sys.stderr.write(
        f"{len(right)} requests, {len(kills)} kills, {time.monotonic() - began:.0f} s" + "\n"
    )
    assert all(right)
    assert kills


@long
def test_a_node_is_lost(cluster: Any, tale: Any, alone: Any) -> None:
    alone.ensure_prefix(PROMPT)
    wanted = "".join(c.text for c in alone.decode(max_tokens=60, temperature=0.0))
    found = wait_for_two(tale)
    (worker,) = cluster.worker_nodes
    here = [name for name, (_, node) in found.items() if node == worker.node_id]
    if not here:
        pytest.fail("no replica is on the second node")
    sessions = []
    while True:  # until one is there
        session = tale.open_session()
        sessions.append(session)
        session.ensure_prefix(PROMPT + " " * len(sessions))
        if session._process.replica in here:
            break
    session.ensure_prefix(PROMPT)
    stream = session.decode(max_tokens=60, temperature=0.0)
    text = next(stream).text
    began = time.monotonic()
    cluster.remove_node(worker, allow_graceful=False)
    text += "".join(chunk.text for chunk in stream)
    sys.stderr.write(
        f"the rest came {time.monotonic() - began:.1f} s after the node was lost" + "\n"
    )
    assert text == wanted
    for each in sessions:
        each.close()
