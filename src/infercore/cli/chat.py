"""``infercore chat``: a conversation whose history stays warm."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

import infercore
from infercore.cli.chat_commands import HELP, Commands, Leave
from infercore.cli.chat_state import Chat
from infercore.cli.decoding import (
    chat_fields,
    chat_options,
    decode_fields,
    decode_options,
    overflow_option,
    system_message,
)
from infercore.cli.loading import opened
from infercore.cli.options import (
    CONTEXT_FOR_TEXT,
    SectionCommand,
    context_options,
    model_options,
)
from infercore.cli.running import EXIT_INTERRUPTED
from infercore.cli.terminal import is_terminal, of_the_system, tell
from infercore.cli.texts import STANDARD_INPUT, decoded, stdin_is_piped
from infercore.cli.turns import Show

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = ">>> "
HOW_TO_LEAVE = "press Ctrl-D or type /exit to leave; Ctrl-C ends an answer"


@click.command(cls=SectionCommand)
@model_options
@click.option("--load", "saved", metavar="FILE", help="Go on with a chat that /save wrote.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON a chunk.")
@click.option("--no-stats", is_flag=True, help="Do not tell after each answer what it took.")
@context_options(CONTEXT_FOR_TEXT)
@overflow_option
@chat_options
@decode_options
@click.pass_context
def chat(ctx: click.Context, /, model: str, saved: str | None, **options: Any) -> None:
    """Talk with MODEL; what was said stays evaluated from turn to turn.

    A line is a message; one that begins with / is a command (/help lists them), with // a message
    that begins with /. Ctrl-C ends an answer and keeps what was said, Ctrl-D leaves. In a pipe
    each line of standard input is a message, and only the answers are written to standard output.

    When the window is full, the oldest turns are left out, which is said once; --overflow error
    ends the chat instead.

    Exit status: 0, 1 for an error (in a pipe also one of a turn), 2 for a wrong command line, 130
    after Ctrl-C in a pipe.
    """
    person = not stdin_is_piped()
    show = Show(as_json=options["as_json"], stats=not options["no_stats"])
    fields, system = chat_fields(options), system_message(options)
    options["overflow"] = options["overflow"] or "truncate"
    with decode_fields(options) as decode, opened(model, options) as (loaded, session):
        talk = Chat(model=loaded, session=session, show=show, decode=decode, fields=fields)
        talk.begin(system, saved)
        try:
            (_converse if person else _answer_all)(talk, Commands(talk))
        except Leave:
            return
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)


def _converse(talk: Chat, commands: Commands) -> None:
    """Answer a person, whose Ctrl-C never ends the chat, however late it comes."""
    _edit_lines()
    tell(f"{HELP.splitlines()[0]} {HOW_TO_LEAVE}.")
    while True:
        try:
            if (line := _ask()) is None:
                return
            _answer_or_tell(talk, commands, line)
        except KeyboardInterrupt:  # noqa: PERF203  (a turn, not a tight loop)
            click.echo(err=True)
            tell(HOW_TO_LEAVE)


def _answer_all(talk: Chat, commands: Commands) -> None:
    """Answer each line of a pipe; Ctrl-C ends it."""
    for line in _piped():
        _answer(talk, commands, line)
        if talk.interrupted:
            raise KeyboardInterrupt


def _answer_or_tell(talk: Chat, commands: Commands, line: str) -> None:
    """Answer a person, to whom an error is told; the chat goes on."""
    try:
        _answer(talk, commands, line)
    except (*_ENDS, BrokenPipeError):
        raise
    except infercore.InferCoreError as error:
        tell(f"error: {' '.join(str(error).split())}")
    except OSError as error:  # a disk that is full, for instance
        tell(f"error: {of_the_system(error)}")


_ENDS = (infercore.SessionFatalError, infercore.SessionClosedError)


def _answer(talk: Chat, commands: Commands, line: str) -> None:
    if line.startswith("//"):
        talk.say(line[1:])
    elif line.startswith("/"):
        commands.run(line)
    elif line.strip():
        talk.say(line)


def _edit_lines() -> None:
    """Let arrow keys edit lines and bring back earlier ones, where Python can."""
    try:
        import readline  # noqa: F401, PLC0415  (`input` uses it once it is there)
    except ImportError:
        return


def _ask() -> str | None:
    """Return the next line, None after Ctrl-D. Raises `KeyboardInterrupt` after Ctrl-C."""
    try:
        if is_terminal(sys.stdout):
            return input(PROMPT)
        click.echo(PROMPT, nl=False, err=True)
        return input()
    except EOFError:
        click.echo(err=True)
        return None


def _piped() -> Iterator[str]:
    """Yield the lines of standard input as they come."""
    if sys.stdin is None:  # closed by the caller (<&-)
        return
    for number, data in enumerate(sys.stdin.buffer, 1):
        line = decoded(data, f"line {number} of {STANDARD_INPUT}")
        yield line.removesuffix("\n").removesuffix("\r")
