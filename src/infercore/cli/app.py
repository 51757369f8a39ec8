"""The command group, and what every command does with an error or an interrupt."""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from typing import Any

import click

import infercore
from infercore.cli.backends import backends
from infercore.cli.conformance import conformance
from infercore.cli.demo import demo

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130


class Group(click.Group):
    """A group whose commands end with one line for a typed error, and cleanly on Ctrl-C."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; exit status 1 for a typed error, 130 for an interrupt."""
        try:
            return super().invoke(ctx)
        except infercore.InferCoreError as error:
            if ctx.params.get("debug"):
                traceback.print_exception(error)
            click.echo(f"error: {' '.join(str(error).split())}", err=True)
            ctx.exit(EXIT_ERROR)
        except (KeyboardInterrupt, click.Abort):
            click.echo("interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(infercore.__version__, prog_name="infercore")
@click.option("--debug", is_flag=True, help="Show the trace of an error.")
def main(debug: bool) -> None:  # noqa: ARG001, FBT001  (click passes it; the group reads it)
    """Language-model inference on this machine, with any engine that is installed."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(io.UnsupportedOperation):
                stream.reconfigure(errors="replace")


main.add_command(backends)
main.add_command(conformance)
main.add_command(demo)
