"""Runs the test of each row of the coverage pages, and fails where one shows nothing.

    python tools/run_rows.py [--only TEXT]

Prints each row with how its test ended on each engine. A row without a test that passed is an
error: no row says yes without an assertion.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("seed-coverage.md", "peer-coverage.md")
ROW = re.compile(r"^\| (?P<there>.+?) \|.*`(?P<test>tests/[\w/]+\.py::test_\w+)` \|$")


def rows() -> list[tuple[str, str]]:
    """What each row speaks of, and its test; rows that name a law are the suite's to run."""
    found = []
    for page in PAGES:
        text = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
        matches = filter(None, map(ROW.match, text.splitlines()))
        found += [(match["there"], match["test"]) for match in matches]
    return found


def outcomes(tests: list[str]) -> dict[str, Counter[str]]:
    """How the cases of each test ended, by its id; one run of pytest for all."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly"]
        subprocess.run([*command, f"--junitxml={report}", *tests], cwd=ROOT, check=False)
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for case in ET.parse(report).iter("testcase"):  # noqa: S314  (our own report)
            path = case.attrib["classname"].replace(".", "/") + ".py"
            name = case.attrib["name"].split("[")[0]
            kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
            found[f"{path}::{name}"][next(iter(kinds), "passed")] += 1
    return found


def main() -> int:
    """Run, print, and return 1 where a row shows nothing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only rows that hold this text")
    only = parser.parse_args().only
    wanted = [row for row in rows() if only in " ".join(row)]
    found = outcomes(sorted({test for _, test in wanted}))
    empty = 0
    for there, test in wanted:
        ended = found.get(test, Counter())
        holds = ended["passed"] > 0 and not ended["failure"] + ended["error"]
        empty += not holds
        print("ok  " if holds else "FAIL", there, "|", test, dict(ended))
    print(f"{len(wanted) - empty} of {len(wanted)} rows are shown")
    return int(bool(empty))


if __name__ == "__main__":
    raise SystemExit(main())
