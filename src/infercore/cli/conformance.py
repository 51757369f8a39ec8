"""``infercore conformance``: the laws, run on a backend."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from infercore.cli.options import backend_names
from infercore.cli.terminal import print_table
from infercore.errors import InferCoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.conformance import Report, Result, Rig

EXIT_FAILED = 1


def _writable(_ctx: click.Context, _param: click.Parameter, path: str | None) -> str | None:
    """Refuse a file that cannot be written before laws take minutes; it is left as it is."""
    is_there = path is not None and os.path.exists(path)
    if path in (None, "-") or (is_there and not os.path.isfile(path)):
        return path
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be written: {error.strerror}") from error
    if not is_there:
        os.remove(path)
    return path


@click.command(short_help="Run the laws of the conformance suite on a backend.")
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=backend_names)
@click.option("--model", metavar="PATH", help="A model to use in place of the rig's own.")
@click.option(
    "--only", multiple=True, metavar="LAW", help="An id, pattern (KV-*), group or tier; repeatable."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Chooses the laws' texts.")
@click.option(
    "--require",
    multiple=True,
    metavar="NAMES",
    help="What must be there, with commas: oracle, observe, adapter, encoder, constraints, suite, "
    "what laws need (kv_shift, state, ...), or options that the backend honours (n_ubatch, "
    "native.mirostat, ...). The run fails if any is missing.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False),
    callback=_writable,
    help="Write JSON; - prints.",
)
@click.option(
    "--markdown",
    type=click.Path(dir_okay=False),
    callback=_writable,
    help="Write the page of results.",
)
@click.pass_context
def conformance(
    ctx: click.Context,
    /,
    names: tuple[str, ...],
    model: str | None,
    only: tuple[str, ...],
    seed: int,
    require: tuple[str, ...],
    **files: str | None,
) -> None:
    """Run the laws of the conformance suite on each backend NAME.

    Exit status: 0 when every backend passed, 1 when one failed, when nothing was run or when
    every law was refused, 2 for a wrong command line.
    """
    from infercore.conformance import find_rig  # noqa: PLC0415  (help needs none of it)

    required = [name.strip() for name in ",".join(require).split(",") if name.strip()]
    try:
        rigs = [find_rig(name, model=model) for name in names]  # all, before laws take minutes
        reports = [_run(rig, list(only) or None, seed, required) for rig in rigs]
    except InferCoreError as error:  # before a law was tried: a model must open, and compute
        if (cause := _behind(error)) is not None:
            click.echo(f"behind it: {cause}", err=True)
        raise
    if files["json_file"] != "-":
        _print(reports)
    _write(reports, **files)
    if not all(report.passed for report in reports):
        ctx.exit(EXIT_FAILED)


def _run(rig: Rig, only: list[str] | None, seed: int, required: list[str]) -> Report:
    from rich.console import Console  # noqa: PLC0415  (help needs none of it)
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    from infercore.conformance import check_backend, select  # noqa: PLC0415

    total = len(select(only))
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task(rig.label, total=total)

        def told(result: Result) -> None:
            progress.update(task, advance=1, description=f"{rig.label} {result.id}")
            if result.counts_as_failure and not console.is_terminal:
                reason = (result.reason or "").strip().split("\n", 1)[0]
                click.echo(f"{rig.label} {result.id} failed: {reason}", err=True)

        return check_backend(rig, only=only, seed=seed, require=required, on_result=told)


def _behind(error: InferCoreError) -> str | None:
    """Return the plugin's own exception with its place, unless ``error`` tells it anyway."""
    from infercore.conformance.runner import cause_of  # noqa: PLC0415  (imports NumPy)

    cause = cause_of(error)
    return None if cause is None or cause in str(error) else cause


def _write(reports: Sequence[Report], *, json_file: str | None, markdown: str | None) -> None:
    from infercore.conformance.render import json_text, page  # noqa: PLC0415

    if json_file == "-":
        click.echo(json_text(reports), nl=False)
    elif json_file is not None:
        Path(json_file).write_text(json_text(reports), encoding="utf-8")
    if markdown is not None:
        Path(markdown).write_text(page(reports), encoding="utf-8")


def _print(reports: Sequence[Report]) -> None:
    from infercore.conformance.render import notes, rows, summary, to_mend  # noqa: PLC0415

    print_table(("law", "what it says", *(report.backend for report in reports)), rows(reports))
    for report in reports:
        for line in notes(report):
            click.echo(f"{report.backend} {' '.join(line.split())}")
        for line in to_mend(report):
            click.echo(line)
        click.echo(summary(report))
