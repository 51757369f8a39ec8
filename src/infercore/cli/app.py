"""The command group, and what every command does with an error or an interrupt."""

from __future__ import annotations

import contextlib
import difflib
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
from infercore.cli.generate import EXIT_INTERRUPTED, generate
from infercore.cli.inspecting import backends, embed, inspect, plan, tokenize
from infercore.cli.models import models, pull
from infercore.cli.options import WholeSummaries, as_options
from infercore.cli.serve import serve
from infercore.cli.terminal import of_the_system, speak_utf8, tell_error

EXIT_ERROR = 1
EXIT_PIPE = 141  # as a shell reports a program that SIGPIPE ended
_CLOSE = 0.75  # how alike an option must be to be suggested; click suggests from 0.6 on

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
        help="Show the traceback of an error.",
    )


class Group(WholeSummaries):
    """A group whose commands end with one line for an error, and cleanly on Ctrl-C.

    Each command takes ``--debug``, as the group itself does.
    """

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command, with ``--debug`` among its options."""
        cmd.params.append(_debug_option())
        super().add_command(cmd, name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options before the command; a wrong one ends like a command's."""
        try:
            return super().parse_args(ctx, args)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            _fail(ctx, error, _usage(error), code=error.exit_code)

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
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            _fail(ctx, error, _usage(error), code=error.exit_code)
        except infercore.InferCoreError as error:
            _fail(ctx, error, as_options(str(error)))
        except OSError as error:
            _discard_output()
            _fail(ctx, error, of_the_system(error))
        except (KeyboardInterrupt, click.Abort):
            click.echo("interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)


def _fail(ctx: click.Context, error: Exception, text: str, *, code: int = EXIT_ERROR) -> NoReturn:
    if ctx.find_root().meta.get(_DEBUG):
        traceback.print_exception(error)
    tell_error(" ".join(text.split()))
    ctx.exit(code)


def _usage(error: click.UsageError) -> str:
    """Return what is wrong with the command line, and where its options are described."""
    if isinstance(error, click.NoSuchOption) and error.possibilities:
        close = difflib.get_close_matches(error.option_name, error.possibilities, cutoff=_CLOSE)
        error = click.NoSuchOption(error.option_name, possibilities=close, ctx=error.ctx)
    told = as_options(error.format_message())
    if isinstance(error, click.BadParameter) and error.param is None:  # raised by a command
        flag, message = str(error.param_hint).strip("'"), as_options(error.message)
        told = message if flag in message else f"{flag}: {message}"
    return told if error.ctx is None else f"{told} (see {error.ctx.command_path} --help)"


def _discard_output() -> None:
    """Let what is still buffered go nowhere, so that the interpreter's exit does not complain."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@click.group(
    cls=Group,
    params=[_debug_option()],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(infercore.__version__, prog_name="infercore")
def main() -> None:
    """Run language models on this machine, with any engine that is installed.

    To begin: infercore demo, then infercore chat pack:storyteller, or a model from the hub:
    infercore chat hf:ORG/REPO
    """
    speak_utf8()


for _command in (
    demo, chat, generate, serve, embed, pull, models, inspect, plan, tokenize, bench, backends,
    conformance,
):  # fmt: skip
    main.add_command(_command)
