"""What `ModelConfig.check_in_child` costs: a first load of a file and a later one, beside none.

Each first load is made in a fresh process with an empty record of files, as are the loads without
the check. "to a token" goes on to a context and one evaluated token: engines that read late, as
OpenVINO does, have most of their work there. Later loads are those of one process, in turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pairs

from infercore.measuring.stats import in_turns

PROBE = """
import json, sys, time
import infercore as ic
path, check, later = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])

def load(check):
    begun = time.perf_counter()
    model = ic.load_model(path, check_in_child=check)
    return model, (time.perf_counter() - begun) * 1e3

begun = time.perf_counter()
model, first = load(check)
with model, model.new_context(n_ctx=64) as context:
    context.decode([model.tokenizer.n_vocab // 2])
found = {"load": first, "to a token": (time.perf_counter() - begun) * 1e3, "later": []}
for _ in range(later):
    pair = []
    for each in (None, False):
        model, ms = load(each)
        model.close()
        pair.append(ms)
    found["later"].append(pair)
print(json.dumps(found))
"""
WITH, WITHOUT = "with the check", "without"


def run(path: str, cache: str, *, check: bool | None, later: int = 0) -> dict[str, object]:
    """Return what a fresh process measured."""
    command = [sys.executable, "-c", PROBE, path, json.dumps(check), str(later)]
    environment = {**os.environ, "INFERCORE_CACHE_DIR": cache}
    done = subprocess.run(  # noqa: S603
        command, env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows_of(path: str, rounds: int) -> list[pairs.Row]:
    """Measure one model; return its rows."""
    with tempfile.TemporaryDirectory() as cache:
        run(path, cache, check=None)  # what is known of the machine is not of this file
        tried = Path(cache) / "tried.json"

        def first(*, check: bool | None) -> dict[str, object]:
            tried.unlink(missing_ok=True)
            return run(path, cache, check=check)

        found = in_turns(
            {WITH: lambda: first(check=None), WITHOUT: lambda: first(check=False)}, rounds
        )
        later = run(path, cache, check=None, later=rounds)["later"]
    model = os.path.basename(path)
    rows = []
    for figure in ("load", "to a token"):
        values = {name: [float(each[figure]) for each in found[name]] for name in found}
        rows += pairs.rows_of(values, model=model, figure=f"first, {figure}", unit="ms")
    pairs_of = {name: [float(each[i]) for each in later] for i, name in enumerate((WITH, WITHOUT))}
    rows += pairs.rows_of(pairs_of, model=model, figure="later load", unit="ms")
    return rows


def main() -> None:
    options = pairs.parser(__doc__, rounds=5, engine=False)
    options.add_argument("models", nargs="+", metavar="MODEL")
    given = options.parse_args()
    rows = [row for path in given.models for row in rows_of(path, given.rounds)]
    pairs.finish("load_cost", rows, given)


if __name__ == "__main__":
    main()
