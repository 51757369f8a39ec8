"""From verdicts to a number, with its interval of confidence and the list of survivors."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from mutation.running import CRASHED, KILLED, LEFT_OUT, NEVER_RUN, SURVIVED, TIMED_OUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mutation.operators import Mutant
    from mutation.running import Verdict

EQUIVALENTS = Path(__file__).parent / "equivalent.json"
ELSEWHERE = Path(__file__).parent / "elsewhere.json"
MAX_EQUIVALENT = 0.1
"""The share of the mutants tried that may be called equivalent."""


def sampled(mutants: Sequence[Mutant], n: int | None, seed: int) -> list[Mutant]:
    """Return ``n`` mutants drawn evenly over operators, and over files within each.

    All of them, in the order in which they would be drawn, for None.
    """
    rng = random.Random(seed)
    by_operator: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for mutant in mutants:
        by_operator[mutant.operator][mutant.file].append(mutant)
    queues = [_over_files(by_operator[name], rng) for name in sorted(by_operator)]
    drawn: list[Mutant] = []
    while any(queues):
        drawn += [queue.pop(0) for queue in queues if queue]
    return drawn if n is None else drawn[:n]


def _over_files(by_file: dict[str, list[Mutant]], rng: random.Random) -> list[Mutant]:
    files = sorted(by_file)
    rng.shuffle(files)
    for file in files:
        rng.shuffle(by_file[file])
    deepest = max(len(found) for found in by_file.values())
    return [by_file[file][i] for i in range(deepest) for file in files if i < len(by_file[file])]


def wilson(n_hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Return the bounds of Wilson's score interval for a share, 95 % by default.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference
    (1927).
    """
    if not n:
        return 0.0, 1.0
    share = n_hits / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


@attrs.frozen(kw_only=True)
class Equivalent:
    """A mutant that no public call can show: where it is, what it changes, and why it is so."""

    subject: str
    file: str
    function: str
    operator: str
    before: str
    after: str
    reason: str

    def is_meant(self, subject: str, mutant: Mutant) -> bool:
        """Whether it speaks of ``mutant``."""
        mine = (self.subject, self.file, self.function, self.operator, self.before, self.after)
        return mine == (
            subject, mutant.file, mutant.function, mutant.operator, mutant.before, mutant.after,
        )  # fmt: skip


def equivalents() -> tuple[Equivalent, ...]:
    """Return what is called equivalent."""
    return tuple(Equivalent(**row) for row in json.loads(EQUIVALENTS.read_text(encoding="utf-8")))


@attrs.frozen(kw_only=True)
class Elsewhere:
    """Lines that run on other machines alone: of these functions, or of the whole file.

    Of a whole file they may also run here and show nothing. The function "" stands for what a
    module does when it is imported.
    """

    subject: str
    file: str
    needs: str
    functions: tuple[str, ...] = attrs.field(default=(), converter=tuple)

    def is_meant(self, subject: str, verdict: Verdict) -> bool:
        """Whether it speaks of the line, and no law runs that here, or sees what it does."""
        mutant = verdict.mutant
        return (
            (verdict.reason == NEVER_RUN or not self.functions or not mutant.function)
            and (self.subject, self.file) == (subject, mutant.file)
            and (not self.functions or mutant.function in self.functions)
        )


def elsewhere() -> tuple[Elsewhere, ...]:
    """Return what cannot run on the machine that measures."""
    return tuple(Elsewhere(**row) for row in json.loads(ELSEWHERE.read_text(encoding="utf-8")))


