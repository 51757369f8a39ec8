"""How a model writes tool calls, found out by rendering calls with the model's own template.

A template is shown one call and two calls with names, keys and values that occur nowhere else; what
stands around them is the form. So a template that nobody has seen needs no entry in a list.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs

from infercore.chat.literal import (
    PROBE_ID,
    PROBE_NAMES,
    Literal,
    call_end,
    common_end,
    common_start,
    json_end,
)
from infercore.chat.template import TemplateRefusalError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class Render(Protocol):
    """Renders messages with the tools in question."""

    def __call__(
        self,
        rows: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        """Return the text; raises `InvalidInputError` where the template refuses it."""


JSON: Final = "json"
NAMED: Final = "named"
TAGGED: Final = "tagged"
PYTHON: Final = "python"
HARMONY: Final = "harmony"
BRACED: Final = "braced"
NESTED: Final = "nested"

_NAMES = PROBE_NAMES
_KEYS = ("zqkeyone", "zqkeytwo")
_ANSWER = "zqanswer"
_PROBES = re.compile("|".join((*_NAMES, *_KEYS, _ANSWER, "zqtext", "zqmore", PROBE_ID)))
_ATTRIBUTE = re.compile(r"[^\S\n]?\w+=$")
_USER = {"role": "user", "content": "zquser"}


@attrs.frozen(kw_only=True)
class ToolFormat:
    """The written form of calls.

    ``kind`` is "json" (an object with name and arguments), "named" (a name, then the arguments as
    JSON), "tagged" (a name, then each argument between marks), "nested" (elements within elements,
    each closed by its name), "braced" (a name, then a mapping whose texts stand between ``quote``),
    "python" (a call as Python writes it) or "harmony". ``name_key`` and ``arguments_key`` are the
    keys of a "json" call; None where the name itself is the key. ``one_only``: the template refuses
    several calls in a turn. ``cdata``: texts may stand in CDATA. ``is_described``: the template
    says in words how calls are written, and writes none itself.
    """

    kind: str
    section_open: Literal = attrs.field(factory=Literal.none)
    call_open: Literal = attrs.field(factory=Literal.none)
    after_name: Literal = attrs.field(factory=Literal.none)
    call_close: Literal = attrs.field(factory=Literal.none)
    between: Literal = attrs.field(factory=Literal.none)
    section_close: Literal = attrs.field(factory=Literal.none)
    name_key: str | None = None
    arguments_key: str | None = None
    arg_open: Literal = attrs.field(factory=Literal.none)
    after_key: Literal = attrs.field(factory=Literal.none)
    after_key_of_other: Literal = attrs.field(factory=Literal.none)
    arg_close: Literal = attrs.field(factory=Literal.none)
    quote: str = ""
    one_only: bool = False
    cdata: bool = False
    is_described: bool = False

    @property
    def is_marked(self) -> bool:
        """Whether a call begins with a mark of its own, so that it may stand anywhere in text."""
        return not (self.section_open.is_blank and self.call_open.is_blank)


@attrs.frozen
class _Call:
    name: str
    arguments: Mapping[str, Any]
    id: str

    def row(self, *, as_text: bool) -> dict[str, Any]:
        arguments = json.dumps(self.arguments) if as_text else self.arguments
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


_ONE = _Call(_NAMES[0], {_KEYS[0]: "zqtext", _KEYS[1]: 1723}, PROBE_ID)
_TWO = _Call(_NAMES[1], {_KEYS[0]: "zqmore", _KEYS[1]: 1734}, PROBE_ID)


def _tool(name: str) -> dict[str, Any]:
    properties = {_KEYS[0]: {"type": "string", "description": "a"}}
    properties[_KEYS[1]] = {"type": "integer", "description": "b"}
    parameters = {"type": "object", "properties": properties, "required": [_KEYS[0]]}
    return {
        "type": "function",
        "function": {"name": name, "description": "c", "parameters": parameters},
    }


_TOOLS = [_tool(name) for name in _NAMES]


def renders_tools(render: Render) -> bool:
    """Return whether the template puts tools into its text at all."""
    try:
        return _NAMES[0] in render([_USER], tools=_TOOLS, add_generation_prompt=True)
    except TemplateRefusalError:
        return False


def find_tool_format(render: Render) -> ToolFormat | None:
    """Return how the template writes calls, None where it writes none that could be read back."""
    for as_text in (False, True):
        bodies = [_bodies(render, content, as_text=as_text) for content in ("", None)]
        shown = [body for body in bodies if body is not None]
        for one, two in shown:
            found = _format_of(one, two)
            if found is not None and not _PROBES.search(repr(found)):
                return found
        if shown:
            return None  # in JSON text these templates would write something else than models do
    return None


def renders_calls(render: Render) -> bool:
    """Return whether the template puts an assistant's calls into its text at all."""
    shown = (_Shown(render, content=c, as_text=t) for t in (False, True) for c in ("", None))
    return any(each.body([_ONE]) is not None for each in shown)


