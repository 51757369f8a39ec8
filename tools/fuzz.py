"""Throws made-up input at infercore until something gets through; tells what did.

    python tools/fuzz.py [TARGET...] [--seed N] [--cases N] [--only I] [--json FILE]

A target is a module of ``tools/fuzzing``; without a name all of them run (``--list`` names them).
Case ``I`` of a target depends on ``--seed`` and ``I`` alone, so that each finding is printed with
the command that repeats it. Cases run in child processes, so that a kill or a hang is seen, counted
and followed by the next case. What counts as a finding:

kill      the process ended
hang      the case took longer than the target's limit
untyped   an exception came out that is no `InferCoreError` and that the target did not ask for, or
          one that says that a plugin or an engine failed
wrong     the case itself found something false (it raised ``Wrong``)

Ends with status 1 where there was one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))

import fuzzing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

FINDINGS = ("kill", "hang", "untyped", "wrong")
START_LIMIT_S = 120.0
_PATIENCE = 2


def main(arguments: list[str] | None = None) -> int:
    """Run the targets asked for, print a table; return 1 where something got through."""
    parser = argparse.ArgumentParser(description="throw made-up input at infercore")
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200, help="of each target (200)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (0)")
    parser.add_argument("--only", type=int, help="run one case, with its traceback")
    parser.add_argument("--json", type=Path, help="write what was found")
    parser.add_argument("--list", action="store_true", help="name the targets")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    names = given.targets or target_names()
    if unknown := set(names) - set(target_names()):
        parser.error(f"no target {sorted(unknown)}; there are {', '.join(target_names())}")
    if given.list:
        print("\n".join(names))
        return 0
    if given.only is not None:
        return run_here(names[0], given.seed, given.only)
    last = given.first + given.cases
    if given.child:
        tell_cases(lambda: cases_of(names[0], given.seed), given.first, last)
        return 0
    reports = [run_target(name, given.seed, given.first, last) for name in names]
    print_table(reports)
    if given.json:
        given.json.write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
    return int(any(report["findings"] for report in reports))


def target_names() -> list[str]:
    """Return the names of all targets."""
    folder = str(Path(__file__).parent / "fuzzing")
    return sorted(found.name for found in pkgutil.iter_modules([folder]) if found.name[0] != "_")


def open_target(name: str) -> fuzzing.Target:
    """Return the target ``name``, ready for its cases."""
    target: fuzzing.Target = importlib.import_module(f"fuzzing.{name}").open_target()
    return target


def limits(name: str) -> tuple[float, int]:
    """Return the seconds that a case of ``name`` may take, and how many cases share a child."""
    module = importlib.import_module(f"fuzzing.{name}")
    return float(module.LIMIT_S), int(module.BATCH)


def random_of(name: str, seed: int, number: int) -> Random:
    """Return the source of randomness of one case."""
    return Random(f"{name}:{seed}:{number}")


# -- in the child ------------------------------------------------------------------------------


def outcome(case: Callable[[], str | None]) -> tuple[str, str]:
    """Run one case; return what came of it, and how."""
    from infercore import InferCoreError, PluginError, SessionFatalError  # noqa: PLC0415  (the parent needs none of it)

    try:
        return "ok", case() or ""
    except fuzzing.Wrong as error:
        return "wrong", str(error)
    except (PluginError, SessionFatalError) as error:
        return "untyped", f"{error!r}\n{traceback.format_exc(limit=-4)}"
    except InferCoreError as error:
        return "typed", type(error).__name__
    except Exception as error:  # noqa: BLE001  (this is what is looked for)
        return "untyped", f"{error!r}\n{traceback.format_exc(limit=-4)}"


def cases_of(name: str, seed: int) -> Callable[[int], str | None]:
    """Open the target ``name``; return what runs a case of it."""
    target = open_target(name)
    return lambda number: target.case(random_of(name, seed, number))


def tell_cases(opened: Callable[[], Callable[[int], str | None]], first: int, last: int) -> None:
    """Run cases ``first`` to ``last - 1``; a line of JSON on each begins and ends."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what an engine prints is no line of ours

    def say(*what: Any) -> None:
        lines.write(json.dumps(what) + "\n")
        lines.flush()

    run = opened()
    for number in range(first, last):
        say("begin", number)
        say("end", number, *outcome(partial(run, number)))


def run_here(name: str, seed: int, number: int) -> int:
    """Run one case in this process; its exception comes out."""
    print(cases_of(name, seed)(number))
    return 0


