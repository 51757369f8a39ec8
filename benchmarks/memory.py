"""Memory that a model and a context really take, in processes of their own, beside the plan.

The engine is imported and has run a tiny model before the count begins. After 600 tokens: what
is resident then, files that are mapped included. infercore's own figure stands beside
`plan_memory`, which answered before anything was loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pairs
import rivals

import infercore as ic
from infercore.measuring import machine, parts

if TYPE_CHECKING:
    import argparse

MIB = 2**20
N_TOUCHED = 600
CONTENDERS = {False: ("infercore", "Llama"), True: ("infercore", "LLMPipeline, alike")}


def taken(by: str, path: str, small: str, options: argparse.Namespace) -> int:
    """Return the bytes that a process of its own took for ``path``."""
    told = {"by": by, "n_ctx": options.n_ctx, "threads": options.threads}
    told["n_gpu_layers"] = 0 if os.path.isdir(path) else options.n_gpu_layers
    command = [sys.executable, __file__, "--child", json.dumps(told), path, small]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    return int(done.stdout.splitlines()[-1])


def child(path: str, small: str, *, n_ctx: int, **how: Any) -> None:
    """Print the bytes that a contender takes for the model at ``path``."""
    kept = [run(small, 8, n_ctx=64, **how)]
    before = machine.resident_bytes()
    kept.append(run(path, N_TOUCHED, n_ctx=n_ctx, **how))
    print(machine.resident_bytes() - before)
    os._exit(0)  # closing takes time and tells nothing here


def run(path: str, n: int, *, by: str, n_ctx: int, threads: int, n_gpu_layers: int) -> Any:
    """Evaluate ``n`` tokens, and return what holds the memory."""
    if by == "Llama":
        rival = rivals.llama(path, n_ctx=n_ctx, n_threads=threads, n_gpu_layers=n_gpu_layers)
        rival.eval([5 + i % 90 for i in range(n)])
        return rival
    if by.startswith("LLMPipeline"):
        pipe = rivals.pipeline(path, n_threads=threads)
        rivals.pipeline_run(pipe, [5 + i % 90 for i in range(n)], 1)
        return pipe
    model = ic.load_model(path, n_gpu_layers=n_gpu_layers)
    context = model.new_context(n_ctx=n_ctx, n_threads=threads)
    context.decode(parts.ids_of(model.tokenizer, n))
    return model, context


def measure(path: str, small: str, options: argparse.Namespace) -> list[pairs.Row]:
    name, figure = pairs.name_of(path), f"resident, n_ctx {options.n_ctx}"
    gpu = {} if os.path.isdir(path) else {"n_gpu_layers": options.n_gpu_layers}
    plan = ic.plan_memory(path, n_ctx=options.n_ctx, n_threads=options.threads, **gpu)
    planned = {"weights": plan.weights_bytes, "KV": plan.kv_bytes, "compute": plan.compute_bytes}
    note = ", ".join(f"{part} {size / MIB:.0f}" for part, size in planned.items())
    values = {"plan_memory": [plan.total_bytes / MIB] * options.rounds}
    for by in CONTENDERS[os.path.isdir(path)]:
        values[by] = [taken(by, path, small, options) / MIB for _ in range(options.rounds)]
    return pairs.rows_of(values, model=name, figure=figure, unit="MiB", notes={"plan_memory": note})


def main() -> None:
    parser = pairs.parser(__doc__, rounds=1)
    parser.add_argument("models", nargs="+", help="GGUF files and OpenVINO folders")
    parser.add_argument("--n-ctx", type=int, default=4096)
    parser.add_argument("--child", type=json.loads, help="not for people")
    options = parser.parse_args()
    if options.child is not None:
        child(*options.models, **options.child)
    import infercore_models  # noqa: PLC0415  (the tiny models)

    rows = []
    for path in options.models:
        kind = "openvino" if os.path.isdir(path) else "gguf-f32"
        small = str(infercore_models.path("storyteller", kind))
        rows += measure(path, small, options)
    pairs.finish("memory", rows, options)


if __name__ == "__main__":
    main()