def empty_content(render: Render) -> str | None:
    """Return the content beside which the template writes calls where there is no text."""
    for as_text in (False, True):
        if _Shown(render, content="", as_text=as_text).body([_ONE]) is not None:
            return ""
        if _Shown(render, content=None, as_text=as_text).body([_ONE]) is not None:
            return None
    return ""


def _bodies(render: Render, content: str | None, *, as_text: bool) -> tuple[str, str | None] | None:
    shown = _Shown(render, content=content, as_text=as_text)
    one = shown.body([_ONE])
    return None if one is None else (one, shown.body([_ONE, _TWO]))


@attrs.frozen(kw_only=True)
class _Shown:
    """What a template writes for an assistant's turn with calls."""

    render: Render = attrs.field(kw_only=False)
    content: str | None
    as_text: bool

    def body(self, calls: Sequence[_Call]) -> str | None:
        """Return the turn that holds ``calls``, without what begins and ends every turn."""
        rows = [call.row(as_text=self.as_text) for call in calls]
        turn = self._turn({"role": "assistant", "content": self.content, "tool_calls": rows})
        plain = self._turn({"role": "assistant", "content": _ANSWER})
        if turn is None or plain is None or calls[0].name not in turn:
            return None
        before, _, tail = plain.partition(_ANSWER)
        start = len(common_start(turn, before))
        start = min(start, turn.index(calls[0].name))
        start = _whole_word(turn, _whole_mark(turn, start))
        body = turn[start:]
        return body.removesuffix(tail)

    def _turn(self, answer: Mapping[str, Any]) -> str | None:
        try:
            text = self.render([_USER, answer], tools=_TOOLS, add_generation_prompt=False)
        except TemplateRefusalError:
            return None
        at = text.rfind(_USER["content"])
        return text[at + len(_USER["content"]) :]


def _whole_mark(text: str, at: int) -> int:
    """Go back to the beginning of a mark in angle or square brackets that ``at`` stands inside."""
    for opening, closing in ("<>", "[]"):
        begin = text.rfind(opening, 0, at)
        if begin >= 0 and closing not in text[begin:at]:
            return begin
    return at


def _whole_word(text: str, at: int) -> int:
    """Go back to the beginning of an attribute, blank included, whose value begins at ``at``."""
    found = _ATTRIBUTE.search(text, 0, at)
    return at if found is None else found.start()


def _format_of(one: str, two: str | None) -> ToolFormat | None:
    for read in _READERS:
        found = read(one, two)
        if found is not None:
            return found
    return None


def _harmony(one: str, _two: str | None) -> ToolFormat | None:
    if "<|channel|>" in one and f"to=functions.{_ONE.name}" in one:
        return ToolFormat(kind=HARMONY, one_only=True)
    return None


# -- where a call begins and ends ------------------------------------------------------------------


@attrs.frozen
class _Frame:
    """The fixed parts around one call, and between two."""

    section_open: str
    call_open: str
    call_close: str
    between: str
    section_close: str
    one_only: bool

    def parts(self) -> dict[str, Any]:
        return {
            "section_open": Literal.of(self.section_open),
            "call_open": Literal.of(self.call_open),
            "call_close": Literal.of(self.call_close),
            "between": Literal.of(self.between),
            "section_close": Literal.of(self.section_close),
            "one_only": self.one_only,
        }


def _frame(one: str, spans: Sequence[tuple[int, int]], two: str | None) -> _Frame:
    """Cut what stands around calls into what is around each and what is around all."""
    (start, end), *more = spans
    text = two if two is not None and more else one
    before, after = text[:start], text[(more[0][1] if more else end) :]
    if not more:
        return _Frame("", before, after, "", "", one_only=True)
    before, middle, after = (
        part.replace(_NAMES[1], _NAMES[0]) for part in (before, text[end : more[0][0]], after)
    )
    close = _common_prefix(middle, after)
    opening = _common_suffix(before, middle[len(close) :])
    return _Frame(
        before[: len(before) - len(opening)],
        opening,
        close,
        middle[len(close) : len(middle) - len(opening)],
        after[len(close) :],
        one_only=False,
    )


