"""What a person reads and types: text, tables, JSON and bars; files and pipes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import textwrap
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from infercore.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import BinaryIO

    from infercore import ContextReport


_CODES = [*range(32), *range(127, 160)]
_SHOWN = {code: f"\\x{code:02x}" for code in _CODES if chr(code) not in "\n\t"}
_SHOWN_IN_A_CELL = {code: repr(chr(code))[1:-1] for code in _CODES}


def speak_utf8() -> None:
    """Read and write UTF-8, whatever the locale says; what it cannot hold becomes a mark."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(io.UnsupportedOperation):
                stream.reconfigure(encoding="utf-8", errors="replace")


def is_terminal(stream: Any) -> bool:
    """Return whether ``stream`` is a terminal that a person looks at."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # closed, or none at all
        return False


def may_animate() -> bool:
    """Return whether a bar may be drawn on standard error, and wiped away again."""
    return is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"


def harmless(text: str) -> str:
    """Return ``text`` without control characters, which could steer the terminal.

    What a model or its file says is shown to a person; it does not move the cursor.
    """
    return text.translate(_SHOWN)


def in_a_cell(text: str) -> str:
    """Return ``text`` on one line, its control characters written out."""
    return text.translate(_SHOWN_IN_A_CELL)


def write(text: str) -> None:
    """Write ``text`` to standard output at once; to a terminal without control characters."""
    click.echo(harmless(text) if is_terminal(sys.stdout) else text, nl=False)


def write_thought(text: str) -> None:
    """Write a piece of a model's thought to standard error at once, as `tell` writes a line."""
    shown = harmless(text) if is_terminal(sys.stderr) else text
    click.echo(_styled(shown, dim=True), nl=False, err=True)


def tell(text: str) -> None:
    """Write a line about the work to standard error, dimmed on a terminal with colours."""
    click.echo(_styled(_shown(text), dim=True), err=True)


def tell_error(text: str) -> None:
    """Write an error to standard error, in red on a terminal with colours."""
    click.echo(_styled(_shown("error: " + text), fg="red"), err=True)


def _styled(text: str, **style: Any) -> str:
    environment: Mapping[str, str] = os.environ
    coloured = may_animate() and not environment.get("NO_COLOR")
    return click.style(text, **style) if coloured else text


def _shown(text: str) -> str:
    """Return ``text`` for standard error: harmless, and folded at words on a terminal."""
    return _folded(harmless(text), sys.stderr) if is_terminal(sys.stderr) else harmless(text)


def say(text: str) -> None:
    """Write a line to standard output, folded at words on a terminal."""
    click.echo(_folded(text, sys.stdout) if is_terminal(sys.stdout) else text)


def _folded(text: str, stream: Any) -> str:
    """Return ``text`` with line breaks between words, so that a terminal breaks none.

    What follows two spaces or more, as in a list of commands, stays in its column.
    """
    width = _columns(stream)
    rows = []
    for row in text.split("\n"):
        lead = re.match(r"\S.*?\s{2,}(?=\S)", row)
        indent = len(lead[0]) if lead and len(lead[0]) < width // 2 else 0
        folded = textwrap.wrap(
            row, width, subsequent_indent=" " * indent, break_long_words=False,
            break_on_hyphens=False, drop_whitespace=True, replace_whitespace=False,
        )  # fmt: skip
        rows += folded or [""]
    return "\n".join(rows)


def _columns(stream: Any) -> int:
    """Return the width of the terminal; one that states none is as wide as any message."""
    try:
        return max(20, os.get_terminal_size(stream.fileno()).columns or WIDEST)
    except (OSError, ValueError, AttributeError):
        return WIDEST


def of_the_system(error: OSError) -> str:
    """Return in one line what the system refused, and where."""
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{where}"


STDIN = "-"
STANDARD_INPUT = "standard input"
_MOST_BYTES = 1 << 26


def read_text(file: BinaryIO, source: str) -> str:
    """Return all that ``file`` holds, as text.

    Raises `InvalidInputError` where it is not UTF-8, or never seems to end.
    """
    data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise InvalidInputError(
            f"{source} has more than {_MOST_BYTES >> 20} MiB",
            field=source,
            allowed=f"at most {_MOST_BYTES >> 20} MiB",
        )
    return decoded(data, source)


