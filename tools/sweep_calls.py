"""Makes every public call with a value of every odd type in each of its arguments, by engine.

    python tools/sweep_calls.py [BACKEND...] [--every N] [--first I] [--cases N] [--only I]

Prints for each backend how many calls were made and what came of them; the findings are those of
``tools/fuzz.py``, and so is the exit status. ``--every N`` makes each N-th call alone.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

import fuzz

from fuzzing import calls

if TYPE_CHECKING:
    from collections.abc import Callable


def main(arguments: list[str] | None = None) -> int:
    """Sweep the backends asked for, print a table; return 1 where something got through."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("backends", nargs="*", choices=[*calls.ENGINES, []], metavar="BACKEND")
    parser.add_argument("--every", type=int, default=1, help="make each N-th call (1)")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, help="of each backend (all)")
    parser.add_argument("--only", type=int, help="make one call, with its traceback")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    backends = given.backends or list(calls.ENGINES)
    run = partial(cases_of, backends[0], given.every)
    if given.only is not None:
        print(run()(given.only))
        return 0
    if given.child:
        fuzz.tell_cases(run, given.first, given.first + given.cases)
        return 0
    reports = []
    for backend in backends:
        again = f"python tools/sweep_calls.py {backend} --every {given.every}"
        command = [sys.executable, __file__, backend, f"--every={given.every}"]
        n_cases = -(-len(calls.sweep(calls.Calls().world(backend))) // given.every)
        last = min(n_cases, given.first + (given.cases or n_cases))
        numbers = range(given.first, last)
        report = fuzz.run_cases(command, again, numbers, calls.LIMIT_S, calls.BATCH * 20)
        reports.append({"target": backend, **report})
    fuzz.print_table(reports)
    return int(any(report["findings"] for report in reports))


def cases_of(backend: str, every: int) -> Callable[[int], str]:
    """Return what makes a call of the sweep."""
    world = calls.Calls().world(backend)
    plan = calls.sweep(world)[::every]
    return lambda number: calls.swept(world, plan[number])


if __name__ == "__main__":
    sys.exit(main())
