"""Runs every row of the coverage page on each engine, and writes the page from what came out.

    python tools/run_rows.py [--backend NAME]... [--only TEXT] [--check]

Without options it writes docs/reference/coverage.md; with ``--check`` it compares instead, the
columns of the engines that ran. A row that fails is an error either way.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

from rows import contexts, conversations, decoding, fields, models, sampling, session  # noqa: F401
from rows.bench import FORMATS, Bench, outcome
from rows.sections import PEERS, SEEDS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "coverage.md"
SECTIONS = (*SEEDS, *PEERS)
HEAD = """# Coverage of other APIs

What other programs' interfaces have and what their tests ask for, with its name here. Each row is
an assertion that ran on both engines: *holds*, or *refused* with the engine's reason, after which
the model was seen to compute what it did before. Written by `python tools/run_rows.py`; a test runs
it again and compares.
"""


def run(backend: str, only: str = "") -> tuple[dict[tuple[str, str], str], int]:
    """Return how each row ends on ``backend``, by section and statement; and how many fail."""
    found, failed = {}, 0
    with Bench(backend) as bench:
        for section in SECTIONS:
            for row in section.rows:
                if only not in f"{row.there} {row.here}":
                    continue
                try:
                    found[section.title, row.there] = outcome(row, bench)
                except Exception:  # noqa: BLE001  (any is a failed row)
                    print("FAIL", backend, row.there)
                    traceback.print_exc()
                    failed += 1
    return found, failed


def page(found: dict[str, dict[tuple[str, str], str]]) -> str:
    """Return the page; ``found`` has the outcomes of each engine."""
    parts = [HEAD]
    for section in SECTIONS:
        parts.append(f"## {section.title}\n\n| there | infercore | {' | '.join(found)} |")
        parts.append("|---" * (2 + len(found)) + "|")
        for row in section.rows:
            cells = [found[name][section.title, row.there] for name in found]
            parts.append(f"| {row.there} | {row.here} | {' | '.join(cells)} |")
        parts.append("")
    parts[1:] = ["\n".join(parts[1:])]
    return "\n".join(parts)


def written(text: str, backend: str) -> dict[tuple[str, str], str]:
    """Return what a page says of ``backend``."""
    found = {}
    for part in text.split("\n## ")[1:]:
        title, *lines = part.splitlines()
        table = [line.strip("|").split(" | ") for line in lines if line.startswith("|")]
        cells = [[cell.strip() for cell in line] for line in table]
        place = cells[0].index(backend)
        found.update({(title, row[0]): row[place] for row in cells[2:]})
    return found


def main() -> int:
    """Run; return 1 where a row fails or the page says otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", choices=[*FORMATS], help="default: both")
    parser.add_argument("--only", default="", help="only rows that hold this text; nothing written")
    parser.add_argument("--check", action="store_true", help="compare with the page")
    given = parser.parse_args()
    names = given.backend or [*FORMATS]
    runs = {name: run(name, given.only) for name in names}
    wrong = sum(failed for _, failed in runs.values())
    for name, (found, failed) in runs.items():
        holds = sum(value == "holds" for value in found.values())
        print(f"{name}: {holds} hold, {len(found) - holds} refused, {failed} fail")
    if given.check and not given.only:
        said = PAGE.read_text(encoding="utf-8")
        for name, (found, _) in runs.items():
            differ = set(found.items()) ^ set(written(said, name).items())
            wrong += len(differ)
            for key, value in sorted(differ):
                print(f"{name}: the page and the run differ at {key}: {value}")
    elif not given.only and not wrong and names == [*FORMATS]:
        PAGE.write_text(page({name: found for name, (found, _) in runs.items()}), encoding="utf-8")
    elif given.only:
        for name, (found, _) in runs.items():
            for (_, there), value in found.items():
                print(f"{name:8} {value:60.60} {there}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
