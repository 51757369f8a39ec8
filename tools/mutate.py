"""Count how many of the mistakes that a plugin's author makes the conformance suite sees.

::

    python tools/mutate.py --subject reference --sample 400 --seed 0
    python tools/mutate.py --subject llamacpp --sample 400 --json llamacpp.json

Changes one thing at a time in the code of a backend (``tools/mutation/operators.py``), and runs the
laws on it until one fails. The sample is even over operators, and over files within each. Every
mutant runs in a process of its own; one that crashes or hangs is counted apart, one that fails at
import or in the first load is left out. A line that no law runs counts as survived, and needs no
run: which law runs which lines is measured first, on the unchanged code, and a law that runs none
of a mutant's lines cannot see it. Of the others those come first that cost little, are of the
groups that speak of the changed file, and have killed in the same function, the same file or
elsewhere, in this run or in earlier ones (beside the file of ``--baseline``). Without ``--budget``
every law that runs the lines is tried before a mutant is said to survive.

A survivor that no public call can show may be called equivalent, in
``tools/mutation/equivalent.json``, with the argument for it; at most a tenth of those tried. An
entry that names what stands there no more is never used, and one that a law sees is a problem.
Lines that only another machine runs are named in ``tools/mutation/elsewhere.json``: they count as
survived in the raw score, and are left out of the adjusted one.

Why no kept mutation tester: cosmic-ray 8 changes files in place, one new interpreter (and engine)
for each mutant, and its operators drop no statements, calls or copies and swap no arguments, axes
or bounds of slices; mutmut 3 runs pytest over the project's own tests, in its own process tree,
behind trampolines in every function, which the hot path and callbacks from C do not stand. Neither
can keep the oracle unchanged while the same code is the subject, nor order laws by what they cost.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Threads of the parent would not live on in forks.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs
from mutation import operators, running, scoring, subjects

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mutation.operators import Mutant
    from mutation.running import Baseline, Runner, Verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 where the adjusted score reaches ``--goal``."""
    asked = _parser().parse_args(arguments)
    subject = subjects.SUBJECTS[asked.subject]()
    every = [mutant for file in subject.files for mutant in _of_file(subject, file)]
    i, n = map(int, asked.part.split("/"))
    rounds, drawn = len(operators.OPERATORS), scoring.sampled(every, asked.sample, asked.seed)
    chosen = [mutant for j, mutant in enumerate(drawn) if j // rounds % n == i - 1]  # even, too
    folder = Path(tempfile.mkdtemp(prefix="infercore-mutate-"))
    try:
        runner = running.Runner(subject, folder=folder, seed=asked.seed)
        baseline = runner.baseline(
            asked.only, Path(asked.baseline).absolute() if asked.baseline else None
        )
        _tell_baseline(baseline)
        score = scoring.Score(
            subject=subject.name, seed=asked.seed, n_mutants=len(every), verdicts=()
        )
        for verdict in _tried(runner, baseline, chosen, asked):
            score = attrs.evolve(score, verdicts=(*score.verdicts, verdict))
            if asked.json:  # after each, so that a run that is ended can be resumed
                Path(asked.json).write_text(json.dumps(score.to_dict(), indent=1) + "\n", "utf-8")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _tell(score)
    hits, n = score.share(adjusted=True)
    return 0 if hits >= asked.goal * n and not score.problems else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--subject", choices=tuple(subjects.SUBJECTS), required=True)
    parser.add_argument("--sample", type=int, default=None, help="how many; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="1/1", help="of the sample, for a run beside others: 1/2")
    parser.add_argument("--only", action="append", help="laws, as in infercore conformance")
    parser.add_argument("--goal", type=float, default=0.0, help="the least adjusted score")
    parser.add_argument("--minutes", type=float, default=None, help="stop after so long")
    parser.add_argument(
        "--budget", type=float, default=None, help="seconds of laws a mutant; default: all laws"
    )
    parser.add_argument("--baseline", help="keep what the unchanged subject does in this file")
    parser.add_argument("--again", help="only what survived, and is in this file of --json")
    parser.add_argument("--match", default="", help="only mutants whose label holds this text")
    parser.add_argument("--json", help="write every verdict to this file")
    parser.add_argument(
        "--resume", action="store_true", help="go on behind what the file of --json has"
    )
    return parser


def _of_file(subject: subjects.Subject, file: str) -> list[Mutant]:
    return operators.mutants(file, subject.text(subject.folder / file))


def _tell_baseline(baseline: Baseline) -> None:
    counts = Counter(baseline.outcomes.values())
    told = ", ".join(f"{n} {outcome}" for outcome, n in counts.items())
    print(f"unchanged: {told}; {sum(baseline.seconds.values()):.1f} s", flush=True)


def _tried(
    runner: Runner, baseline: Baseline, chosen: Sequence[Mutant], asked: argparse.Namespace
) -> Iterator[Verdict]:
    kills = running.Kills(Path(f"{asked.baseline}.kills") if asked.baseline else None)
    n = 0
    started = time.monotonic()
    before = _before(asked.again)
    done = _done(asked.json) if asked.resume else {}
    for mutant in chosen:
        if asked.match not in mutant.label:
            continue
        known = done.get(mutant) or before.get(mutant.label)
        if known and (mutant in done or known["outcome"] != running.SURVIVED):
            n += 1
            yield running.Verdict(mutant=mutant, **known)
            continue
        if asked.minutes is not None and time.monotonic() - started > 60 * asked.minutes:
            print(f"stopped after {asked.minutes} minutes", file=sys.stderr)
            break
        verdict = running.judged(runner, mutant, baseline, kills, budget_s=asked.budget)
        kills.add(verdict)
        n += 1
        own = " (own)" if verdict.own else ""
        print(
            f"{n:4} {verdict.elapsed_s:5.1f} s {verdict.outcome} {verdict.law}{own} | "
            f"{mutant.label} | {' '.join(verdict.reason.split())[:120]}",
            flush=True,
        )
        yield verdict


def _before(path: str | None) -> dict[str, dict[str, Any]]:
    """What an earlier run found, by the mutants' labels; a law that killed goes on killing."""
    return {mutant.label: verdict for mutant, verdict in _done(path).items()}


def _done(path: str | None) -> dict[Mutant, dict[str, Any]]:
    """What the file of an earlier run has of each mutant, where there is such a file."""
    if path is None or not Path(path).exists():
        return {}
    found = json.loads(Path(path).read_text(encoding="utf-8"))["verdicts"]
    return {_mutant(verdict.pop("mutant")): verdict for verdict in found}


def _mutant(fields: dict[str, Any]) -> Mutant:
    return operators.Mutant(**{**fields, "lines": tuple(fields["lines"])})


def _tell(score: scoring.Score) -> None:
    print("\nsurvivors:")
    for verdict in score.survivors:
        mutant = verdict.mutant
        untried = f"({verdict.n_untried} laws not tried)" if verdict.n_untried else ""
        where = mutant.function or "the module"
        print(f"  {mutant.label}  in {where}  {verdict.reason}{untried}")
    print("\nby file, raw:", *score.by("file"), sep="\n")
    print("\nby operator, raw:", *score.by("operator"), sep="\n")
    print()
    print(*score.lines(), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
