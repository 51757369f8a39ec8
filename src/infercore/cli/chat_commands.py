"""What lines that begin with / do in a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infercore.errors import InvalidInputError
from infercore.values.checks import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infercore.cli.chat_state import Chat

HELP = """\
/help shows the commands;
/save FILE    write the chat to a file, with the session's state
/load FILE    go on with such a file, warm
/undo         forget the last message and its answer
/reset        forget all but the system message
/system TEXT  set the system message; without TEXT show it, with - remove it
/stats        what the session holds
/exit         leave
//TEXT        a message that begins with /"""

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
            "/reset": self._reset,
            "/system": self._system,
            "/stats": self._stats,
            "/exit": self._exit,
            "/quit": self._exit,
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
                "(a message that begins with / is written with //)",
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
        text = f"forgotten; {left} messages are left" if done else "there is nothing to undo"
        self._chat.tell("undone", text, done=done, messages=left)

    def _reset(self, rest: str) -> None:
        _nothing("/reset", rest)
        self._chat.reset()
        self._chat.tell("reset", "a new chat", messages=len(self._chat.messages))

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
