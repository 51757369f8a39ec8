"""Sessions of a pool against other programs, and against one object that serves all in turn.

    python benchmarks/pool_rivals.py PART MODEL [--bin DIR] [--json FILE]

Parts: ``server`` and ``batched-bench`` (llama.cpp's own programs, built from the sources that
llama-cpp-python carries, in the folder ``--bin``; same cache form, flash attention, threads, batch
sizes and lengths), ``agents`` (agents that share their instructions and take many turns, over one
`Llama` or one `LLMPipeline` that serves them in turn). The programs lay weights out for every unit
of the processor or for none: where llama-cpp-python's AMX kernels crash they get ``--no-repack``,
but for ``--bin-is-sound``, which says that they were built without such kernels.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import goals
import pairs
import pooled
import rivals
from goals import POOL

import infercore as ic
from infercore.measuring import parts
from infercore.measuring.stats import in_turns

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

PORT = 18_766


def flags(path: str, context: Any, options: argparse.Namespace) -> list[str]:
    """Return the settings of ``context``, as llama.cpp's programs are told them."""
    effective = context.effective
    unified = "--kv-unified" if effective["kv_unified"] else "--no-kv-unified"
    told = ["-m", path, "-c", str(effective["n_ctx"]), "-fa", str(effective["flash_attn"]), unified]
    told += ["-b", str(effective["n_batch"]), "-ub", str(effective["n_ubatch"])]
    told += ["-t", str(options.threads), "-tb", str(options.threads)]
    told += ["-ctk", str(effective["type_k"]), "-ctv", str(effective["type_v"])]
    return told if rivals.may_lay_out(options) else [*told, "--no-repack"]


def program(options: argparse.Namespace, name: str) -> tuple[list[str], dict[str, str]]:
    """Return the command of one of llama.cpp's programs, and its environment."""
    libraries = os.pathsep.join(filter(None, [options.bin, os.environ.get("LD_LIBRARY_PATH")]))
    return [str(Path(options.bin) / name)], {**os.environ, "LD_LIBRARY_PATH": libraries}


