"""Several sequences at once: tokens a second of all together, greedy, after short prompts.

One after the other on all threads; as sequences of one context, one call a step; each with a
context of its own, in a thread of its own with its share of the threads. GGUF files: `Llama`
in threads as well. OpenVINO: contexts of one model share a compiled graph, so it gets as many
streams as there are threads to run it; without them it works for one context after the other.
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import TYPE_CHECKING, Any

import pairs
import rivals

import infercore as ic
from infercore.measuring import parts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

N_BEFORE = 32


def together(context: ic.Context, prompts: Sequence[list[int]], n: int) -> float:
    """Seconds of ``n`` tokens for each prompt, all sequences in one call a step."""
    context.clear()
    width = len(prompts)
    for seq_id, ids in enumerate(prompts):
        context.decode(ids[:-1], seq_id=seq_id, logits="none")
    tokens = [ids[-1] for ids in prompts]
    begun = perf_counter()
    for _ in range(n):
        context.decode_batch([(token, [i], True) for i, token in enumerate(tokens)])
        tokens = [int(context.logits(i).argmax()) for i in range(width)]
    return perf_counter() - begun


Job = tuple["Callable[[], object]", "Callable[[], object]"]
"""What comes before the clock starts, and what it measures."""


def own_context(context: ic.Context, sampler: ic.Sampler, ids: list[int], n: int) -> Job:
    def before() -> None:
        context.clear()
        context.decode(ids)

    return before, lambda: parts.steps_s(context, sampler, n)


def own_llama(model: Any, ids: list[int], n: int) -> Job:
    """The tokens after the first one, which ends the prompt."""
    streams: list[Any] = []

    def before() -> None:
        model.reset()
        streams[:] = [model.generate(ids, temp=0.0)]
        next(streams[0])

    return before, lambda: list(itertools.islice(streams[0], n))


def in_threads(pool: ThreadPoolExecutor, jobs: Sequence[Job]) -> float:
    """Seconds until all jobs are done: the slowest counts."""
    for before, _ in jobs:
        before()
    begun = perf_counter()
    for done in [pool.submit(work) for _, work in jobs]:
        done.result()
    return perf_counter() - begun


def in_order(jobs: Sequence[Job]) -> float:
    """Seconds of all jobs, one after the other."""
    total = 0.0
    for before, work in jobs:
        before()
        begun = perf_counter()
        work()
        total += perf_counter() - begun
    return total


def measure(path: str, options: argparse.Namespace) -> list[pairs.Row]:
    n, width, threads = options.tokens, options.sequences, options.threads
    share = max(1, threads // width)
    is_folder = os.path.isdir(path)
    gpu = {} if is_folder else {"n_gpu_layers": options.n_gpu_layers}
    n_ctx = N_BEFORE + n + 32
    with ic.load_model(path, **gpu) as model, ThreadPoolExecutor(width) as pool:
        prompts = [parts.ids_of(model.tokenizer, N_BEFORE, i) for i in range(width)]
        fields: dict[str, Any] = {"n_ctx": n_ctx * width, "n_seq_max": width}
        wide = model.new_context(n_threads=threads, **fields)
        one = model.new_context(n_ctx=n_ctx, n_threads=threads)
        alone: dict[str, Any] = {"n_threads": share}
        if is_folder:
            alone = {"n_threads": share * width, "backend_options": {"num_streams": width}}
        own = [model.new_context(n_ctx=n_ctx, **alone) for _ in prompts]
        sampler = model.new_sampler(temperature=0)
        apart = [
            own_context(context, model.new_sampler(temperature=0), ids, n)
            for context, ids in zip(own, prompts, strict=True)
        ]
        runs: dict[str, Callable[[], float]] = {
            "one context, one call a step": lambda: together(wide, prompts, n),
            "one after the other": lambda: in_order(
                [own_context(one, sampler, ids, n) for ids in prompts]
            ),
            "contexts in threads": lambda: in_threads(pool, apart),
        }
        if not is_folder:
            others = llamas(path, n_ctx, share, options)
            runs["Llama in threads"] = lambda: in_threads(
                pool, [own_llama(m, ids, n) for m, ids in zip(others, prompts, strict=True)]
            )
        rows = pairs.compare(
            {name: lambda run=run: width * n / run() for name, run in runs.items()},
            model=pairs.name_of(path),
            figure=f"{width} sequences, {n} tokens each",
            unit="tokens/s",
            rounds=options.rounds,
            own=list(runs)[:3],
        )
        for context in (wide, one, *own):
            context.close()
    return rows


def llamas(path: str, n_ctx: int, n_threads: int, options: argparse.Namespace) -> list[Any]:
    gpu = options.n_gpu_layers
    return [
        rivals.llama(path, n_ctx=n_ctx, n_threads=n_threads, n_gpu_layers=gpu)
        for _ in range(options.sequences)
    ]


def main() -> None:
    parser = pairs.parser(__doc__, rounds=3)
    parser.add_argument("models", nargs="+", help="GGUF files and OpenVINO folders")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    rows = [row for path in options.models for row in measure(path, options)]
    pairs.finish("parallel", rows, options)


if __name__ == "__main__":
    main()
