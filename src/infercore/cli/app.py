"""The command group, and what every command does with an error or an interrupt."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Any, NoReturn

import click

import infercore
from infercore.cli.bench import bench
from infercore.cli.chat import chat
from infercore.cli.conformance import conformance
from infercore.cli.demo import demo
from infercore.cli.embed import embed
from infercore.cli.generate import generate
from infercore.cli.generating import EXIT_INTERRUPTED
from infercore.cli.inspecting import backends, inspect, plan, tokenize
from infercore.cli.serve import serve
from infercore.cli.terminal import harmless, of_the_system, speak_utf8

EXIT_ERROR = 1
EXIT_PIPE = 141  # as a shell reports a program that SIGPIPE ended

_DEBUG = "infercore.cli.debug"


def _note_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001
    if value:
        ctx.find_root().meta[_DEBUG] = True


def _debug_option() -> click.Option:
    return click.Option(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        callback=_note_debug,
        help="Show the trace of an error.",
    )


class Group(click.Group):
    """A group whose commands end with one line for an error, and cleanly on Ctrl-C.

    Each command takes ``--debug``, as the group itself does.
    """

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command, with ``--debug`` among its options."""
        cmd.params.append(_debug_option())
        super().add_command(cmd, name)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        Exit status 1 for a typed error and one of the system (a full disk), 130 for an
        interrupt, 141 where the reader of standard output has gone.
        """
        try:
            try:
                return super().invoke(ctx)
            finally:
                if sys.stdout is not None:  # closed by the caller (>&-)
                    sys.stdout.flush()
        except BrokenPipeError:
            _discard_output()
            ctx.exit(EXIT_PIPE)
        except infercore.InferCoreError as error:
            _fail(ctx, error, str(error))
        except OSError as error:
            _discard_output()
            _fail(ctx, error, of_the_system(error))
        except (KeyboardInterrupt, click.Abort):
            click.echo("interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)


def _fail(ctx: click.Context, error: Exception, text: str) -> NoReturn:
    if ctx.find_root().meta.get(_DEBUG):
        traceback.print_exception(error)
    click.echo(f"error: {harmless(' '.join(text.split()))}", err=True)
    ctx.exit(EXIT_ERROR)


def _discard_output() -> None:
    """Let what is still buffered go nowhere, so that the interpreter's exit does not complain."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@click.group(
    cls=Group,
    params=[_debug_option()],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(infercore.__version__, prog_name="infercore")
def main() -> None:
    """Language-model inference on this machine, with any engine that is installed."""
    speak_utf8()


for _command in (
    backends, inspect, plan, generate, chat, serve, embed, tokenize, bench, demo, conformance,
):  # fmt: skip
    main.add_command(_command)