def decoded(data: bytes, source: str) -> str:
    """Return ``data`` as text. Raises `InvalidInputError` where it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"{source} is not UTF-8 (byte {error.start}); convert it first, as iconv does",
            field=source,
            allowed="UTF-8 text",
        ) from error


def read_file(path: str) -> str:
    """Return the text of the file at ``path``, or of standard input for ``-``, as it is."""
    if path == STDIN:
        return read_stdin()
    try:
        with open(path, "rb") as file:
            return read_text(file, path)
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror}") from error


def read_stdin() -> str:
    """Return all that comes on standard input."""
    if sys.stdin is None:  # closed by the caller (<&-)
        raise click.UsageError(f"{STANDARD_INPUT} is closed; give the text as an argument")
    return read_text(sys.stdin.buffer, STANDARD_INPUT)


def without_line_end(text: str) -> str:
    """Return ``text`` without one line end, which editors and ``echo`` add."""
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def stdin_is_piped() -> bool:
    """Return whether something other than a person is on standard input."""
    return not is_terminal(sys.stdin)


def lines(text: str) -> list[str]:
    """Return the lines of ``text``: line feeds part them, and nothing else does."""
    rows = text.split("\n")
    if rows[-1] == "":
        rows.pop()
    return [row.removesuffix("\r") for row in rows]


WIDTH_OF_A_FILE = 160
WIDEST = 10_000
WIDE = 72
"""Columns from which on a table has a frame."""


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Sequence[str] = (),
    err: bool = False,
) -> None:
    """Print ``rows`` under ``columns``; those named in ``right`` are aligned to the right."""
    from rich.console import Console  # noqa: PLC0415  (help and pipes need none of it)
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    stream = sys.stderr if err else sys.stdout
    console = Console(file=stream, width=None if is_terminal(stream) else WIDTH_OF_A_FILE)
    is_wide = console.width >= WIDE
    table = Table(show_edge=is_wide, pad_edge=is_wide)
    for column in columns:
        side = "right" if column in right else "left"
        table.add_column(column, justify=side, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text(in_a_cell(str(cell))) for cell in row))
    console.print(table)


def print_json(value: Any) -> None:
    """Print ``value`` as indented JSON."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_json_line(value: Any) -> None:
    """Print ``value`` as JSON on one line, at once."""
    click.echo(json.dumps(value, ensure_ascii=False))


def mebibytes(n_bytes: int) -> str:
    """Return ``n_bytes`` as MiB, with a digit that small models need."""
    return f"{n_bytes / 2**20:,.1f}"


BAR_AFTER_S = 0.5
LOOK_EVERY_S = 0.2


def _bar() -> Any:
    from rich.console import Console  # noqa: PLC0415  (pipes need none of it)
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(),
        TextColumn("{task.fields[told]}", markup=False), TimeElapsedColumn(),
    )  # fmt: skip
    return Progress(*columns, console=Console(stderr=True), transient=True)


@contextmanager
def loading_bar(path: str) -> Iterator[Callable[[float], object] | None]:
    """Show that ``path`` is being loaded; give what is to be called with the fraction loaded.

    The bar fills only where the engine reports the fraction. None without a terminal.
    """
    if not may_animate():
        yield None
        return
    with _bar() as bar:
        name = in_a_cell(os.path.basename(os.path.abspath(path)))
        task = bar.add_task(f"loading {name}", total=None, told="")

        def report(fraction: float) -> None:
            if 0 < fraction <= 1:
                bar.update(task, total=1.0, completed=fraction, told=f"{fraction:.0%}")

        yield report


@contextmanager
def counting(total: int) -> Iterator[Callable[[str], object]]:
    """Show how many of ``total`` parts are done; give what is called as each of them begins."""
    if not may_animate():
        yield lambda _: None
        return
    with _bar() as bar:
        task = bar.add_task("", total=total, told="")
        n_begun = 0

        def begin(name: str) -> None:
            nonlocal n_begun
            bar.update(task, completed=n_begun, description=name, told=f"{n_begun} of {total}")
            n_begun += 1

        yield begin


class PrefillBar:
    """A bar for the tokens of a text that the engine still has to evaluate.

    It comes up when that takes a while, and goes before the first text.
    """

    def __init__(self, report: Callable[[], ContextReport]) -> None:
        self._report = report
        self._begun = self._looked = time.perf_counter()
        self._bar: Any = None
        self._task: Any = None
        self._done = not may_animate()

    def look(self) -> None:
        """Draw how far the engine is; call it while waiting."""
        now = time.perf_counter()
        if self._done or now - self._begun < BAR_AFTER_S or now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        report = self._report()
        if not report.pending_tokens:
            return
        held = report.resident_tokens + report.warm_tail_tokens
        total = held + report.pending_tokens
        if self._bar is None:
            self._bar = _bar()
            self._task = self._bar.add_task("reading the prompt", total=total, told="")
            self._bar.start()
        self._bar.update(self._task, total=total, completed=held, told=f"{held} of {total} tokens")

    def end(self) -> None:
        """Wipe the bar away, for good; idempotent."""
        self._done = True
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
