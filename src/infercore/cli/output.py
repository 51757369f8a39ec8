"""Tables and JSON."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from infercore.cli.terminal import in_a_cell, is_terminal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WIDTH_OF_A_FILE = 160


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

    table = Table()
    for column in columns:
        side = "right" if column in right else "left"
        table.add_column(column, justify=side, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text(in_a_cell(str(cell))) for cell in row))
    stream = sys.stderr if err else sys.stdout
    width = None if is_terminal(stream) else WIDTH_OF_A_FILE
    Console(file=stream, width=width).print(table)


def print_json(value: Any) -> None:
    """Print ``value`` as indented JSON."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_json_line(value: Any) -> None:
    """Print ``value`` as JSON on one line, at once."""
    click.echo(json.dumps(value, ensure_ascii=False))


def mebibytes(n_bytes: int) -> str:
    """Return ``n_bytes`` as MiB, with a digit that small models need."""
    return f"{n_bytes / 2**20:,.1f}"
