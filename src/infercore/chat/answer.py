"""What a model's answer holds: text, thoughts and tool calls, read as it arrives."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import attrs

from infercore.chat.raw import RawText
from infercore.chat.reasoning import ReasoningReader
from infercore.chat.tool_reader import ReadCall, ToolReader
from infercore.values.session import ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from infercore.chat.reasoning import ReasoningFormat
    from infercore.chat.tool_format import ToolFormat
    from infercore.chat.tools import Tools


@attrs.frozen
class Piece:
    """What a piece of an answer's text turned out to be."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class AnswerReader:
    """Reads thoughts first, then calls out of what is no thought.

    ``prompt`` is the rendered chat: a template may open the thought itself, and the ids of calls
    are made from it, so that the same chat gives the same ids. Marks of a thought within a call are
    part of the call. ``forced``: a grammar wrote the calls. ``is_control`` says of a mark whether
    it begins with a control token. ``lead`` may stand before a call. What control tokens wrote is
    left out of text and thoughts.
    """

    def __init__(
        self,
        prompt: str,
        *,
        reasoning: ReasoningFormat | None = None,
        form: ToolFormat | None = None,
        tools: Tools | None = None,
        forced: bool = False,
        is_control: Callable[[str], bool] = lambda _: False,
        lead: str = "",
    ) -> None:
        self._prompt = prompt
        calls = (
            None
            if form is None or tools is None
            else ToolReader(form, tools, forced=forced, lead=lead)
        )
        self._calls = calls
        self._thoughts = (
            None
            if reasoning is None
            else ReasoningReader(
                reasoning,
                inside=reasoning.begins_inside(prompt),
                may_open=lambda: calls is None or not calls.in_call,
                is_control=is_control,
            )
        )
        self.n_calls = 0

    def push(self, text: str | RawText) -> Piece:
        """Return what ``text`` completes."""
        text = RawText.of(text)
        parts = iter([(text, False)]) if self._thoughts is None else self._thoughts.push(text)
        return self._piece(parts)

    def finish(self) -> Piece:
        """Return what was held back, as the text has ended."""
        piece = self._piece([] if self._thoughts is None else self._thoughts.finish())
        if self._calls is None:
            return piece
        rest = self._joined(self._calls.finish())
        return Piece(piece.text + rest.text, piece.reasoning, piece.calls + rest.calls)

    def _piece(self, parts: Iterable[tuple[RawText, bool]]) -> Piece:
        thoughts, read = "", list[str | ReadCall]()
        for (
            text,
            is_thought,
        ) in parts:  # calls are read as parts come: a thought asks where they are
            if is_thought:
                thoughts += text.shown
            elif self._calls is None:
                read.append(text.shown)
            else:
                read += self._calls.push(text)
        answer = self._joined(read)
        return Piece(answer.text, thoughts, answer.calls)

    def _joined(self, read: Iterable[str | ReadCall]) -> Piece:
        text, calls = "", list[ToolCall]()
        for item in read:
            if isinstance(item, str):
                text += item
            else:
                calls.append(ToolCall(id=self._new_id(), name=item.name, arguments=item.arguments))
        return Piece(text, "", tuple(calls))

    def _new_id(self) -> str:
        """Nine letters and digits, which is what the strictest template takes."""
        self.n_calls += 1
        return hashlib.sha256(f"{self.n_calls}\0{self._prompt}".encode()).hexdigest()[:9]