def _common_prefix(a: str, b: str) -> str:
    """The same beginning of both, cut where a mark begins that differs."""
    common = common_start(a, b)
    return common if common in (a, b) else common[: _whole_mark(common, len(common))]


def _common_suffix(a: str, b: str) -> str:
    """The same end of both, cut where a mark ends that differs."""
    common = common_end(a, b)
    if len(common) == len(b):
        return common
    begin = min((at for mark in "<[" if (at := common.find(mark)) >= 0), default=len(common))
    ends = [at for mark in ">]" if (at := common.find(mark)) >= 0]
    return common[min(ends) + 1 :] if ends and min(ends) < begin else common


# -- the kinds -------------------------------------------------------------------------------------


def _json_form(one: str, two: str | None) -> ToolFormat | None:
    found = _json_call(one, _ONE)
    if found is None:
        return None
    span, keys = found
    second = None if two is None else _json_call(two, _TWO)
    first = None if two is None else _json_call(two, _ONE)
    spans = [span] if first is None or second is None else [first[0], second[0]]
    return ToolFormat(
        kind=JSON, name_key=keys[0], arguments_key=keys[1], **_frame(one, spans, two).parts()
    )


def _json_call(
    text: str, call: _Call
) -> tuple[tuple[int, int], tuple[str | None, str | None]] | None:
    """Find the object that holds the call's name and arguments; return its place and its keys."""
    for start, end, value in _objects(text):
        if call.name in value and dict(value[call.name]) == dict(call.arguments):
            return (start, end), (None, None)
        name_key = next((key for key, item in value.items() if item == call.name), None)
        arguments_key = next((k for k, v in value.items() if v == dict(call.arguments)), None)
        if name_key is not None and arguments_key is not None:
            return (start, end), (name_key, arguments_key)
        function = value.get("function")
        if isinstance(function, dict) and function.get("name") == call.name:
            return None  # nested as the API has it: no template that is known writes it
    return None


def _objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    at = text.find("{")
    while at >= 0:
        end = json_end(text, at)
        if end > 0:
            try:
                value = json.loads(text[at:end])
            except ValueError:
                value = None
            if isinstance(value, dict):
                yield at, end, value
        at = text.find("{", at + 1)


def _named_call(text: str, call: _Call) -> tuple[int, int, int, int] | None:
    """Find name and arguments; return the places where each begins and ends."""
    name = text.rfind(call.name)
    for start, end, value in _objects(text):
        if value == dict(call.arguments):
            name = text.rfind(call.name, 0, start)
            return (name, name + len(call.name), start, end) if name >= 0 else None
    return None


def _named_form(one: str, two: str | None) -> ToolFormat | None:
    single = _named_call(one, _ONE)
    if single is None:
        return None
    first = None if two is None else _named_call(two, _ONE)
    second = None if two is None else _named_call(two, _TWO)
    places = [single] if first is None or second is None else [first, second]
    spans = [(place[0], place[3]) for place in places]
    after_name = one[single[1] : single[2]]
    frame = _frame(one, spans, two)
    return ToolFormat(kind=NAMED, after_name=Literal.of(after_name), **frame.parts())


def _tagged_call(text: str, call: _Call) -> tuple[int, ...] | None:
    """Return where name, keys and values begin and end, in this order."""
    key_one = text.find(_KEYS[0], max(0, text.find(call.name)))
    name = text.rfind(call.name, 0, max(0, key_one))
    if min(name, key_one) < 0:
        return None
    places, at = [name, name + len(call.name)], key_one
    for word in (_KEYS[0], str(call.arguments[_KEYS[0]]), _KEYS[1], str(call.arguments[_KEYS[1]])):
        at = text.find(word, at)
        if at < 0:
            return None
        places += [at, at + len(word)]
        at += len(word)
    return tuple(places)


