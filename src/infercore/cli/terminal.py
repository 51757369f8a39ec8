"""What depends on whether a person is looking: colours, control characters, the encoding."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    """Tell whether ``stream`` is a terminal that a person looks at."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # closed, or none at all
        return False


def may_animate() -> bool:
    """Tell whether a bar may be drawn on standard error, and wiped away again."""
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


def tell(text: str) -> None:
    """Write a line about the work to standard error, dimmed on a terminal with colours."""
    environment: Mapping[str, str] = os.environ
    coloured = may_animate() and not environment.get("NO_COLOR")
    shown = harmless(text)
    click.echo(click.style(shown, dim=True) if coloured else shown, err=True)


def of_the_system(error: OSError) -> str:
    """Return in one line what the system refused, and where."""
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{where}"
