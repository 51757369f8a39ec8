"""Reports as text: a matrix of laws by backend, and the documentation's page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from infercore.conformance.law import GROUPS
from infercore.conformance.report import FAIL, KNOWN, NOT_APPLICABLE, OUTCOMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from infercore.conformance.report import Report, Result

_EXPLAINED = (FAIL, KNOWN, NOT_APPLICABLE)
INTRODUCTION = """\
# Conformance

What each backend of this project was found to keep of the contract, law by law. This page is
written by the suite itself:

<!-- not run: it takes minutes, and has environments of its own in tox.ini -->
```bash
infercore conformance {names} --markdown docs/conformance.md
```

**ok**: declared or required, and kept. **refused**: not declared; the smallest such call raised
`UnsupportedFeatureError`, changed nothing, and the context went on working. **known**: broken, for
the reason given below; it fails the run once it is kept. **FAIL**: broken. **n/a**: cannot be tried
here, for the reason given below. How to run the suite on a backend of your own:
[Write a backend](tutorial/write-a-backend.md).
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
    """Return one line: how many laws had each outcome."""
    counts = ", ".join(f"{n} {outcome}" for outcome, n in report.counts.items() if n)
    verdict = "passed" if report.passed else "; ".join(report.problems) or "failed"
    return f"{report.backend}: {verdict} ({counts or 'nothing run'})"


def notes(report: Report) -> list[str]:
    """Return a line for each law that fails, is known to, or could not be tried."""
    return [
        f"{result.id} {result.outcome}{' (newer than the pinned suite)' if result.newer else ''}"
        f": {result.reason}"
        for result in report.results
        if result.outcome in _EXPLAINED
    ]


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
    table.append(["seed", *(str(report.seed) for report in reports)])
    return "\n".join(f"| {' | '.join(row)} |" for row in table) + "\n"


def _escaped(line: str) -> str:
    return " ".join(line.replace("|", "\\|").replace("<", "&lt;").split())
