"""Texts from arguments, files and pipes: UTF-8, or a typed error."""

from __future__ import annotations

import sys

import click

from infercore.cli.terminal import is_terminal
from infercore.errors import InvalidInputError

STDIN = "-"
STANDARD_INPUT = "standard input"


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
            return decoded(file.read(), path)
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror}") from error


def read_stdin() -> str:
    """Return all that comes on standard input."""
    if sys.stdin is None:  # closed by the caller (<&-)
        raise click.UsageError(f"{STANDARD_INPUT} is closed; give the text as an argument")
    return decoded(sys.stdin.buffer.read(), STANDARD_INPUT)


def without_line_end(text: str) -> str:
    """Return ``text`` without one line end, which editors and ``echo`` add."""
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def stdin_is_piped() -> bool:
    """Tell whether something other than a person is on standard input."""
    return not is_terminal(sys.stdin)


def lines(text: str) -> list[str]:
    """Return the lines of ``text``: line feeds part them, and nothing else does."""
    rows = text.split("\n")
    if rows[-1] == "":
        rows.pop()
    return [row.removesuffix("\r") for row in rows]
