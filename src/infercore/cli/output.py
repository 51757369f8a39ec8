"""Tables and JSON on standard output."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WIDTH_OF_A_FILE = 160


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()
) -> None:
    """Print ``rows`` under ``columns``; those named in ``right`` are aligned to the right."""
    table = Table()
    for column in columns:
        side = "right" if column in right else "left"
        table.add_column(column, justify=side, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    width = None if sys.stdout.isatty() else WIDTH_OF_A_FILE
    Console(file=sys.stdout, width=width).print(table)


def print_json(value: Any) -> None:
    """Print ``value`` as indented JSON."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
