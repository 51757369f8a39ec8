"""A chat: its messages beside the session that holds them, and the file that keeps both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from infercore.cli.decoding import need_template
from infercore.cli.terminal import print_json_line, tell
from infercore.engine import atomic, blob
from infercore.errors import InvalidInputError, ModelNotFoundError, SnapshotError
from infercore.values.manifest import ContextManifest
from infercore.values.session import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infercore import Model, Session, StreamChunk
    from infercore.cli.generate import Show


KIND = "chat"


@attrs.frozen(kw_only=True)
class Saved:
    """What a file holds: messages, the template that was given, and the session's state."""

    messages: list[dict[str, str]]
    template: str | None
    snapshot: Snapshot


def write(
    path: str, session: Session, messages: list[dict[str, str]], template: str | None
) -> Snapshot:
    """Write the chat to ``path``; return the state that was written.

    Raises OSError where it cannot be written; an older file stays then.
    """
    snapshot = session.snapshot()
    header = {
        "kind": KIND,
        "messages": messages,
        "template": template,
        "manifest": snapshot.manifest.to_dict(),
        "resident_tokens": snapshot.resident_tokens,
    }
    atomic.write_whole(path, blob.pack(header, snapshot.data), private=True)
    return snapshot


def read(path: str) -> Saved:
    """Return what `save` wrote.

    Raises `ModelNotFoundError` where there is no file, `SnapshotError` for another or a damaged
    one.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no saved chat at {path}; check the path", path=path
        ) from error
    header, payload, _ = blob.unpack(data)
    if header.get("kind") != KIND:
        raise SnapshotError(
            f"{path} holds a saved {header.get('kind')}, not a chat; give a file that /save wrote",
            reason="kind",
        )
    try:
        return _saved(header, bytes(payload))
    except (InvalidInputError, LookupError, TypeError, ValueError) as error:
        raise SnapshotError(
            f"the header of {path} is malformed ({error}); save the chat again", reason="header"
        ) from error


def _saved(header: dict[str, Any], payload: bytes) -> Saved:
    messages = header["messages"]
    for message in messages:
        if set(message) != {"role", "content"} or not all(map(_is_text, message.values())):
            raise ValueError("a message is not a role and a text")
    template = header["template"]
    if template is not None and not _is_text(template):
        raise ValueError("the template is not text")
    return Saved(
        messages=list(messages),
        template=template,
        snapshot=Snapshot(
            manifest=ContextManifest.from_dict(header["manifest"]),
            data=payload,
            resident_tokens=int(header["resident_tokens"]),
        ),
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


@attrs.define(kw_only=True)
class Chat:
    """The messages so far and how the next one is answered.

    ``fields`` are those of `Session.chat` beside the messages and the ``decode``'s.
    ``interrupted``: Ctrl-C ended the last answer. ``n_dropped`` is how many of the oldest turns
    the last answer was given without.
    """

    model: Model
    session: Session
    show: Show
    decode: dict[str, Any]
    fields: dict[str, Any]
    messages: list[dict[str, str]] = attrs.field(factory=list)
    interrupted: bool = False
    n_turns: int = 0
    n_dropped: int = 0
    broke_off: bool = False

    def begin(self, system: str | None, saved: str | None) -> None:
        """Start with the chat in the file ``saved`` and the system message that was given."""
        if saved is not None:
            self.load(saved)
        need_template(self.model, self.fields)
        if system is not None:
            self.set_system(system)

    @property
    def system(self) -> str | None:
        """The system message, None where there is none."""
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    def set_system(self, text: str | None) -> None:
        """Put ``text`` in the place of the system message; None removes it."""
        rest = self.messages[1:] if self.system is not None else self.messages
        self.messages = list(rest)
        if text is not None:
            self.messages.insert(0, {"role": "system", "content": text})

    def say(self, text: str) -> None:
        """Add a message and show the answer, which is added too, cut short or not.

        Where it fails, or is interrupted before its first token, the chat is as before.
        """
        asked = [*self.messages, {"role": "user", "content": text}]

        def answering() -> Iterator[StreamChunk]:
            yield from self.session.chat(asked, **self.fields, **self.decode)

        number = self.n_turns
        turn = self.show.run(self.session, answering, number=number)
        self.interrupted = turn.interrupted
        if turn.text or not turn.interrupted:
            self.messages = [*asked, {"role": "assistant", "content": turn.text}]
            self.n_turns += 1
        self._tell_of_dropping([asked[place]["role"] for place in turn.dropped_messages])
        self.broke_off |= self.show.broke_off(turn, self.decode)
        self.show.end(turn, number=number)

    def _tell_of_dropping(self, roles: list[str]) -> None:
        """Say how many turns the model does not see any more, each time that it gets more."""
        n_dropped = roles.count("user")
        if n_dropped <= self.n_dropped:
            self.n_dropped = n_dropped  # a /drop, /undo or /reset made room
            return
        oldest = "the oldest turn" if n_dropped == 1 else f"the {n_dropped} oldest turns"
        how = "; use --n-ctx for a larger window, or --overflow error to refuse instead"
        tell(f"the window is full: the model no longer sees {oldest}{how * (not self.n_dropped)}")
        self.n_dropped = n_dropped

    def undo(self) -> bool:
        """Forget the last message and its answer; False where there is none."""
        places = [i for i, row in enumerate(self.messages) if row["role"] == "user"]
        if places:
            self.messages = self.messages[: places[-1]]
        return bool(places)

    def drop(self, n_turns: int) -> int:
        """Forget the oldest turns, never the system message; return how many there were."""
        first = self.messages[:1] if self.system is not None else []
        rest = self.messages[len(first) :]
        places = [i for i, row in enumerate(rest) if row["role"] == "user"]
        n_dropped = min(n_turns, len(places))
        end = [*places, len(rest)][n_dropped]
        self.messages = [*first, *(rest[end:] if n_dropped else rest)]
        return n_dropped

    def reset(self) -> None:
        """Forget all but the system message."""
        system = self.system
        self.messages = []
        self.set_system(system)

    def save(self, path: str) -> Snapshot:
        """Write the chat to a file; see `write`."""
        template = self.fields.get("chat_template")
        return write(path, self.session, self.messages, template)

    def load(self, path: str) -> Snapshot:
        """Go on with the chat in a file; where it is refused, the messages are as before.

        A template that was given stays, else the saved one counts.
        """
        saved = read(path)
        self.session.restore(saved.snapshot)
        self.messages = saved.messages
        if saved.template is not None:
            self.fields.setdefault("chat_template", saved.template)
        return saved.snapshot

    def tell(self, kind: str, text: str, **facts: Any) -> None:
        """Tell what a command did: a line on standard error, or of JSON on standard output."""
        if self.show.as_json:
            print_json_line({"type": kind, **facts})
        else:
            tell(text)
