"""Run random pools against single sessions: python tools/random_pools.py --cases 500.

Prints the cases, how many texts needed the near-tie clause, and how often sessions were preempted
or moved out; ends with an error at the first text that differs otherwise, or that never ends.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import infercore as ic
import infercore_models
from infercore.testing import Faults, load_reference_model

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "session")]

import pool_cases  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--backend", default="reference")
    options = parser.parse_args()
    fields: dict[str, Any] = {}
    faults = None
    if options.backend == "reference":
        faults = Faults()
        model = load_reference_model(faults=faults)
    else:
        form = {"llamacpp": "gguf-f32", "openvino": "openvino"}[options.backend]
        model = ic.load_model(infercore_models.path("storyteller", form))
        fields = {"n_threads": 1, "n_threads_batch": 1}
    total: Counter[str] = Counter()
    with model:
        for seed in range(options.first, options.first + options.cases):
            total += pool_cases.check(model, seed, faults, **fields)
    print(dict(total))


if __name__ == "__main__":
    main()
