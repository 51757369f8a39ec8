"""Print what the documentation answers: each question, its page, the clicks, and what was run.

    python tools/questions.py [--run]

The questions are those of ``docs/how-to/index.md``. A click is a link on a page, or an entry of its
table of contents. ``--run`` runs every block of every answer on the engines that are here, and
prints with which it worked; without it the blocks are counted.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from docs import pages  # noqa: E402  (it stands beside the tests)

INDEX = "docs/index.md"
QUESTIONS = "docs/how-to/index.md"
EXAMPLES = {"docs/how-to/agents.md": "test_agent_calls", "docs/how-to/rag.md": "test_rag_answers"}
"""Pages that show a program of ``examples``, and how the name of the test that runs it begins."""
_ROW = re.compile(r"^\| ([^|]+\?) \| \[[^\]]+\]\(([^)#]+)(?:#([^)]+))?\) \|$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)|\{doc\}`([^`<]+)`")
_TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^(#+) (.*)$")


@dataclass(frozen=True)
class Answer:
    """A question, and where its answer is."""

    question: str
    page: str
    anchor: str

    @property
    def lines(self) -> tuple[int, int]:
        """The first line of the answer, and the one behind its last. Raises LookupError."""
        rows = pages.text_of(self.page).splitlines()
        if not self.anchor:
            return 1, len(rows) + 1
        depth, start, fenced = 0, 0, False
        for number, row in enumerate(rows, 1):
            fenced ^= row.startswith("```")
            found = None if fenced else _HEADING.match(row)
            if found and not start and slug(found[2]) == self.anchor:
                depth, start = len(found[1]), number
            elif found and start and len(found[1]) <= depth:
                return start, number
        if not start:
            raise LookupError(f"{self.page} has no heading {self.anchor!r}")
        return start, len(rows) + 1

    @property
    def blocks(self) -> list[pages.Block]:
        """The blocks of the answer that are run, here or by the tests that the page names."""
        first, end = self.lines
        inside = [block for block in pages.blocks(self.page) if first <= block.line < end]
        return [
            block
            for block in inside
            if block.way in {"python", "shell"}
            or (block.way == "exempt" and re.search(r"tests.* run", block.argument))
        ]


def slug(heading: str) -> str:
    """Return the anchor of a heading."""
    plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return plain.strip().replace(" ", "-")


def answers() -> list[Answer]:
    """Return the questions with their answers."""
    return [
        Answer(question, beside(QUESTIONS, target), anchor)
        for question, target, anchor in _ROW.findall(pages.text_of(QUESTIONS))
    ]


def beside(page: str, target: str) -> str:
    """Return the page that ``target`` names on ``page``, as a path below the root."""
    folder = (ROOT / page).parent
    return (folder / target).resolve().relative_to(ROOT).as_posix()


def clicks() -> dict[str, int]:
    """Return how many clicks each page is away from the start."""
    found, edge = {INDEX: 0}, [INDEX]
    while edge:
        page = edge.pop(0)
        for target in targets(page):
            if target not in found and (ROOT / target).is_file():
                found[target] = found[page] + 1
                edge.append(target)
    return found


def targets(page: str) -> list[str]:
    """Return the pages that ``page`` links to."""
    text = pages.text_of(page)
    named = [plain or f"{doc}.md" for plain, doc in _LINK.findall(text)]
    for body in _TOCTREE.findall(text):
        lines = (line.strip() for line in body.splitlines())
        named += [f"{line}.md" for line in lines if line and not line.startswith(":")]
    return [beside(page, name) for name in named]


def worked(page: str) -> str:
    """Run the blocks of a page as the tests do; return on which engines they worked."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-rA", "--tb=no"]
    if page in EXAMPLES:
        chosen = ["tests/examples/test_examples.py", "-k", EXAMPLES[page]]
        passed = r"^PASSED .*\[(.+)\]"
    else:
        chosen = ["tests/docs/test_pages.py", "-k", f"blocks_of_a_page and {page}"]
        passed = rf"^PASSED .*\[{re.escape(page)}-(.+)\]"
    done = subprocess.run(
        [*command, *chosen], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = re.findall(passed, done.stdout, re.MULTILINE)
    return ", ".join(found) or "none"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="what the documentation answers")
    parser.add_argument("--run", action="store_true", help="run the blocks, too")
    given = parser.parse_args()
    away, ran = clicks(), {}
    head = ["question", "answer", "clicks", "blocks", *(["worked on"] if given.run else [])]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for answer in answers():
        place = answer.page.removeprefix("docs/") + (f"#{answer.anchor}" if answer.anchor else "")
        row = [answer.question, place, str(away[answer.page]), str(len(answer.blocks))]
        if given.run:
            if answer.page not in ran:
                ran[answer.page] = worked(answer.page)
            row.append(ran[answer.page])
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
