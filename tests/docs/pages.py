"""What stands in the fences of the documentation's pages, and what becomes of each.

===============  ============================================================================
way              what happens
===============  ============================================================================
``python``       run, in the page's one namespace
``shell``        run, line by line: commands that are not about installing
``output``       compared with what the block before it printed
``data``         parsed (TOML, JSON)
``installs``     exempt: every line of it only installs packages; no other block may
``excerpt``      exempt here: compared with the file that ``<!-- from: FILE -->`` names
``directive``    exempt here: read by the build of the documentation, which fails on a mistake
``exempt``       exempt, for the reason that ``<!-- not run: REASON -->`` gives
===============  ============================================================================

Any other block is ``unknown``, which is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(
    r"^(?P<ticks>`{3,}|:{3,})(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=ticks)[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
_MARK = re.compile(r"<!-- (not run|from|command|output)(?:: (.+?))? -->\s*\Z", re.DOTALL)
_NEEDS = re.compile(r"<!-- runs on: ([\w ,-]+) -->")
_INSTALLS = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:\S*python\S* -m )?(?:\S*/)?pip install ")


@dataclass(frozen=True)
class Block:
    """One fenced block: where it stands, what it is, and what is to become of it."""

    page: str
    line: int
    language: str
    text: str
    mark: str
    argument: str

    @property
    def place(self) -> str:
        """Where a reader finds it."""
        return f"{self.page}:{self.line}"

    @property
    def way(self) -> str:
        """What becomes of it; "unknown" where no rule says so."""
        if self.language.startswith("{"):
            return "directive"
        if self.mark in _OF_MARK:
            return _OF_MARK[self.mark]
        if self.language in {"bash", "console"} and "pip install" in self.text:
            return "installs" if all(map(_INSTALLS.match, self.commands)) else "unknown"
        return _OF_LANGUAGE.get(self.language, "unknown")

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block, continued lines joined, comments left out."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        bare = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
        return [line for line in bare if line]


_OF_MARK = {"not run": "exempt", "command": "exempt", "from": "excerpt", "output": "output"}
_OF_LANGUAGE = {
    "python": "python",
    "bash": "shell",
    "console": "shell",
    "toml": "data",
    "json": "data",
}


def pages() -> list[str]:
    """Return every page of the documentation, and the README, as paths below the root."""
    found = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
    return ["README.md", *(path.relative_to(ROOT).as_posix() for path in found)]


def text_of(page: str) -> str:
    """Return what stands on a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = text_of(page)
    return [_block(page, text, found) for found in _FENCE.finditer(text)]


def _block(page: str, text: str, found: re.Match[str]) -> Block:
    before = text[: found.start()]
    mark = _MARK.search(before)
    return Block(
        page=page,
        line=before.count("\n") + 1,
        language=found["info"].strip().split(" ", maxsplit=1)[0],
        text=found["body"],
        mark=mark[1] if mark else "",
        argument=(mark[2] or "") if mark else "",
    )


def needs_engine(page: str) -> bool:
    """Return whether a page shows what the reference backend cannot do."""
    return "<!-- not on: reference -->" in text_of(page)


def runs_on(page: str) -> tuple[str, ...]:
    """Return the backends that a page names as needed; none: whichever is there."""
    found = _NEEDS.search(text_of(page))
    return tuple(name.strip() for name in found[1].split(",")) if found else ()