@attrs.frozen(kw_only=True)
class Score:
    """What was tried, and what the suite let pass. ``found`` is of mutants that load a model."""

    subject: str
    seed: int
    n_mutants: int
    verdicts: tuple[Verdict, ...]

    @property
    def tried(self) -> list[Verdict]:
        """Those that count: not those that fail at import or in the first load."""
        return [verdict for verdict in self.verdicts if verdict.outcome != LEFT_OUT]

    @property
    def counts(self) -> Counter[str]:
        """How many ended in each way."""
        return Counter(verdict.outcome for verdict in self.verdicts)

    @property
    def survivors(self) -> list[Verdict]:
        """Those that passed every law, are not called equivalent, and could run here."""
        apart = elsewhere()
        return [
            verdict
            for verdict in self._passed
            if not any(entry.is_meant(self.subject, verdict) for entry in apart)
        ]

    @property
    def _passed(self) -> list[Verdict]:
        """Those that passed every law and are not called equivalent."""
        known = equivalents()
        return [
            verdict
            for verdict in self.tried
            if not verdict.detected
            and not any(entry.is_meant(self.subject, verdict.mutant) for entry in known)
        ]

    @property
    def n_equivalent(self) -> int:
        """How many survivors are called equivalent."""
        return sum(not verdict.detected for verdict in self.tried) - len(self._passed)

    @property
    def n_elsewhere(self) -> int:
        """How many more survived because their lines run on other machines alone."""
        return len(self._passed) - len(self.survivors)

    @property
    def problems(self) -> list[str]:
        """What is wrong with the count itself: too many equivalents, or one that is killed."""
        found = []
        if self.n_equivalent > MAX_EQUIVALENT * len(self.tried):
            found.append(f"{self.n_equivalent} of {len(self.tried)} are called equivalent")
        known = equivalents()
        for verdict in self.tried:
            meant = any(entry.is_meant(self.subject, verdict.mutant) for entry in known)
            if verdict.detected and meant:
                found.append(
                    f"called equivalent, but {verdict.law} sees it: {verdict.mutant.label}"
                )
        return found

    def share(self, *, adjusted: bool, own: bool = False) -> tuple[int, int]:
        """Return how many were detected, of how many; ``own``: by laws of their own group."""
        n = len(self.tried) - (self.n_equivalent + self.n_elsewhere if adjusted else 0)
        return sum(verdict.detected and (verdict.own or not own) for verdict in self.tried), n

    def lines(self) -> list[str]:
        """Return the scores as text."""
        counts = self.counts
        told = [
            f"{self.subject}: {len(self.verdicts)} of {self.n_mutants} mutants, seed {self.seed}: "
            + ", ".join(f"{counts[kind]} {kind}" for kind in _KINDS if counts[kind])
            + f"; {self.n_equivalent} of the survivors are called equivalent, "
            + f"{self.n_elsewhere} more need a machine that is not here"
        ]
        n_untried = sum(verdict.n_untried > 0 for verdict in self.survivors)
        if n_untried:
            told.append(f"  a lower bound: {n_untried} survivors were not tried with every law")
        seen, of = self.share(adjusted=True)
        by_own, _ = self.share(adjusted=True, own=True)
        for name, hits, n in (
            ("raw", *self.share(adjusted=False)),
            ("without equivalents", seen, of + self.n_elsewhere),
            ("adjusted", seen, of),
            ("adjusted, by laws of their own group", by_own, of),
        ):
            low, high = wilson(hits, n)
            told.append(
                f"  {name}: {hits}/{n} = {_percent(hits, n)} (95 %: {low:.1%} to {high:.1%})"
            )
        return told + [f"  problem: {problem}" for problem in self.problems]

    def by(self, name: str) -> list[str]:
        """Return the raw score of each file or operator."""
        groups: dict[str, list[Verdict]] = defaultdict(list)
        for verdict in self.tried:
            groups[getattr(verdict.mutant, name)].append(verdict)
        return [
            f"  {key}: {sum(v.detected for v in found)}/{len(found)}"
            for key, found in sorted(groups.items())
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        hits, n = self.share(adjusted=True)
        raw_hits, raw_n = self.share(adjusted=False)
        own_hits, _ = self.share(adjusted=True, own=True)
        return {
            "subject": self.subject,
            "seed": self.seed,
            "n_mutants": self.n_mutants,
            "counts": dict(self.counts),
            "raw": [raw_hits, raw_n, *wilson(raw_hits, raw_n)],
            "adjusted": [hits, n, *wilson(hits, n)],
            "own_group": [own_hits, n, *wilson(own_hits, n)],
            "n_equivalent": self.n_equivalent,
            "n_elsewhere": self.n_elsewhere,
            "verdicts": [attrs.asdict(verdict) for verdict in self.verdicts],
        }


_KINDS = (KILLED, CRASHED, TIMED_OUT, SURVIVED, LEFT_OUT)


def _percent(hits: int, n: int) -> str:
    return f"{hits / n:.1%}" if n else "nothing tried"
