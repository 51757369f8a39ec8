"""Kill an isolated engine again and again: python tools/random_kills.py --n 1000 --seed 0.

Prints the kills by what ended the process and what it did then, how many texts needed the near-tie
clause, and what is left of processes, threads and open files. A text that differs otherwise, or
never ends, is printed with its seed; then the command ends with an error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

import infercore as ic
import infercore_models

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "session")]

import kill_cases  # noqa: E402

FORMATS = {"llamacpp": "gguf-f32", "openvino": "openvino"}
_EVERY = 100
_MOST_A_CASE = 8
_SETTLE_SECONDS = 10.0


def checked(pool: Any, model: Any, seed: int, n_kills: int, fields: dict[str, Any]) -> Counter[str]:
    """Return what a case counted; print what was wrong with it."""
    try:
        return kill_cases.check(pool, model, seed, n_kills=n_kills, **fields)
    except AssertionError as error:
        print(error, flush=True)
        return Counter(cases=1, wrong=1, kills=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=100, help="kills")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--backend", default="llamacpp", choices=FORMATS)
    parser.add_argument("--memory", action="store_true", help="let some workers lack memory first")
    options = parser.parse_args()
    if options.memory:
        kill_cases.WAYS["memory"] = 10
    path = infercore_models.path("storyteller", FORMATS[options.backend])
    fields = {"n_threads": 1, "n_threads_batch": 1}
    me = psutil.Process()
    total: Counter[str] = Counter()
    started, seed = time.monotonic(), options.seed
    with ic.load_model(path, backend=options.backend) as model:
        with ic.open_pool(
            path,
            backend=options.backend,
            isolate=True,
            **kill_cases.POOL,
            **kill_cases.LIMITS,
            **fields,
        ) as pool:
            model.new_context(n_ctx=64, **fields).close()  # OpenVINO's first starts two threads
            n_files, n_threads, n_told = me.num_fds(), me.num_threads(), 0
            while total["kills"] < options.n:
                n_kills = min(_MOST_A_CASE, options.n - total["kills"])
                total += checked(pool, model, seed, n_kills, fields)
                seed += 1
                if total["kills"] // _EVERY > n_told:
                    n_told = total["kills"] // _EVERY
                    print(f"{total['kills']} kills, {total['texts']} texts", flush=True)
            until = time.monotonic() + _SETTLE_SECONDS  # threads that have ended may be there yet
            while me.num_threads() > n_threads and time.monotonic() < until:
                time.sleep(0.1)
            more = me.num_fds() - n_files, me.num_threads() - n_threads
            n_restarts = pool.stats().n_restarts
        left = [child.cmdline()[:3] for child in me.children(recursive=True)]
    share = total["near_ties"] / max(1, total["texts"])
    seconds = time.monotonic() - started
    print(
        f"{options.backend}: {total['kills']} kills, {n_restarts} restarts, {seed - options.seed} "
        f"cases, {total['texts']} texts, {total['wrong']} wrong, near ties {share:.2%}, "
        f"{total['told of no memory']} told of no memory, {seconds:.0f} s"
    )
    print({how: n for how, n in sorted(total.items()) if " in " in how})
    print(f"left: {more[0]} files and {more[1]} threads more, processes {left}")
    if total["wrong"] or left:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
