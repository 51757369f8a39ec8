"""Where a template reads what a message holds, found out by rendering with it.

A template has its own place for a thought (a field, a kind of content, marks in the text), takes
parts in the turns of some roles alone, and may leave out the text beside calls. A message is put
into the form of which the most shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

from infercore.chat.literal import PROBE_ID, PROBE_NAMES
from infercore.chat.messages import THOUGHT_KEYS, thought_of, with_text_arguments
from infercore.chat.template import TemplateRefusalError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from infercore.chat.reasoning import ReasoningFormat
    from infercore.chat.tool_format import Render

Row = dict[str, Any]

_USER: Row = {"role": "user", "content": "zquser"}
_TEXT, _THOUGHT, _WORD = "zqanswer", "zqthought", "zqvalue"
_PARTS = ("zqpartone", "zqparttwo")
_SCHEMA = {"type": "object", "properties": {"k": {"type": "string", "description": "k"}}}
_FUNCTION = {"name": PROBE_NAMES[0], "description": "d", "parameters": _SCHEMA}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_CALL: Row = {
    "id": PROBE_ID,
    "type": "function",
    "function": {"name": PROBE_NAMES[0], "arguments": {"k": _WORD}},
}
_CALLED: Row = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT: Row = {
    "role": "tool",
    "tool_call_id": PROBE_ID,
    "name": PROBE_NAMES[0],
    "content": "zqresult",
}


class Places:
    """What a template does with the content, the thought and the calls of a message."""

    def __init__(
        self,
        render: Render,
        thoughts: Callable[[], ReasoningFormat | None],
        beside_calls: Callable[[], str | None],
    ) -> None:
        self._render = render
        self._thoughts = thoughts
        self._beside_calls = beside_calls
        self.takes_parts = lru_cache(maxsize=16)(self._takes_parts)
        self.drops = lru_cache(maxsize=16)(self._drops)
        self.shows = lru_cache(maxsize=16)(self._shows)
        self._best = lru_cache(maxsize=8)(self._best_arrangement)

    def _shown(self, rows: Sequence[Mapping[str, Any]], *, tools: bool) -> str:
        """Return the text of ``rows``, "" where the template refuses them."""
        return self._tried(rows, tools=tools) or (
            self._tried(with_text_arguments(rows), tools=True) if tools else ""
        )

    def _tried(self, rows: Sequence[Mapping[str, Any]], *, tools: bool) -> str:
        given = _TOOLS if tools else None
        try:
            return self._render(rows, tools=given, add_generation_prompt=False)
        except TemplateRefusalError:
            return ""

    def _in_turn(self, role: str, content: Any) -> Iterator[str]:
        """Yield the chats with a message of ``role`` that the template takes."""
        row = {**_RESULT, "role": role, "content": content}
        chats = [[row], [row, _USER], [_USER, row], [_USER, row, _USER], [_USER, _CALLED, row]]
        for rows in reversed(chats) if role == "tool" else chats:
            text = self._shown(rows, tools=_CALLED in rows)
            if text:
                yield text

    def _drops(self, role: str) -> bool:
        """Return whether the template takes messages of this role and leaves out what they say."""
        return not self._shows(role) and any(self._in_turn(role, _TEXT))

    def _shows(self, role: str) -> bool:
        """Return whether what messages of this role say makes a difference to the text."""
        return list(self._in_turn(role, _TEXT)) != list(self._in_turn(role, _PARTS[0]))

    @cached_property
    def takes_systems(self) -> bool:
        """Whether system messages show that are not the first message, or not the only one."""
        first, other = ({"role": "system", "content": text} for text in _PARTS)
        chats = [[first, other, _USER], [first, _USER, other, _USER], [_USER, other, _USER]]
        texts = [self._shown(rows, tools=False) or self._shown(rows, tools=True) for rows in chats]
        wanted = [_PARTS, _PARTS, _PARTS[1:]]
        return all(
            all(part in text for part in parts) for text, parts in zip(texts, wanted, strict=True)
        )

    @cached_property
    def takes_two(self) -> bool:
        """Whether both of two calls of a turn show, as far as calls show at all."""
        other = {**_CALL, "function": {**_CALL["function"], "arguments": {"k": _TEXT}}}
        row = {**_CALLED, "content": self._beside_calls()}
        texts = [
            self._shown([_USER, {**row, "tool_calls": calls}], tools=True)
            for calls in ([_CALL], [_CALL, other])
        ]
        return _WORD not in texts[0] or _TEXT in texts[1]

    def _takes_parts(self, role: str) -> bool:
        """Return whether the template writes the parts of this role's content one after another."""
        parts = [{"type": "text", "text": text} for text in _PARTS]
        for text in self._in_turn(role, parts):
            _, first, behind = text.partition(_PARTS[0])
            between, second, _ = behind.partition(_PARTS[1])
            if first or second:
                return bool(first and second) and not between.strip()
        return False

    def arranged(self, rows: Sequence[Row]) -> list[Row]:
        """Return the messages with those of the assistant in the form that shows them whole."""
        out = [row for given in rows for row in self._arranged(given)]
        if any(_BLOCKS in _mapping(row) for row in out):  # a template that wants either form in all
            return [_in_blocks(row) if row["role"] == "assistant" else row for row in out]
        return out

    def _arranged(self, row: Row) -> list[Row]:
        thought = thought_of(row) if row["role"] == "assistant" else ""
        has_text, has_calls = bool(row.get("content")), bool(row.get("tool_calls"))
        if not thought and not (has_text and has_calls):
            return [row]
        arrange = self._best(bool(thought), has_text, has_calls)
        return [row] if arrange is None else arrange(row, thought)

    def _best_arrangement(self, thought: bool, text: bool, calls: bool) -> _Arrange | None:  # noqa: FBT001
        """Return the first arrangement of which most shows; None if the plain one does as well."""
        row: Row = {"role": "assistant", "content": _TEXT if text else ""}
        row |= {"tool_calls": [_CALL]} if calls else {}
        row |= dict.fromkeys(THOUGHT_KEYS[:2], _THOUGHT) if thought else {}
        best, most = None, self._score([row])
        wanted = text + calls, int(thought)
        for arrange in self._arrangements(thought=thought, split=text and calls):
            if most == wanted:
                break
            score = self._score(arrange(row, _THOUGHT if thought else ""))
            if score > most:
                best, most = arrange, score
        return best

    def _score(self, rows: Sequence[Row]) -> tuple[int, int]:
        """How much of text and calls shows, and whether the thought does."""
        calls = any(row.get("tool_calls") for row in rows)
        shown = self._shown([_USER, *rows, *([_RESULT] if calls else [])], tools=calls)
        if calls:  # what stands beside calls is to show when the answer is there, too
            answered = [_RESULT, {"role": "assistant", "content": "zqend"}, _USER]
            later = self._shown([_USER, *rows, *answered], tools=True)
            is_text = _holds(shown, _TEXT) and (_holds(later, _TEXT) or not later)
        else:
            is_text = _holds(shown, _TEXT)
        return is_text + (_WORD in shown), int(_holds(shown, _THOUGHT))

    def _arrangements(self, *, thought: bool, split: bool) -> Iterator[_Arrange]:
        places: list[_Place] = [_with_key]
        if thought:
            places += [_with_thinking, _as_part, _in_blocks]
            places += [self._in_marks] if self._reads_marks else []
        splits = [_whole, *([_behind_text, _before_text] if split else [])]
        for cut in splits:
            for place in places:
                yield partial(self._arrange, cut, place)

    def _arrange(self, cut: _Cut, place: _Place, row: Row, thought: str) -> list[Row]:
        parts = cut(row, thought)
        for part, _ in parts[1:]:  # the calls, whose text stands before them
            part["content"] = self._beside_calls()
        return [place(part, own) for part, own in parts]

    @cached_property
    def _reads_marks(self) -> bool:
        """Whether the template takes thoughts out of the text of earlier turns, by their marks."""
        if self._thoughts() is None:
            return False
        row = self._in_marks({"role": "assistant", "content": _TEXT}, _THOUGHT)
        now, later = (self._shown([_USER, row, *more], tools=False) for more in ([], [_USER]))
        return _THOUGHT in now and _TEXT in later and _THOUGHT not in later

    def _in_marks(self, row: Row, thought: str) -> Row:
        form = self._thoughts()
        if form is None or not thought:
            return row
        text = f"{form.open}\n{thought}\n{form.close}\n\n"
        content = row["content"]
        if isinstance(content, list):
            return {**row, "content": [{"type": "text", "text": text}, *content]}
        return {**row, "content": f"{text}{content or ''}"}


