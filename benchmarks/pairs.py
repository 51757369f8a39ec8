"""What every script shares: options, rounds in which all take their turn, tables and JSON."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from infercore.cli.terminal import print_table
from infercore.measuring import machine
from infercore.measuring.stats import Spread, in_turns, number, ratios, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

COLUMNS = ("model", "figure", "by", "median", "range", "unit", "note")


@attrs.frozen(kw_only=True)
class Row:
    """One figure of one contender: ``by`` did ``figure`` on ``model``."""

    model: str
    figure: str
    by: str
    unit: str
    value: Spread
    note: str = ""


def parser(about: str | None, *, rounds: int, engine: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts have, those of an ``engine`` if it runs."""
    built = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    built.add_argument("--rounds", type=int, default=rounds, help="turns that each contender has")
    if engine:
        built.add_argument("--threads", type=int, default=os.cpu_count(), help="of every contender")
        built.add_argument(
            "--n-gpu-layers", type=int, default=0, help="layers on the GPU, for llama.cpp (-1: all)"
        )
    built.add_argument("--json", type=Path, help="write the results to this file as well")
    return built


def compare(
    runs: Mapping[str, Callable[[], float]],
    *,
    model: str,
    figure: str,
    unit: str,
    rounds: int,
    notes: Mapping[str, str] | None = None,
    own: Sequence[str] | None = None,
) -> list[Row]:
    """Run all of ``runs`` in turns, once for nothing; return a row each, and ratios.

    The ratios are taken round by round: of each of ``own`` (the first of ``runs``, unless given)
    over each that is not.
    """
    in_turns(runs, 1)
    found = in_turns(runs, rounds)
    return rows_of(found, model=model, figure=figure, unit=unit, notes=notes, own=own)


def take_turn(
    found: dict[str, list[float]], runs: Mapping[str, Callable[[], float]], turn: int
) -> None:
    """Add a value of each of ``runs``, which were opened for this turn; another one begins in each.

    Each runs once for nothing before.
    """
    in_turns(runs, 1)
    for name in rotated(runs, turn):
        found.setdefault(name, []).append(runs[name]())


def rotated(names: Iterable[str], turn: int) -> list[str]:
    """Return ``names``, from another one on in each turn."""
    order = list(names)
    first = turn % len(order)
    return order[first:] + order[:first]


def rows_of(
    values: Mapping[str, Sequence[float]],
    *,
    model: str,
    figure: str,
    unit: str,
    notes: Mapping[str, str] | None = None,
    own: Sequence[str] | None = None,
) -> list[Row]:
    """Return a row for each contender's values, and ratios as `compare` does."""
    told = notes or {}
    ours = list(values)[:1] if own is None else own
    rows = [
        Row(
            model=model,
            figure=figure,
            by=name,
            unit=unit,
            value=spread(found),
            note=told.get(name, ""),
        )
        for name, found in values.items()
    ]
    return rows + [
        Row(
            model=model,
            figure=f"{figure}, ratio",
            by=f"{one} / {other}",
            unit="",
            value=ratios(values[one], values[other]),
        )
        for one in ours
        for other in values
        if other not in ours
    ]


def finish(name: str, rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Print the rows, and write them where ``--json`` says, with what they depend on."""
    print_table(COLUMNS, [_cells(row) for row in rows], right=COLUMNS[3:5])
    if options.json is None:
        return
    told = {
        "benchmark": name,
        "command": _command(),
        "machine": machine.machine(),
        "versions": machine.versions(),
        "rows": [_rounded(attrs.asdict(row)) for row in rows],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def name_of(path: str) -> str:
    """Return the name of a model's file or folder."""
    return os.path.basename(os.path.normpath(path))


def _cells(row: Row) -> Sequence[str]:
    value = row.value
    between = f"{number(value.low)} to {number(value.high)}" if value.n > 1 else ""
    return (row.model, row.figure, row.by, number(value.median), between, row.unit, row.note)


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Five significant digits: more would only be noise."""
    value = {
        key: float(f"{x:.5g}") if isinstance(x, float) else x for key, x in row["value"].items()
    }
    return {**row, "value": value}


def _command() -> str:
    """The command line without the folders of this machine."""
    words = [name_of(word) if os.sep in word else word for word in sys.argv[1:]]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return shlex.join(["python", f"benchmarks/{name_of(sys.argv[0])}", *words])
