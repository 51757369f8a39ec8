"""Kill an isolated engine at random moments: python tools/random_kills.py --cases 500.

Prints the kills by signal, how many texts needed the near-tie clause, and what is left of processes
and open files. A text that differs otherwise, or never ends, is printed with its seed; then the
command ends with an error.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

import infercore as ic
import infercore_models

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "session")]

import kill_cases  # noqa: E402

FORMATS = {"llamacpp": "gguf-f32", "openvino": "openvino"}


def checked(pool: Any, model: Any, seed: int, fields: dict[str, Any]) -> Counter[str]:
    """Return what a case counted; print what was wrong with it."""
    try:
        return kill_cases.check(pool, model, seed, **fields)
    except AssertionError as error:
        print(error, flush=True)
        return Counter(cases=1, wrong=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--backend", default="llamacpp", choices=FORMATS)
    options = parser.parse_args()
    path = infercore_models.path("storyteller", FORMATS[options.backend])
    fields = {"n_threads": 1, "n_threads_batch": 1}
    me = psutil.Process()
    total: Counter[str] = Counter()
    with ic.load_model(path, backend=options.backend) as model:
        limits = kill_cases.LIMITS
        with ic.open_pool(
            path, backend=options.backend, isolate=True, **kill_cases.POOL, **limits, **fields
        ) as pool:
            n_files = me.num_fds()
            for seed in range(options.first, options.first + options.cases):
                total += checked(pool, model, seed, fields)
            more_files = me.num_fds() - n_files
        left = [
            child.cmdline()[:3] for child in me.children() if "isolated" in str(child.cmdline())
        ]
    share = total["near_ties"] / max(1, total["texts"])
    print(
        dict(total), f"near ties: {share:.2%} of texts;", f"{more_files} files more; left: {left}"
    )
    if total["wrong"] or left:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