def _tagged_form(one: str, two: str | None) -> ToolFormat | None:
    single = _tagged_call(one, _ONE)
    if single is None:
        return None
    _, name_end, key, key_end, value, value_end, key2, key2_end, value2, value2_end = single
    to_first, between = one[name_end:key], one[value_end:key2]
    if "(" in to_first or one[key_end:value].strip(" '\"") == "=":
        return None
    arg_close = _common_prefix(between, one[value2_end:])
    arg_open = between[len(arg_close) :]
    if not to_first.endswith(arg_open):
        arg_open = _common_suffix(to_first, arg_open)
        arg_close = between[: len(between) - len(arg_open)]
    if not one[value2_end:].startswith(arg_close) or not arg_close.strip():
        return None
    first = None if two is None else _tagged_call(two, _ONE)
    second = None if two is None else _tagged_call(two, _TWO)
    places = [single] if first is None or second is None else [first, second]
    spans = [(place[0], place[9] + len(arg_close)) for place in places]
    if any(a[1] > b[0] for a, b in pairwise(spans)):
        return None
    return ToolFormat(
        kind=TAGGED,
        after_name=Literal.of(to_first[: len(to_first) - len(arg_open)]),
        arg_open=Literal.of(arg_open),
        after_key=Literal.of(one[key_end:value]),
        after_key_of_other=Literal.of(one[key2_end:value2]),
        arg_close=Literal.of(arg_close),
        **_frame(one, spans, two).parts(),
    )


def _nested_form(one: str, two: str | None) -> ToolFormat | None:
    """Arguments as ``<key>value</key>``, whatever stands before the angle brackets."""
    single = _tagged_call(one, _ONE)
    if single is None:
        return None
    _, name_end, key, key_end, value, value_end, key2, _, _, value2_end = single
    behind = one[key_end:value]
    closing, found, opening = one[value_end:key2].partition(f"{_KEYS[0]}{behind}")
    to_first = one[name_end:key]
    if not found or not opening.strip() or not to_first.endswith(opening):
        return None
    close = f"{closing}{_KEYS[1]}{behind}"
    if not behind.strip() or not one.startswith(close, value2_end):
        return None
    first = None if two is None else _tagged_call(two, _ONE)
    second = None if two is None else _tagged_call(two, _TWO)
    places = [single] if first is None or second is None else [first, second]
    return ToolFormat(
        kind=NESTED,
        after_name=Literal.of(to_first[: len(to_first) - len(opening)]),
        arg_open=Literal.of(opening),
        after_key=Literal.of(behind),
        arg_close=Literal.of(closing),
        **_frame(one, [(place[0], place[9] + len(close)) for place in places], two).parts(),
    )


def _braced_call(text: str, call: _Call) -> tuple[int, int, str] | None:
    """Return where ``name{key:"text",key:1}`` begins and ends, and what stands for the quotes."""
    begin = text.find(f"{call.name}{{{_KEYS[0]}:")
    if begin < 0:
        return None
    before = begin + len(f"{call.name}{{{_KEYS[0]}:")
    word = str(call.arguments[_KEYS[0]])
    at = text.find(word, before)
    quote = text[before:at]
    tail = f"{word}{quote},{_KEYS[1]}:{call.arguments[_KEYS[1]]}}}"
    return (begin, at + len(tail), quote) if quote and text.startswith(tail, at) else None


def _braced_form(one: str, two: str | None) -> ToolFormat | None:
    single = _braced_call(one, _ONE)
    if single is None:
        return None
    first = None if two is None else _braced_call(two, _ONE)
    second = None if two is None else _braced_call(two, _TWO)
    places = [single] if first is None or second is None else [first, second]
    spans = [place[:2] for place in places]
    return ToolFormat(kind=BRACED, quote=single[2], **_frame(one, spans, two).parts())


def _python_form(one: str, two: str | None) -> ToolFormat | None:
    single = _python_call(one, _ONE)
    if single is None:
        return None
    first = None if two is None else _python_call(two, _ONE)
    second = None if two is None else _python_call(two, _TWO)
    spans = [single] if first is None or second is None else [first, second]
    return ToolFormat(kind=PYTHON, **_frame(one, spans, two).parts())


def _python_call(text: str, call: _Call) -> tuple[int, int] | None:
    start = text.find(f"{call.name}(")
    if start < 0:
        return None
    end = call_end(text, start + len(call.name))
    return (start, end) if end > 0 else None


_READERS = (
    _harmony,
    _json_form,
    _named_form,
    _braced_form,
    _tagged_form,
    _nested_form,
    _python_form,
)