_Place = Callable[[Row, str], Row]
_Cut = Callable[[Row, str], "list[tuple[Row, str]]"]
_Arrange = Callable[[Row, str], "list[Row]"]
_BLOCKS = "blocks"


def _holds(shown: str, word: str) -> bool:
    """Whether the word shows, and not as a value of a mapping that was written out."""
    at = shown.find(word)
    return at >= 0 and shown[at - 1 : at] not in ("'", '"')


def _whole(row: Row, thought: str) -> list[tuple[Row, str]]:
    return [(row, thought)]


def _behind_text(row: Row, thought: str) -> list[tuple[Row, str]]:
    """The thought and the text, then the calls in a message of their own."""
    plain = {k: v for k, v in row.items() if k not in THOUGHT_KEYS}
    return [(_without(row, "tool_calls"), thought), ({**plain, "content": ""}, "")]


def _before_text(row: Row, thought: str) -> list[tuple[Row, str]]:
    """The text, then the thought with the calls that it leads to."""
    return [(_without(row, "tool_calls", *THOUGHT_KEYS), ""), ({**row, "content": ""}, thought)]


def _without(row: Row, *keys: str) -> Row:
    return {key: value for key, value in row.items() if key not in keys}


def _with_key(row: Row, _thought: str) -> Row:
    return row


def _with_thinking(row: Row, thought: str) -> Row:
    return {**row, "thinking": thought} if thought else row


def _as_part(row: Row, thought: str) -> Row:
    """A part of kind "thinking", as Mistral's models have it."""
    if not thought:
        return row
    content = row["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    parts = [part for part in parts if part["text"]]
    return {**row, "content": [{"type": "thinking", "thinking": thought}, *parts]}


def _in_blocks(row: Row, thought: str = "") -> Row:
    """A mapping of blocks, as Apertus has it."""
    content = row["content"]
    if isinstance(content, dict):
        return row
    texts = [part["text"] for part in content] if isinstance(content, list) else [content]
    blocks = [{"type": "thoughts", "text": thought}] if thought else []
    blocks += [{"type": "response", "text": text} for text in texts if text]
    return {**row, "content": {_BLOCKS: blocks}}


def _mapping(row: Row) -> Mapping[str, Any]:
    content = row.get("content")
    return content if isinstance(content, dict) else {}
