"""Reports as text: a matrix of laws by backend, and the documentation's page."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from infercore.conformance.law import GROUPS, HINTS
from infercore.conformance.report import FAIL, KNOWN, NOT_APPLICABLE, OUTCOMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from infercore.conformance.report import Report, Result

_EXPLAINED = (FAIL, KNOWN, NOT_APPLICABLE)
_MENDED_FIRST = ("LIFE", "TOK", "DEC", "KV", "STATE")
_RAISED = re.compile(r"(?P<type>\w+): .*(?P<place> \(.+, line \d+, in \S+\))", re.DOTALL)
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?(e[-+]?\d+)?|\[[^\]]*\]")
INTRODUCTION = """\
# Conformance

Which rules ("laws") of the contract each backend of this project keeps. The suite writes this
page itself:

<!-- not run: it takes minutes, and has environments of its own in tox.ini -->
```bash
infercore conformance {names} --markdown docs/conformance.md
```

**ok**: declared or required, and it holds. **refused**: not declared; the smallest such call
raised `UnsupportedFeatureError`, changed nothing, and the context kept working. **known**:
broken, for the reason given below; the run fails once it holds. **FAIL**: broken. **n/a**: cannot
be tested here, for the reason given below. To run the suite on your own backend, see [Write a
backend](tutorial/write-a-backend.md). For how many mistakes the laws detect, see [What the laws
see](reference/bite.md).
"""


def matrix(reports: Sequence[Report]) -> str:
    """Return laws by backend as a Markdown table, with a line of counts at the end."""
    head = ("law", "what it says", *(report.backend for report in reports))
    table: list[Sequence[str]] = [head, ["---" for _ in head]]
    group = None
    for result, row in zip(_laws_of(reports), rows(reports), strict=True):
        if result.group != group:
            group = result.group
            table.append((f"**{group}**", *("" for _ in head[1:])))
        table.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


def rows(reports: Sequence[Report]) -> list[tuple[str, ...]]:
    """Return a row for each law: its id, what it says, and its outcome on each backend."""
    return [
        (result.id, result.text, *(report.outcome(result.id) or "" for report in reports))
        for result in _laws_of(reports)
    ]


def json_text(reports: Sequence[Report]) -> str:
    """Return the report as JSON, or a list of them where there are several."""
    values = [report.to_dict() for report in reports]
    return json.dumps(values[0] if len(values) == 1 else values, indent=2) + "\n"


def _laws_of(reports: Iterable[Report]) -> list[Result]:
    found = {result.id: result for report in reports for result in report.results}
    groups = list(GROUPS.values())

    def place(result: Result) -> tuple[int, int]:
        return groups.index(result.group), int(result.id.split("-")[1])

    return sorted(found.values(), key=place)


def summary(report: Report) -> str:
    """Return one line: how many laws had each outcome, and what that rests on."""
    counts = ", ".join(f"{n} {outcome}" for outcome, n in report.counts.items() if n)
    verdict = "passed" if report.passed else "; ".join(report.problems) or "failed"
    line = f"{report.backend}: {verdict} ({counts or 'nothing run'})"
    if newer := report.newer_failures:
        names = ", ".join(result.id for result in newer)
        line += f"; {len(newer)} laws newer than the pinned suite FAIL: {names}"
    if report.standing is None:
        return line
    if report.n_left:
        line += f"; A PART: {report.n_left} of {report.standing.n_laws} laws were not selected"
    return f"{line}; {report.standing.told}"


def notes(report: Report) -> list[str]:
    """Return a line for each law that fails, is known to, or could not be tried."""
    return [_note(result) for result in report.results if result.outcome in _EXPLAINED]


def _note(result: Result) -> str:
    newer = " (newer than the pinned suite)" if result.newer else ""
    cause = f" [{result.cause}]" if result.cause and result.cause not in str(result.reason) else ""
    return f"{result.id} {result.outcome}{newer}: {result.reason}{cause}"


def to_mend(report: Report) -> list[str]:
    """Return the causes of failures in the order in which to mend them, one line or more each.

    What stands later may follow from what stands first: a backend must load before it can
    tokenize, tokenize before it can decode, and decode before it can remove or restore.
    """
    causes: dict[str, list[Result]] = {}
    for result in sorted(report.failures, key=_when_to_mend):
        causes.setdefault(_alike(result), []).append(result)
    if not causes:
        return []
    lines = [f"to mend, in this order; what comes later may follow from it ({len(causes)} causes):"]
    for i, results in enumerate(causes.values(), start=1):
        lines += _of_one_cause(i, results, report)
    return lines


def _when_to_mend(result: Result) -> tuple[int, int]:
    group, number = result.id.split("-")
    others = [prefix for prefix in GROUPS if prefix not in _MENDED_FIRST]
    return [*_MENDED_FIRST, *others].index(group), int(number)


def _alike(result: Result) -> str:
    """What failures of one cause have in common.

    The plugin's exception by its type and place, whatever it says; else the words, without numbers.
    """
    if result.cause and (raised := _RAISED.fullmatch(result.cause)):
        return f"{raised['type']} {raised['place']}"
    return _NUMBERS.sub("#", result.cause or str(result.reason))


def _of_one_cause(i: int, results: Sequence[Result], report: Report) -> list[str]:
    first, *others = results
    lines = [f"{i}. {first.id}: {first.text}", f"   {' '.join(str(first.reason).split())}"]
    if first.cause and first.cause not in str(first.reason):
        lines.append(f"   behind it: {first.cause}")
    if first.drawn:
        lines.append(f"   made of: {'; '.join(first.drawn)}")
    if others:
        names = ", ".join(result.id for result in others)
        lines.append(f"   the same cause in {len(others)} more: {names}")
    if first.cause is None:  # the plugin's own exception names its line
        lines.append(f"   look at: {HINTS[first.id.split('-')[0]]}")
    lines.append(
        f"   again: infercore conformance {report.backend} --only {first.id} --seed {report.seed}"
    )
    return lines


def page(reports: Sequence[Report]) -> str:
    """Return the documentation's page: facts of each run, the matrix, and the reasons."""
    names = " ".join(report.backend for report in reports)
    parts = [INTRODUCTION.format(names=names), _facts(reports), "## Laws by backend\n"]
    parts += [matrix(reports) + "\n", "## Reasons\n"]
    for report in reports:
        lines = [f"- {_escaped(line)}" for line in notes(report)] or ["- none"]
        parts.append("\n".join([f"### {report.backend}\n", *lines, ""]))
    return "\n".join(parts)


def _facts(reports: Sequence[Report]) -> str:
    head = ["", *(report.backend for report in reports)]
    table = [head, ["---" for _ in head]]
    table += [[kind, *(str(report.counts[kind]) for report in reports)] for kind in OUTCOMES]
    for facts in ("versions", "model"):
        for name in getattr(reports[0], facts):
            table.append([name, *(getattr(report, facts)[name] for report in reports)])
    table += _rests_on(reports)
    table.append(["seed", *(str(report.seed) for report in reports)])
    return "\n".join(f"| {' | '.join(row)} |" for row in table) + "\n"


def _rests_on(reports: Sequence[Report]) -> list[list[str]]:
    """The rows on tolerance, oracle and what is missing."""
    standings = [report.standing for report in reports]
    told: dict[str, list[str]] = {
        "tolerance": [f"{s.tolerance:.3g}" if s else "" for s in standings],
        "oracle": [(s.oracle or "none") if s else "" for s in standings],
        "without": [", ".join(s.missing) if s else "" for s in standings],
        "required": [", ".join(s.required) if s else "" for s in standings],
    }
    return [[name, *cells] for name, cells in told.items()]


def _escaped(line: str) -> str:
    return " ".join(line.replace("|", "\\|").replace("<", "&lt;").split())
