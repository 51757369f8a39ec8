"""``infercore chat``: a conversation whose history stays warm."""

from __future__ import annotations

import os
import select
import sys
from typing import TYPE_CHECKING, Any

import click

import infercore
from infercore.cli.conversation import Chat
from infercore.cli.decoding import (
    chat_fields,
    chat_options,
    decode_fields,
    decode_options,
    overflow_option,
    system_message,
)
from infercore.cli.generate import EXIT_INTERRUPTED, EXIT_UNFINISHED, Show
from infercore.cli.loading import opened
from infercore.cli.options import (
    CONTEXT_FOR_TEXT,
    SectionCommand,
    as_options,
    context_options,
    model_options,
)
from infercore.cli.terminal import (
    STANDARD_INPUT,
    decoded,
    is_terminal,
    of_the_system,
    read_file,
    stdin_is_piped,
    tell,
    tell_error,
    without_line_end,
)
from infercore.errors import InvalidInputError
from infercore.values.checks import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


HELP = """\
/help shows the commands;
/save FILE    write the chat to a file, with the session's state
/load FILE    continue a chat that /save wrote
/undo         remove the last message and its answer
/drop N       remove the N oldest turns (default: 1)
/reset        start over; keeps the system message
/system TEXT  set the system message; no TEXT shows it, - removes it
/stats        what the session holds
/exit         leave
//TEXT        a message that begins with /
@FILE TEXT    the text of a file, then TEXT; @@ begins a message with @
\"\"\"           begins and ends a message of several lines"""

_REPORTED = (
    "resident_tokens", "prefix_tokens", "suffix_tokens", "generated_tokens", "warm_tail_tokens",
    "available_tokens", "n_ctx",
)  # fmt: skip


class Leave(Exception):  # noqa: N818  (an order, not an error)
    """Ends the chat."""


class Commands:
    """The commands of one chat."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._known: Mapping[str, Callable[[str], None]] = {
            "/help": self._help,
            "/save": self._save,
            "/load": self._load,
            "/undo": self._undo,
            "/drop": self._drop,
            "/reset": self._reset,
            "/system": self._system,
            "/stats": self._stats,
            "/exit": self._exit,
            "/quit": self._exit,
            "/bye": self._exit,
            "/clear": self._reset,
            "/?": self._help,
        }

    def run(self, line: str) -> None:
        """Do what ``line`` says.

        Raises `InvalidInputError` for what is no command, and what the chat raises; `Leave`
        where the chat is to end.
        """
        name, _, rest = line.strip().partition(" ")
        command = self._known.get(name)
        if command is None:
            raise InvalidInputError(
                f"there is no command {name}; {nearest(name, self._known)} "
                "(to start a message with /, type //)",
                field="command",
                value=name,
                allowed=tuple(self._known),
            )
        command(rest.strip())

    def _help(self, rest: str) -> None:
        _nothing("/help", rest)
        self._chat.tell("help", HELP, commands=sorted(self._known))

    def _save(self, path: str) -> None:
        snapshot = self._chat.save(_needed("/save", path))
        n_messages, n_tokens = len(self._chat.messages), snapshot.resident_tokens
        self._chat.tell(
            "saved",
            f"saved {n_messages} messages and {n_tokens} tokens ({snapshot.size_bytes:,} bytes) "
            f"to {path}",
            path=path, messages=n_messages, resident_tokens=n_tokens,
            size_bytes=snapshot.size_bytes,
        )  # fmt: skip

    def _load(self, path: str) -> None:
        snapshot = self._chat.load(_needed("/load", path))
        n_messages, n_tokens = len(self._chat.messages), snapshot.resident_tokens
        self._chat.tell(
            "loaded",
            f"loaded {n_messages} messages and {n_tokens} tokens from {path}",
            path=path, messages=n_messages, resident_tokens=n_tokens,
        )  # fmt: skip

    def _undo(self, rest: str) -> None:
        _nothing("/undo", rest)
        done = self._chat.undo()
        left = len(self._chat.messages)
        text = (
            f"forgotten; {_counted(left, 'message')} left" if done else "there is nothing to undo"
        )
        self._chat.tell("undone", text, done=done, messages=left)

    def _drop(self, rest: str) -> None:
        if not (rest or "1").isdecimal():
            raise InvalidInputError(
                f"/drop takes a number of turns, not {rest!r}", field="/drop", value=rest
            )
        n_dropped = self._chat.drop(int(rest or 1))
        left = len(self._chat.messages)
        text = f"forgot {_counted(n_dropped, 'turn')}; {_counted(left, 'message')} left"
        self._chat.tell("dropped", text, turns=n_dropped, messages=left)

    def _reset(self, rest: str) -> None:
        _nothing("/reset", rest)
        self._chat.reset()
        self._chat.tell("reset", "started a new chat", messages=len(self._chat.messages))

    def _system(self, text: str) -> None:
        if text:
            self._chat.set_system(None if text == "-" else text)
        system = self._chat.system
        shown = "there is no system message" if system is None else f"system: {system}"
        self._chat.tell("system", shown, system=system)

    def _stats(self, rest: str) -> None:
        _nothing("/stats", rest)
        report = self._chat.session.explain_context()
        facts: dict[str, Any] = {name: getattr(report, name) for name in _REPORTED}
        facts = {"messages": len(self._chat.messages), "state": report.state, **facts}
        told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())
        self._chat.tell("stats", told, **facts)

    def _exit(self, rest: str) -> None:
        _nothing("/exit", rest)
        raise Leave


def _counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _needed(command: str, path: str) -> str:
    if not path:
        raise InvalidInputError(
            f"{command} needs the path of a file", field="path", value=path, allowed="a path"
        )
    return path


def _nothing(command: str, rest: str) -> None:
    if rest:
        raise InvalidInputError(
            f"{command} takes nothing after it, not {rest!r}", field=command, value=rest
        )


PROMPT, MORE, QUOTES = ">>> ", "... ", '"""'
PASTE_S = 0.05
HOW_TO_LEAVE = "press Ctrl-D or type /exit to quit; Ctrl-C stops an answer"


