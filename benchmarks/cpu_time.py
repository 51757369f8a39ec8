"""The CPU time of prefill and decode, with one thread, for machines that others use as well.

What a clock on the wall shows there is mostly the others. CPU seconds of the process are what the
work itself takes; two contenders that do the same take the same. A decode is a turn of many tokens
less a turn of one. As they come: infercore's defaults, and the other's; and told to be accurate.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import TYPE_CHECKING

import pairs
import rivals

import infercore as ic
from infercore.measuring import parts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    Turn = Callable[[Sequence[int], int], object]
    """Evaluates a prompt from nothing, and decodes that many tokens."""


def of_context(context: ic.Context, sampler: ic.Sampler) -> Turn:
    def turn(ids: Sequence[int], n: int) -> None:
        parts.decode_s(context, sampler, ids, n - 1)

    return turn


def of_llama(model: object) -> Turn:
    def turn(ids: Sequence[int], n: int) -> None:
        model.reset()
        list(itertools.islice(model.generate(ids, temp=0.0), n))

    return turn


def cpu_s(turn: Turn, ids: Sequence[int], n: int) -> float:
    begun = time.process_time()
    turn(ids, n)
    return time.process_time() - begun


def contenders(
    model: ic.Model, path: str, n_ctx: int, sampler: ic.Sampler
) -> dict[str, tuple[str, dict[str, Turn]]]:
    """Pairs of contenders that do the same, by what they are told."""

    def own(**fields: str) -> Turn:
        return of_context(model.new_context(n_ctx=n_ctx, n_threads=1, **fields), sampler)

    if not os.path.isdir(path):
        llama = rivals.llama(path, n_ctx=n_ctx, n_threads=1)
        return {"": {"infercore": own(), "Llama.generate": of_llama(llama)}}
    pipes = {kv: rivals.pipeline(path, n_threads=1, kv=kv) for kv in (None, "f16")}

    def other(kv: str | None) -> Turn:
        return lambda ids, n: rivals.pipeline_run(pipes[kv], ids, n)

    return {
        "": {"infercore": own(), "LLMPipeline as it comes": other(None)},
        ", accurate": {"infercore": own(precision="accurate"), "LLMPipeline": other("f16")},
    }


def measure(path: str, options: argparse.Namespace) -> list[pairs.Row]:
    backend = "openvino" if os.path.isdir(path) else "llamacpp"
    rows = []
    with ic.load_model(path, backend=backend) as model:
        n_ctx = options.prefill + options.tokens + 64
        sampler = model.new_sampler(temperature=0)
        starts = itertools.count()
        for told, turns in contenders(model, path, n_ctx, sampler).items():

            def run(turn: Turn) -> tuple[float, float]:
                ids = parts.ids_of(model.tokenizer, options.prefill, next(starts))
                other = parts.ids_of(model.tokenizer, options.prefill, next(starts))
                first = cpu_s(turn, ids, 1)
                return first, cpu_s(turn, other, 1 + options.tokens) - first

            found = {name: [] for name in turns}
            for i in range(1 + options.rounds):
                for name, turn in turns.items():
                    took = run(turn)
                    if i:
                        found[name].append(took)
            for part, what in enumerate(("prefill", "decode")):
                values = {name: [t[part] * 1e3 for t in took] for name, took in found.items()}
                n = (options.prefill, options.tokens)[part]
                figure = f"{what} of {n}{told}"
                rows += pairs.rows_of(
                    values, model=pairs.name_of(path), figure=figure, unit="ms of CPU"
                )
    return rows


def main() -> None:
    parser = pairs.parser(__doc__, rounds=5)
    parser.add_argument("models", nargs="+", help="GGUF files and OpenVINO folders")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--prefill", type=int, default=96)
    options = parser.parse_args()
    rows = [row for path in options.models for row in measure(path, options)]
    pairs.finish("cpu_time", rows, options)


if __name__ == "__main__":
    main()
