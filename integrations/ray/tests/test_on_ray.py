"""Replicas and nodes that die on a real Ray, and where the turns of a conversation go.

INFERCORE_RAY_REQUESTS=1000 runs the long ones too: so many requests while replicas are killed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from ray import serve

import infercore
import infercore_ray
from conftest import ON_A_NODE, POOL, start_node, wait_for_two, where
from infercore.values.pool import served_fields

PROMPT = "Once upon a time"
N_REQUESTS = int(os.environ.get("INFERCORE_RAY_REQUESTS", "0"))
KILL_EVERY_S = 10.0
N_TOKENS = 24
long = pytest.mark.skipif(not N_REQUESTS, reason="long: INFERCORE_RAY_REQUESTS is not set")


@pytest.fixture(scope="module")
def alone(model_path: str) -> Any:
    with infercore.open_session(model_path, n_ctx=512, n_threads=1) as session:
        yield session


@pytest.fixture(scope="module")
def client(port: int, tale: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0)


NAMES = ["Mira", "Tom", "Anna", "Otto", "Ida", "Emil", "Lily", "Ben", "Sam", "Max"]


def converse(complete: Any, n_conversations: int, n_turns: int) -> list[tuple[int, int, bool]]:
    """Return of each turn of conversations its tokens, those found, and whether it follows."""
    names = [
        f"{NAMES[n % len(NAMES)]} and {NAMES[(7 * n + 3 + n // 10) % len(NAMES)]}"
        for n in range(n_conversations)
    ]
    texts = [f"{name} went out. " * 8 for name in names]
    found = []
    for turn in range(n_turns):
        for number, name in enumerate(names):
            answer, n_tokens, n_cached = complete(texts[number], turn % 2 == 1)
            found.append((n_tokens, n_cached, turn > 0))
            texts[number] += f"{answer} And then {name} said so. "
    return found


def n_evaluated(pool: Any) -> int:
    stats = pool.stats()
    return int(stats.prompt_tokens - stats.cached_tokens)


def test_the_turns_of_a_conversation_go_where_it_is_held(
    client: openai.OpenAI, tale: Any, model_path: str
) -> None:
    size = (20, 7) if N_REQUESTS else (6, 4)
    with infercore.open_pool(model_path, **served_fields(POOL)) as alone:

        def here(text: str, _: bool) -> tuple[str, int, int]:
            with alone.open_session() as session:
                status = session.ensure_prefix(text)
                answer = "".join(c.text for c in session.decode(max_tokens=12, temperature=0.0))
            return answer, status.prefix_tokens, status.reused_tokens

        ideal = converse(here, *size)
        least = n_evaluated(alone)

    def on_ray(text: str, is_stream: bool) -> tuple[str, int, int]:
        asked: Any = {"model": "tale", "prompt": text, "max_tokens": 12, "temperature": 0}
        if is_stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        made: Any = client.completions.create(**asked)
        chunks = list(made) if is_stream else [made]
        answer = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        usage = chunks[-1].usage
        return answer, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens

    wait_for_two(tale)
    n_before = n_evaluated(tale)
    found = converse(on_ray, *size)
    evaluated = n_evaluated(tale) - n_before  # by all replicas, also for nothing
    assert [n for n, *_ in found] == [n for n, *_ in ideal]  # the texts are equal
    turns = [
        (own, best) for (_, own, follows), (_, best, _) in zip(found, ideal, strict=True) if follows
    ]
    n_held = sum(own >= best - 2 for own, best in turns)  # two may begin alike
    sys.stderr.write(
        f"{n_held} of {len(turns)} turns found what one pool would have found; "
        f"{evaluated} tokens evaluated, {least} by one pool\n"
    )
    assert n_held >= 0.95 * len(turns)
    assert evaluated <= 1.1 * least


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
        stream = alone.decode(max_tokens=N_TOKENS, seed=seed, temperature=1.0)
        wanted.append("".join(chunk.text for chunk in stream))
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

    wrong: list[str] = []

    def ask(number: int) -> bool:
        chunks = client.completions.create(
            model="tale", prompt=PROMPT, max_tokens=N_TOKENS, seed=number % 4, stream=True,
            temperature=1.0,
        )  # fmt: skip
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        if text != wanted[number % 4]:
            wrong.append(text)
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
        f"{len(right)} requests, {len(kills)} kills, {sum(right)} equal texts, "
        f"{time.monotonic() - began:.0f} s\n"
    )
    assert all(right), wrong[:3]
    assert kills


def sessions_until_one_is_at(tale: Any, wanted: set[str]) -> list[Any]:
    """Open sessions until the last one is at one of these replicas."""
    sessions: list[Any] = []
    while not sessions or sessions[-1]._process.replica not in wanted:
        assert len(sessions) < 50
        sessions.append(tale.open_session())
        sessions[-1].ensure_prefix(f"{len(sessions)} times " * 40)  # a prefix of its own
    sessions[-1].ensure_prefix(PROMPT)
    return sessions


@long
def test_a_replica_is_drained(tale: Any, alone: Any, model_path: str) -> None:
    alone.ensure_prefix(PROMPT)
    wanted = "".join(c.text for c in alone.decode(max_tokens=200, temperature=0.0))
    streams, texts = [], []
    for name in wait_for_two(tale):
        session = sessions_until_one_is_at(tale, {name})[-1]
        streams.append((session, session.decode(max_tokens=200, temperature=0.0)))
        texts.append(next(streams[-1][1]).text)
    models = {"tale": model_path}
    app = infercore_ray.build_app(models, num_replicas=1, **POOL, **ON_A_NODE)
    serve.run(app, name="tale", route_prefix="/")
    until = time.monotonic() + 60
    while len(where(tale)) > 1:
        assert time.monotonic() < until, "no replica ended"
        time.sleep(0.1)
    for number, (_, stream) in enumerate(streams):
        texts[number] += "".join(chunk.text for chunk in stream)
    assert texts == [wanted, wanted]
    app = infercore_ray.build_app(models, num_replicas=2, **POOL, **ON_A_NODE)
    serve.run(app, name="tale", route_prefix="/")
    wait_for_two(tale)


@long
def test_a_model_that_nobody_asks_has_no_replica(port: int, model_path: str) -> None:
    args = {
        "models": {
            "rare": {
                "path": model_path,
                **POOL,
                "ray_actor_options": {"num_cpus": 0.1},
                "autoscaling_config": {
                    "min_replicas": 0, "max_replicas": 2, "upscale_delay_s": 0,
                    "target_ongoing_requests": 1000, "target_waiting_tokens": 64,
                    "downscale_delay_s": 1, "downscale_to_zero_delay_s": 1,
                    "metrics_interval_s": 0.5, "look_back_period_s": 2,
                },
            }
        }
    }  # fmt: skip
    serve.run(infercore_ray.app_builder(args), name="rare", route_prefix="/rare")

    def n_replicas() -> int:
        told = serve.status().applications["rare"].deployments["model-rare"]
        return told.replica_states.get("RUNNING", 0)

    def wait_for(n: int) -> None:
        until = time.monotonic() + 90
        while n_replicas() != n:
            assert time.monotonic() < until, f"{n_replicas()} replicas, not {n}"
            time.sleep(0.2)

    wait_for(0)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/rare/v1", api_key="-")
    began = time.monotonic()
    made = client.completions.create(model="rare", prompt=PROMPT, max_tokens=4, temperature=0)
    cold = time.monotonic() - began
    assert made.choices[0].text
    until_two = threading.Event()

    def ask(first: int) -> None:
        for number in range(first, 1_000_000, 16):  # a prompt of its own each time
            client.completions.create(model="rare", prompt=f"{number} and " * 90, max_tokens=1)
            if until_two.is_set():
                return

    with ThreadPoolExecutor(16) as threads:  # so many that prompts wait, and far too few calls
        asked = [threads.submit(ask, n) for n in range(16)]
        try:
            wait_for(2)
        finally:
            until_two.set()
        for each in asked:
            each.result()
    wait_for(0)
    sys.stderr.write(f"cold start: {cold:.1f} s to the end of the first answer\n")
    serve.delete("rare")


@long
def test_a_yaml_puts_replicas_on_nodes_of_two_kinds(
    cluster: Any, port: int, model_path: str, tmp_path: Path
) -> None:
    kinds = [start_node(cluster, num_gpus=1, resources={"place": 1})]
    kinds.append(start_node(cluster, resources={"place": 1}))
    config = tmp_path / "serve.yaml"
    config.write_text(
        "applications:\n"
        "  - name: both\n"
        "    route_prefix: /both\n"
        "    import_path: infercore_ray:app_builder\n"
        "    args:\n"
        f"      models: {{both: {{path: {model_path}, n_ctx: 512, num_replicas: 2}}}}\n"
        "      ray_actor_options: {num_cpus: 0.5, resources: {place: 1}}\n"
    )
    run = [str(Path(sys.executable).parent / "serve"), "run", "--non-blocking", str(config)]
    try:
        subprocess.run([*run, "--address", cluster.address], check=True, timeout=120)
        until = time.monotonic() + 120
        while serve.status().applications["both"].status != "RUNNING":
            assert time.monotonic() < until, serve.status().applications["both"].message
            time.sleep(0.2)
        both = infercore_ray.connect("both")
        found = wait_for_two(both)
        assert {node for _, node in found.values()} == {kind.node_id for kind in kinds}
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/both/v1", api_key="-")
        assert client.completions.create(model="both", prompt=PROMPT, max_tokens=4).choices[0].text
    finally:
        serve.delete("both")
        for kind in kinds:
            cluster.remove_node(kind)


@long
def test_a_node_is_lost(cluster: Any, tale: Any, alone: Any) -> None:
    alone.ensure_prefix(PROMPT)
    wanted = "".join(c.text for c in alone.decode(max_tokens=60, temperature=0.0))
    found = wait_for_two(tale)
    (worker,) = cluster.worker_nodes
    here = [name for name, (_, node) in found.items() if node == worker.node_id]
    if not here:
        pytest.fail("no replica is on the second node")
    sessions = sessions_until_one_is_at(tale, set(here))
    session = sessions[-1]
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
