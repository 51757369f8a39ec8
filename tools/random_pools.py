"""Run random pools against single sessions: python tools/random_pools.py --cases 500.

Prints the cases, how many texts needed the near-tie clause, and how often sessions were preempted
or moved out. A text that differs otherwise, or never ends, is printed with its seed; then the
command ends with an error.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import infercore as ic
import infercore_models
from infercore.testing import load_reference_model

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "session")]

import pool_cases  # noqa: E402

FORMATS = {"llamacpp": "gguf-f32", "openvino": "openvino"}


def checked(model: Any, seed: int, **options: Any) -> Counter[str]:
    """Return what a case counted; print what was wrong with it."""
    try:
        return pool_cases.check(model, seed, **options)
    except pool_cases.StuckError:
        raise
    except AssertionError as error:
        print(error, flush=True)
        return Counter(cases=1, wrong=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--backend", default="reference", choices=["reference", *FORMATS])
    parser.add_argument("--name", default="storyteller", help="a model of the pack")
    parser.add_argument("--invariant", action="store_true", help="with batch_invariant=True")
    parser.add_argument(
        "--apart", action="store_true", help="cells of its own for each that runs, as a server has"
    )
    options = parser.parse_args()
    fields: dict[str, Any] = {}
    if options.backend == "reference":
        model = load_reference_model()
    else:
        form = FORMATS[options.backend]
        model = ic.load_model(infercore_models.path(options.name, form))
        fields = {"n_threads": 1, "n_threads_batch": 1}
    total: Counter[str] = Counter()
    with model:
        for seed in range(options.first, options.first + options.cases):
            kind = {"invariant": options.invariant, "apart": options.apart}
            total += checked(model, seed, **kind, **fields)
    share = total["near_ties"] / max(1, total["texts"])
    print(dict(total), f"near ties: {share:.2%} of texts")
    if total["wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
