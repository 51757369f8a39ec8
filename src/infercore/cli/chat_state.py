"""A chat's messages beside the session that holds them, and the turns that add to both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from infercore.cli import chat_file
from infercore.cli.decoding import need_template
from infercore.cli.output import print_json_line
from infercore.cli.terminal import tell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infercore import Model, Session, Snapshot, StreamChunk
    from infercore.cli.turns import Show


@attrs.define(kw_only=True)
class Chat:
    """The messages so far and how the next one is answered.

    ``fields`` are those of `Session.chat` beside the messages and the ``decode``'s.
    ``interrupted`` tells that Ctrl-C ended the last answer.
    """

    model: Model
    session: Session
    show: Show
    decode: dict[str, Any]
    fields: dict[str, Any]
    messages: list[dict[str, str]] = attrs.field(factory=list)
    interrupted: bool = False
    n_turns: int = 0
    has_told_of_dropping: bool = False

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
        if turn.dropped_messages and not self.has_told_of_dropping:
            self.has_told_of_dropping = True
            tell(
                "the window is full: from now on the oldest turns are left out of what the model "
                "sees; --n-ctx gives more room, --overflow error ends the chat instead"
            )
        self.show.end(turn, number=number)

    def undo(self) -> bool:
        """Forget the last message and its answer; False where there is none."""
        places = [i for i, row in enumerate(self.messages) if row["role"] == "user"]
        if places:
            self.messages = self.messages[: places[-1]]
        return bool(places)

    def reset(self) -> None:
        """Forget all but the system message."""
        system = self.system
        self.messages = []
        self.set_system(system)

    def save(self, path: str) -> Snapshot:
        """Write the chat to a file; see `chat_file.save`."""
        template = self.fields.get("chat_template")
        return chat_file.save(path, self.session, self.messages, template)

    def load(self, path: str) -> Snapshot:
        """Go on with the chat in a file; where it is refused, the messages are as before.

        A template that was given stays, else the saved one counts.
        """
        saved = chat_file.read(path)
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