# -- in the parent -----------------------------------------------------------------------------


def run_target(name: str, seed: int, first: int, last: int) -> dict[str, Any]:
    """Run the cases of one target in children; return counts and findings."""
    limit_s, batch = limits(name)
    command = [sys.executable, __file__, name, f"--seed={seed}"]
    again = f"python tools/fuzz.py {name} --seed {seed}"
    report = run_cases(command, again, range(first, last), limit_s, batch)
    return {"target": name, "seed": seed, **report}


def run_cases(
    command: Sequence[str], again: str, numbers: range, limit_s: float, batch: int
) -> dict[str, Any]:
    """Run the cases ``numbers`` of ``command`` in children; ``again`` is what repeats one."""
    counts: Counter[str] = Counter()
    findings: list[dict[str, Any]] = []
    started = time.monotonic()
    number = numbers.start
    while number < numbers.stop:
        end = min(number + batch, numbers.stop)
        for found in watched(command, number, end, limit_s):
            at, what, detail = found
            if what == "hang":  # a crowded machine is slow too, so it is tried once more, alone
                patience_s = _PATIENCE * limit_s
                at, what, detail = next(watched(command, at, at + 1, patience_s), found)
            counts[what] += 1
            number = at + 1
            if what in FINDINGS:
                findings.append({"case": at, "what": what, "detail": detail})
                show(again, findings[-1])
    return {
        "cases": len(numbers),
        "counts": dict(counts),
        "findings": findings,
        "elapsed_s": round(time.monotonic() - started, 1),
    }


def watched(
    command: Sequence[str], first: int, end: int, limit_s: float
) -> Iterator[tuple[int, str, str]]:
    """Yield (number, outcome, detail) of the cases that one child gets through."""
    given = [*command, "--child", f"--first={first}", f"--cases={end - first}"]
    child = subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    current, begun = first, False
    try:
        for line in _lines(child, limit_s):
            if line[0] == "begin":
                current, begun = line[1], True
            elif line[0] == "end":
                current = line[1] + 1
                yield line[1], line[2], line[3]
            elif line[0] == "hang":
                yield current, "hang", f"more than {limit_s:g} s"
            elif line[0] == "ended":
                code = child.wait()
                words = "\n".join([_ending(code), *line[1][-12:]])
                if not begun:
                    raise SystemExit(f"{given} cannot begin: {words}")
                if current < end:
                    yield current, "kill", words
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdout, child.stderr):
            assert pipe is not None  # noqa: S101  (both were asked for)
            pipe.close()


def _lines(child: subprocess.Popen[bytes], limit_s: float) -> Iterator[list[Any]]:
    """Yield the child's lines, then ["hang"] or ["ended", its last words]."""
    assert child.stdout is not None  # noqa: S101
    assert child.stderr is not None  # noqa: S101
    held, words = b"", b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        selector.register(child.stderr, selectors.EVENT_READ)
        patience = fuzzing.Patience(START_LIMIT_S)
        while True:
            ready = selector.select(patience.step_s())
            if not ready:
                patience.spend()
                if patience.left_s <= 0:
                    yield ["hang"]
                    return
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                if key.fileobj is child.stderr:
                    words = (words + data)[-4000:]
                    if not data:
                        selector.unregister(child.stderr)
                    continue
                if not data:
                    yield ["ended", words.decode(errors="replace").splitlines()]
                    return
                *whole, held = (held + data).split(b"\n")
                for line in whole:
                    yield json.loads(line)
                patience = fuzzing.Patience(limit_s)


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def show(again: str, finding: dict[str, Any]) -> None:
    """Print a finding, with the command that repeats it."""
    print(f"{finding['what']}: {again} --only {finding['case']}")
    print("    " + finding["detail"].strip().replace("\n", "\n    "), flush=True)


def print_table(reports: list[dict[str, Any]]) -> None:
    """Print one line a target."""
    heads = ("cases", "ok", "typed", *FINDINGS)
    print(f"{'target':<12}" + "".join(f"{head:>9}" for head in heads) + f"{'seconds':>9}")
    for report in reports:
        counts = {"cases": report["cases"], **report["counts"]}
        row = "".join(f"{counts.get(head, 0):>9}" for head in heads)
        print(f"{report['target']:<12}{row}{report['elapsed_s']:>9.1f}")
    total = sum(report["cases"] for report in reports)
    print(f"{total} cases, {sum(len(report['findings']) for report in reports)} findings")


if __name__ == "__main__":
    sys.exit(main())
