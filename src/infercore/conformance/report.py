"""What a run of the suite found."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import attrs

from infercore.conformance.standing import SUITE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infercore.conformance.standing import Standing

OK, REFUSED, KNOWN, FAIL, NOT_APPLICABLE = "ok", "refused", "known", "FAIL", "n/a"
OUTCOMES = (OK, REFUSED, KNOWN, FAIL, NOT_APPLICABLE)


@attrs.frozen(kw_only=True)
class Result:
    """The outcome of one law on one backend.

    "ok": kept; "refused": not declared, and rightly refused; "known": broken, and known to be,
    for ``reason``; "FAIL": broken, or known to be and kept; "n/a": cannot be tried here.
    ``newer`` tells that the law came after the suite version that the rig pins: a failure then
    is reported and does not count. ``cause`` is the plugin's own exception, with its type, text,
    file, line and function; ``drawn`` has the tokens and contexts that a failing law was made of.
    """

    id: str
    group: str
    tier: str
    text: str
    outcome: str
    reason: str | None = None
    newer: bool = False
    elapsed_ms: float = 0.0
    cause: str | None = None
    drawn: tuple[str, ...] = ()

    @property
    def counts_as_failure(self) -> bool:
        """Whether it makes the run fail."""
        return self.outcome == FAIL and not self.newer


@attrs.frozen(kw_only=True)
class Report:
    """All results of a run, with what they were found on.

    ``versions`` holds those of infercore, the suite, the backend's engine and Python; ``model``
    its architecture and digest; ``standing`` says what the results rest on.
    """

    backend: str
    seed: int
    versions: Mapping[str, str]
    model: Mapping[str, str]
    capabilities: Mapping[str, Any]
    results: tuple[Result, ...]
    elapsed_s: float = 0.0
    standing: Standing | None = None

    @property
    def counts(self) -> dict[str, int]:
        """How many laws had each outcome."""
        counted = Counter(result.outcome for result in self.results)
        return {outcome: counted[outcome] for outcome in OUTCOMES}

    @property
    def failures(self) -> tuple[Result, ...]:
        """The results that make the run fail."""
        return tuple(result for result in self.results if result.counts_as_failure)

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the run as a whole.

        It tried nothing, was refused everything, lacks what was required, or compares logits with
        a tolerance that hides mistakes.
        """
        rests_on = () if self.standing is None else self.standing.problems
        return (*self._nothing(), *rests_on, *self._not_whole())

    def _nothing(self) -> tuple[str, ...]:
        counts = self.counts
        if not self.results:
            return ("no law was selected",)
        if counts[REFUSED] == len(self.results):
            return ("every law was refused",)
        if not (counts[OK] or counts[KNOWN] or counts[FAIL]):
            return ("no law was run",)
        return ()

    def _not_whole(self) -> tuple[str, ...]:
        if self.standing is None or SUITE not in self.standing.required:
            return ()
        found = []
        if self.n_left:
            found.append(f"the whole suite is required, and {self.n_left} laws were not run")
        if self.newer_failures:
            found.append("the whole suite is required, and newer laws fail")
        return tuple(found)

    @property
    def n_left(self) -> int:
        """How many laws of the suite were not selected."""
        return 0 if self.standing is None else self.standing.n_laws - len(self.results)

    @property
    def newer_failures(self) -> tuple[Result, ...]:
        """Laws that are broken and do not count: they came after the version that is pinned."""
        return tuple(r for r in self.results if r.outcome == FAIL and r.newer)

    @property
    def passed(self) -> bool:
        """Whether no law fails and something was tried."""
        return not self.failures and not self.problems

    def outcome(self, identifier: str) -> str | None:
        """Return the outcome of a law, None where it was not selected."""
        return next((r.outcome for r in self.results if r.id == identifier), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {
            "backend": self.backend,
            "passed": self.passed,
            "problems": list(self.problems),
            "counts": self.counts,
            "seed": self.seed,
            "versions": dict(self.versions),
            "model": dict(self.model),
            "capabilities": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in self.capabilities.items()
            },
            "standing": None if self.standing is None else attrs.asdict(self.standing),
            "n_left": self.n_left,
            "newer_failures": [result.id for result in self.newer_failures],
            "elapsed_s": round(self.elapsed_s, 3),
            "results": [attrs.asdict(result) for result in self.results],
        }