@click.command(
    cls=SectionCommand,
    examples=[
        "infercore chat pack:storyteller",
        "infercore chat hf:ORG/REPO -c 8192 -ngl 99",
        "infercore chat model.gguf -sys 'Answer in one sentence.'",
    ],
    short_help="Chat with a model.",
)
@model_options
@click.option("--load", "saved", metavar="FILE", help="Continue a chat that /save wrote.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON per chunk.")
@click.option("--no-stats", is_flag=True, help="Do not print statistics after each answer.")
@context_options(CONTEXT_FOR_TEXT)
@overflow_option
@chat_options
@decode_options
@click.pass_context
def chat(ctx: click.Context, /, model: str, saved: str | None, **options: Any) -> None:
    """Chat with MODEL; earlier turns stay evaluated, so that answers begin at once.

    A line is a message, and lines that are pasted together are one. /help lists the commands.
    Ctrl-C ends an answer and keeps what was said, Ctrl-D leaves. In a pipe each line of standard
    input is a message, and only the answers go to standard output.

    When the window is full, the oldest turns are left out, with a note; --overflow error refuses
    the message instead.

    Exit status: 0, 1 for an error (in a pipe also one of a turn), 2 for a wrong command line, 3
    where a constrained answer broke off in a pipe, 130 after Ctrl-C in a pipe.
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
        if talk.broke_off and not person:
            ctx.exit(EXIT_UNFINISHED)


def _converse(talk: Chat, commands: Commands) -> None:
    """Answer a person, whose Ctrl-C never ends the chat, however late it comes."""
    _edit_lines()
    tell(f"{HELP.splitlines()[0]} {HOW_TO_LEAVE}.")
    typed = Typed()
    while True:
        try:
            if (message := typed.message()) is None:
                return
            _answer_or_tell(talk, commands, message)
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
    """Answer a person; an error is printed and the chat goes on."""
    try:
        _answer(talk, commands, with_file(line))
    except (*_ENDS, BrokenPipeError):
        raise
    except infercore.InferCoreError as error:
        more = "; /drop, /undo and /reset make room"
        is_full = isinstance(error, infercore.ContextOverflowError)
        tell_error(as_options(" ".join(str(error).split())) + more * is_full)
    except click.UsageError as error:
        tell_error(error.format_message())
    except OSError as error:  # a disk that is full, for instance
        tell_error(of_the_system(error))


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


class Typed:
    """What a person types: a message may be several lines that come at once, as a paste does."""

    def __init__(self) -> None:
        self._next: str | None = None

    def message(self) -> str | None:
        """Return the next message, None after Ctrl-D. Raises `KeyboardInterrupt` after Ctrl-C."""
        first, self._next = self._next, None
        if first is None:
            first = _line(PROMPT)
        if first is None or (first.startswith("/") and not first.startswith("//")):
            return first
        lines = [first]
        if first.startswith(QUOTES):
            return self._quoted(first.removeprefix(QUOTES))
        while _more_is_there() and (line := _line(MORE)) is not None:
            if line.startswith("/"):
                self._next = line
                break
            lines.append(line)
        return "\n".join(lines)

    @staticmethod
    def _quoted(line: str | None) -> str:
        """Return the lines up to the one that ends in quotes."""
        lines: list[str] = []
        while line is not None and not line.endswith(QUOTES):
            lines.append(line)
            line = _line(MORE)
        if line is not None:
            lines.append(line.removesuffix(QUOTES))
        return "\n".join(lines).strip("\n")


def _more_is_there() -> bool:
    """Return whether a further line has come already."""
    if os.name == "nt" or stdin_is_piped():
        return False
    return bool(select.select([sys.stdin], [], [], PASTE_S)[0])


def with_file(message: str) -> str:
    """Return ``message`` with the text of the file that ``@FILE`` at its beginning names."""
    if message.startswith("@@"):
        return message[1:]
    if not message.startswith("@"):
        return message
    name, _, rest = message[1:].partition(" ")
    path = os.path.expanduser(name)
    if not os.path.isfile(path):
        raise click.UsageError(f"there is no file {name!r}; to start a message with @, type @@")
    text = without_line_end(read_file(path))
    return f"{text}\n\n{rest}" if rest.strip() else text


def _line(prompt: str) -> str | None:
    """Return the next line, None after Ctrl-D. Raises `KeyboardInterrupt` after Ctrl-C."""
    try:
        if is_terminal(sys.stdout):
            return input(prompt)
        click.echo(prompt, nl=False, err=True)
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
