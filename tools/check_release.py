"""Check that a tag is a release, and write what it changed.

    python tools/check_release.py --tag v1.2.3 [--notes FILE]

The tag must be the version of all distributions, CHANGELOG.md must have a section for it, and no
fragment may be left in ``changelog/``. Ends with what is wrong, all of it.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (".", "models", "plugins/llamacpp", "plugins/openvino", "integrations/ray")


def main() -> None:
    """Check, and write the notes."""
    parser = argparse.ArgumentParser(description="check that a tag is a release")
    parser.add_argument("--tag", required=True, help="such as v1.2.3")
    parser.add_argument("--notes", type=Path, help="where to write the release's changes")
    given = parser.parse_args()
    wrong = faults(given.tag, ROOT)
    if wrong:
        sys.exit("\n".join(wrong))
    if given.notes is not None:
        given.notes.write_text(section(ROOT, given.tag[1:]) + "\n", encoding="utf-8")


def faults(tag: str, root: Path) -> list[str]:
    """Return what keeps ``tag`` from being a release of the sources in ``root``."""
    if not re.fullmatch(r"v\d+\.\d+\.\d+", tag):
        return [f"{tag!r} is not vX.Y.Z"]
    wrong = [
        f"{folder}/pyproject.toml has version {found}, the tag says {tag[1:]}"
        for folder in FOLDERS
        if (found := version(root / folder / "pyproject.toml")) != tag[1:]
    ]
    left = sorted(path.name for path in (root / "changelog").glob("*.*.md"))
    if left:
        wrong.append(f"changelog/ still has {', '.join(left)}; run towncrier build")
    if not section(root, tag[1:]):
        wrong.append(f"CHANGELOG.md has no section for {tag[1:]}")
    return wrong


def version(pyproject: Path) -> str:
    """Return the version that a project states."""
    found = re.search(r'^version = "(.*)"$', pyproject.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else "none"


def section(root: Path, number: str) -> str:
    """Return what CHANGELOG.md says of a version, "" where it says nothing."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(
        rf"^## {re.escape(number)}\b[^\n]*\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    )
    return found[1].strip() if found else ""


if __name__ == "__main__":
    main()
