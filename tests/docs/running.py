"""Runs the blocks of a page: Python in one namespace, commands in a shell, outputs compared."""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from docs.pages import Block

SECONDS = 300  # for one command


class Run:
    """One page on one backend, in a folder of its own."""

    def __init__(
        self, folder: Path, models: Mapping[str, str], environment: Mapping[str, str]
    ) -> None:
        self._folder = folder
        self._models = models
        self._environment = {**os.environ, **environment}
        self._names: dict[str, Any] = {"__name__": "__page__"}
        self._printed = ""

    def do(self, block: Block) -> None:
        """Do with ``block`` what its way says."""
        work = _WAYS.get(block.way)
        if work is not None:
            work(self, block)

    def _text(self, text: str) -> str:
        """Put the pack's models into the places that the pages name."""
        for name, path in self._models.items():
            text = text.replace(name, path)
        return text

    def python(self, block: Block) -> None:
        """Run Python; a traceback names the page and its line."""
        source = "\n" * block.line + self._text(block.text)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(source, block.page, "exec", dont_inherit=True), self._names)  # noqa: S102
        self._printed = out.getvalue()

    def shell(self, block: Block) -> None:
        """Run each command; what a console block shows below a command is compared."""
        self._printed = ""
        for command in block.commands:
            done = subprocess.run(  # noqa: S602  (the page's own commands)
                self._text(command),
                shell=True,
                stdin=subprocess.DEVNULL,
                cwd=self._folder,
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            said = f"{block.place}: {command}\n{done.stdout}{done.stderr}"
            assert done.returncode == 0, said
            self._printed += done.stdout
        if block.language == "console":
            shown = [line for line in block.text.splitlines() if not line.startswith("$ ")]
            if any(shown):
                self._compare(block, "\n".join(shown))

    def output(self, block: Block) -> None:
        """Compare with what the block before printed; ``...`` stands for anything."""
        self._compare(block, block.text)

    def _compare(self, block: Block, shown: str) -> None:
        found = _plain(self._printed)
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        same = doctest.OutputChecker().check_output(_plain(shown), found, flags)
        assert same, f"{block.place} shows\n{shown}\nbut this was printed:\n{found}"

    def data(self, block: Block) -> None:
        """Parse it."""
        if block.language == "json":
            json.loads(block.text)
        elif sys.version_info >= (3, 11):
            import tomllib

            tomllib.loads(block.text)
        else:
            import tomli  # pytest needs it there

            tomli.loads(block.text)


def _plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


_WAYS: dict[str, Callable[[Run, Block], None]] = {
    "python": Run.python,
    "shell": Run.shell,
    "output": Run.output,
    "data": Run.data,
}