def server(path: str, options: argparse.Namespace) -> list[pairs.Row]:
    """N sessions at once, beside as many requests at once to llama.cpp's server."""
    n, width = options.tokens, options.sessions
    with pool_of(path, options) as (pool, crowd):
        context = pool.owner.scheduler.context
        command, environment = program(options, "llama-server")
        command += flags(path, context, options)
        command += ["-np", str(width), "--port", str(PORT), "--no-warmup", "--cache-ram", "0"]
        process = subprocess.Popen(  # noqa: S603
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_for_server(process)
            ids = [pool.tokenizer.encode(text) for text in crowd.texts]
            threads = ThreadPoolExecutor(width)

            def ours() -> float:
                process.send_signal(signal.SIGSTOP)  # its threads spin for a while
                try:
                    return crowd.rate(n)
                finally:
                    process.send_signal(signal.SIGCONT)

            def theirs() -> float:
                list(threads.map(lambda i: complete(i, ids[i], 1), range(width)))
                told = list(threads.map(lambda i: complete(i, ids[i], n), range(width)))
                return sum(1e3 * n / one["timings"]["predicted_ms"] for one in told)

            runs = {POOL: ours, "llama-server": theirs}
            in_turns(runs, 1)
            found = in_turns(runs, options.rounds)
            threads.shutdown()
        finally:
            process.kill()
            process.wait()
    figure = f"{width} sessions, {n} tokens each"
    return pairs.rows_of(found, model=pairs.name_of(path), figure=figure, unit="tokens/s")


def wait_for_server(process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit(f"llama-server ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5) as answer:
                if answer.status == 200:  # noqa: PLR2004
                    return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("llama-server does not answer")


def complete(slot: int, ids: Sequence[int], n: int) -> dict[str, Any]:
    """Ask the server for ``n`` greedy tokens in a slot of its own."""
    asked = {
        "prompt": list(ids),
        "n_predict": n,
        "temperature": 0.0,
        "samplers": ["top_k"],
        "top_k": 1,
        "ignore_eos": True,
        "id_slot": slot,
        "cache_prompt": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/completion",
        data=json.dumps(asked).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
        told: dict[str, Any] = json.load(answer)
    return told


def batched_bench(path: str, options: argparse.Namespace) -> list[pairs.Row]:
    """N sessions at once, beside llama.cpp's own measure of a batch of as many sequences."""
    n, width = options.tokens, options.sessions
    with pool_of(path, options) as (pool, crowd):
        context = pool.owner.scheduler.context
        command, environment = program(options, "llama-batched-bench")
        command += flags(path, context, options)
        command += ["-npp", str(pooled.N_BEFORE), "-ntg", str(n), "-npl", str(width)]
        command += ["--output-format", "jsonl"]

        def bench(*more: str) -> float:
            done = subprocess.run(  # noqa: S603
                [*command, *more], env=environment, check=False, capture_output=True, text=True
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if not lines:
                raise SystemExit(f"{command[0]} ended with {done.returncode}: {done.stderr[-500:]}")
            speed: float = json.loads(lines[-1])["speed_tg"]
            return speed

        runs: dict[str, Callable[[], float]] = {
            POOL: lambda: crowd.rate(n),
            "llama-batched-bench": bench,
        }
        if options.best:
            streams = ("--no-kv-unified", "-fa", "on")
            runs["llama-batched-bench, streams, flash attention"] = lambda: bench(*streams)
        crowd.rate(n)
        found = in_turns(runs, options.rounds)
    figure = f"{width} sessions, {n} tokens each"
    return pairs.rows_of(
        found, model=pairs.name_of(path), figure=figure, unit="tokens/s", own=[POOL]
    )


class pool_of:  # noqa: N801  (a context manager, read like a function)
    """A pool of the model at ``path``, and a crowd of its sessions."""

    def __init__(self, path: str, options: argparse.Namespace) -> None:
        self._model = ic.load_model(path)
        self._pool = self._model.new_pool(
            n_ctx=pooled.N_BEFORE + 2 * options.tokens + 64,
            n_parallel=options.sessions,
            n_threads=options.threads,
        )
        self._crowd = pooled.Crowd(self._pool, options.sessions)

    def __enter__(self) -> tuple[ic.SessionPool, pooled.Crowd]:
        return self._pool, self._crowd

    def __exit__(self, *_: object) -> None:
        self._crowd.close()
        self._pool.close()
        self._model.close()


def agents(path: str, options: argparse.Namespace) -> list[pairs.Row]:
    """Agents with the same instructions: turns that add a result and generate an answer.

    All turns of a round come at once; who serves one at a time takes them in their order.
    """
    width, n, answer = options.sessions, options.instructions, options.answer
    n_ctx = n + options.turns * (options.result + answer) + 64
    seconds: dict[str, list[float]] = {}
    with (
        ic.load_model(path) as model,
        model.new_pool(
            n_ctx=n_ctx,
            n_cells=n_ctx + width * (n_ctx - n + 64),
            n_parallel=width,
            n_threads=options.threads,
        ) as pool,
    ):
        tokenizer = model.tokenizer
        instructions = parts.text_of(tokenizer, n)
        first = tokenizer.encode(instructions)
        sessions = [pool.open_session() for _ in range(width)]
        histories = [list(first) for _ in range(width)]
        rival, serve = served_in_turn(path, n_ctx, options)
        threads = ThreadPoolExecutor(width)

        def own_turn(i: int, text: str) -> None:
            sessions[i].prefill_suffix(ic.SuffixInput(text=text, mode="append"))
            pooled.generate(sessions[i], answer)

        def own(texts: Sequence[str]) -> None:
            list(threads.map(own_turn, range(width), texts))

        def other(texts: Sequence[str]) -> None:
            for history, text in zip(histories, texts, strict=True):
                history.extend(tokenizer.encode(text, add_special=False))
                history.extend(serve(history, answer))

        def begin() -> None:
            list(threads.map(lambda s: s.ensure_prefix(instructions), sessions))

        timed(seconds, POOL, begin)
        timed(seconds, rival, lambda: serve(first, 1))
        for turn in range(options.turns):
            texts = [
                " " + parts.text_of(tokenizer, options.result, 7 * turn + i) for i in range(width)
            ]
            both = [(POOL, lambda t=texts: own(t)), (rival, lambda t=texts: other(t))]
            for name, work in both if turn % 2 == 0 else both[::-1]:
                timed(seconds, name, work)
        threads.shutdown()
    name = pairs.name_of(path)
    size = f"{width} agents, {n} tokens shared, {options.turns} turns of {options.result}+{answer}"
    whole = {by: [sum(found)] for by, found in seconds.items()}
    turns = {by: found[1:] for by, found in seconds.items()}
    made = pairs.rows_of(whole, model=name, figure=size, unit="s")
    each = pairs.rows_of(turns, model=name, figure=f"{size}; a turn of all", unit="s")
    return made + [row for row in each if not row.figure.endswith(", ratio")]


def timed(into: dict[str, list[float]], name: str, work: Callable[[], object]) -> None:
    begun = perf_counter()
    work()
    into.setdefault(name, []).append(perf_counter() - begun)


def served_in_turn(
    path: str, n_ctx: int, options: argparse.Namespace
) -> tuple[str, Callable[[Sequence[int], int], list[int]]]:
    """Return who serves one at a time, and how: a prompt's ids in, ids of the answer out."""
    if os.path.isdir(path):
        pipe = rivals.pipeline(path, n_threads=options.threads, kv=None)
        return "LLMPipeline", lambda ids, n: rivals.pipeline_run(pipe, ids, n)[0]
    llama = rivals.llama(path, n_ctx=n_ctx, n_threads=options.threads)

    def answer(ids: Sequence[int], n: int) -> list[int]:
        stream = llama.generate(list(ids), temp=0.0)  # it keeps what it shares with the last one
        tokens = [next(stream) for _ in range(n)]
        stream.close()
        return tokens

    return "Llama", answer


PARTS: dict[str, Callable[[str, argparse.Namespace], list[pairs.Row]]] = {
    "server": server,
    "batched-bench": batched_bench,
    "agents": agents,
}


def main() -> None:
    parser = pairs.parser(__doc__, rounds=3)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("models", nargs="+", help="GGUF files; for agents OpenVINO folders too")
    rivals.add_programs(parser)
    parser.add_argument("--best", action="store_true", help="batched-bench with its best settings")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--instructions", type=int, default=1024, help="tokens that all share")
    parser.add_argument("--result", type=int, default=32, help="tokens that a turn adds")
    parser.add_argument("--answer", type=int, default=16, help="tokens that it generates")
    options = parser.parse_args()
    rows = [row for path in options.models for row in PARTS[options.part](path, options)]
    pairs.finish("pool_rivals", rows, options)
    goals.tell(f"pool-{options.part}", rows)


if __name__ == "__main__":
    main()
