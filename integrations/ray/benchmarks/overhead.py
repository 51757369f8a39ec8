"""What Ray's path costs beside `infercore serve`: a chunk, the first one, and memory.

    python integrations/ray/benchmarks/overhead.py [--model FILE] [--streams N]

One client reads streams of 200 tokens, first from `infercore serve`, then from one replica on a Ray
that is started for it; memory is what each process has to itself (PSS) after that. HOME is a
scratch folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import openai
import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster

import infercore_models
import infercore_ray

N_TOKENS = 200
POOL = {"n_ctx": 512, "n_parallel": 4, "n_threads": 1}


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def read(port: int, n_streams: int) -> tuple[float, float]:
    """Return medians in ms: until the first chunk, and between two chunks."""
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", timeout=60)
    (model,) = client.models.list().data
    firsts, gaps = [], []
    for number in range(n_streams + 1):
        asked = time.perf_counter()
        stream = client.completions.create(
            model=model.id, prompt="Once upon a time", max_tokens=N_TOKENS, seed=number,
            stream=True,
        )  # fmt: skip
        times = [time.perf_counter() for chunk in stream if chunk.choices]
        if number:  # the first one warms up
            firsts.append(times[0] - asked)
            gaps.append((times[-1] - times[0]) / (len(times) - 1))
    return statistics.median(firsts) * 1e3, statistics.median(gaps) * 1e3


def own_memory(process: psutil.Process) -> float:
    """Return the MiB that are a process's own share."""
    return float(process.memory_full_info().pss) / 2**20


def plain(model: str, n_streams: int) -> tuple[tuple[float, float], dict[str, float]]:
    """Measure `infercore serve`."""
    port = free_port()
    options = ["--port", str(port), "--n-ctx", "512", "-np", "4", "--n-threads", "1"]
    command = [sys.executable, "-m", "infercore", "serve", f"tale={model}", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:  # noqa: S603  (ours)
        try:
            wait_until_it_listens(port)
            times = read(port, n_streams)
            main = psutil.Process(server.pid)
            each = [main, *main.children(recursive=True)]
            return times, {"all processes": sum(map(own_memory, each))}
        finally:
            server.terminate()


def wait_until_it_listens(port: int) -> None:
    """Wait until something listens at ``port``."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError("the server did not start")


def on_ray(model: str, n_streams: int) -> tuple[tuple[float, float], dict[str, float]]:
    """Measure one replica behind the front, on a Ray of one node."""
    port = free_port()
    nodes = Cluster()
    nodes.add_node(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
    try:
        ray.init(address=nodes.address, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(infercore_ray.build_app({"tale": model}, **POOL))
        times = read(port, n_streams)
        memory: dict[str, float] = {}
        for process in psutil.Process().children(recursive=True):
            title = " ".join(process.cmdline())
            kinds = {"ReplicaActor:infercore:model": "a replica", "model-tale": "a replica",
                     "ServeReplica": "a replica or front"}  # fmt: skip
            kind = next((name for part, name in kinds.items() if part in title), "the rest of Ray")
            memory[kind] = memory.get(kind, 0.0) + own_memory(process)
        return times, memory
    finally:
        ray.shutdown()
        nodes.shutdown()


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description="what Ray's path costs")
    parser.add_argument("--model", help="a model's file; the storyteller where none is given")
    parser.add_argument("--streams", type=int, default=15)
    given = parser.parse_args()
    home = tempfile.mkdtemp(prefix="ic", dir="/tmp")  # the paths of sockets have to be short
    os.environ |= {"HOME": home, "RAY_TMPDIR": home, "RAY_worker_niceness": "0"}
    (Path(home) / "ray").mkdir()
    model = given.model or str(infercore_models.path("storyteller", "gguf-f32"))
    measured: list[tuple[str, Any]] = [("infercore serve", plain), ("Ray", on_ray)]
    try:
        for name, measure in measured:
            (first, gap), memory = measure(model, given.streams)
            told = ", ".join(f"{what} {mib:.0f} MiB" for what, mib in sorted(memory.items()))
            print(f"{name}: first chunk {first:.1f} ms, {gap:.2f} ms a chunk; {told}", flush=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
