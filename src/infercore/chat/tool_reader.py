"""Reads tool calls out of a text that arrives in pieces; what is none stays text."""

from __future__ import annotations

import re
import string
from typing import TYPE_CHECKING, Any

import attrs

from infercore.chat.literal import (
    MORE,
    NO,
    Literal,
    Scan,
    call_end,
    common_end,
    common_start,
    json_end,
    skip_space,
)
from infercore.chat.notation import ITEM, Marks, braced, element, inner
from infercore.chat.raw import RawText
from infercore.chat.tool_format import BRACED, HARMONY, JSON, NAMED, NESTED, PYTHON, TAGGED
from infercore.chat.tools import typed
from infercore.chat.written import AmbiguousError, from_json, from_json_call, from_python, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infercore.chat.tool_format import ToolFormat
    from infercore.chat.tools import Tools

_BRACKETS = {JSON: "{", NAMED: "{", HARMONY: "{", PYTHON: "("}
_LETTERS = string.ascii_letters
_NAME = re.compile(r"[^\s<>()\[\]{}\"'=:,|]+")
_HARMONY_OPEN = re.compile(
    r"(?:<\|start\|>assistant)?"
    r"(?:\s*to=(?:functions\.)?(?P<before>[\w.-]+))?"
    r"<\|channel\|>(?:commentary|analysis)"
    r"(?:\s+to=(?:functions\.)?(?P<after>[\w.-]+))?"
    r"\s*(?:<\|constrain\|>)?\s*(?:json|code)?<\|message\|>"
)
_HARMONY_MARKS = ("<|start|>assistant", " to=", "<|channel|>commentary")
_BESIDE = {
    "id",
    "type",
    "tool_call_id",
    "index",
}  # keys of a call that say nothing of its arguments
_MAX_HEADER = 200  # characters that a harmony header may take before it is text after all


@attrs.frozen
class ReadCall:
    """A call as it was written: a tool's name, and arguments that its schema accepts."""

    name: str
    arguments: dict[str, Any]


@attrs.frozen
class _Parsed:
    """Calls that begin at one place, and where they end; ``end`` may be `MORE` or `NO`.

    ``is_text``: a whole call ends there, but no valid one. ``takes_blanks``: those behind the end
    belong to it.
    """

    calls: tuple[ReadCall, ...]
    end: int
    is_text: bool = False
    takes_blanks: bool = False


class ToolReader:
    """Parts calls from the text around them.

    ``push`` takes the next piece of text and returns text and calls in their order; ``finish``
    returns the rest. A call is given out once it is complete and valid: its tool is one of
    ``tools`` and the schema accepts its arguments. Otherwise its text is given out as it came,
    marks included, so that text and calls together always account for every character. A call that
    is whole but not valid is text to its end: nothing within it is read as a call. ``forced``: a
    grammar wrote the text. ``lead`` may stand before a call, and belongs to it then. What control
    tokens wrote is no text.
    """

    def __init__(
        self, form: ToolFormat, tools: Tools, *, forced: bool = False, lead: str = ""
    ) -> None:
        self._form = form
        self._tools = tools
        self._forced = forced
        self._lead = "" if form.kind == HARMONY else lead
        self._raw = RawText("", "")
        self._at_start = True
        self._in_section = False
        self._behind_call = False
        self._waits = False
        self._may_separate = False  # behind a JSON call without marks: ";" and the next one
        self._takes_blanks = False  # behind a call, those that are still to come are its own
        self._scan: Scan | None = None  # of arguments that are not closed yet
        self._openings = _openings(form)
        self._is_marked = bool(self._openings)
        if self._lead:
            self._openings.append(self._lead)
        self._parse: Callable[[str, int, bool], _Parsed] = (
            self._harmony if form.kind == HARMONY else self._section
        )

    @property
    def in_call(self) -> bool:
        """Whether what is held back may be a call, whose opening is there."""
        return self._waits

    @property
    def _held(self) -> str:
        return self._raw.text

    def push(self, text: str | RawText) -> list[str | ReadCall]:
        """Return what ``text`` completes."""
        self._raw += RawText.of(text)
        return self._read(final=False)

    def finish(self) -> list[str | ReadCall]:
        """Return what was held back: the text has ended."""
        out = self._read(final=True)
        if self._held:
            self._give_text(out, len(self._held))
        return out

    def _read(self, *, final: bool) -> list[str | ReadCall]:
        out: list[str | ReadCall] = []
        self._waits = False
        self._drop_blanks()
        while self._held:
            if self._is_open() and not final:
                self._waits = True
                break
            if not self._behind_call:
                at, certain = self._candidate(final=final)
                if at > 0:
                    self._give_text(out, at)
                    continue
                if not certain:
                    break  # the beginning of an opening, perhaps
            was_behind = self._behind_call
            parsed = self._parse(self._held, 0, final)
            if parsed.end == MORE:
                self._waits = not was_behind
                self._scan = None if was_behind else self._begun()
                break
            if parsed.end == NO or parsed.is_text:
                if parsed.is_text:
                    text = self._held[: parsed.end].rstrip()  # blanks may be those of the next call
                    self._give_text(out, max(1, len(text)))
                elif not was_behind:
                    self._give_text(out, self._refused_length())
                self._behind_call = False
                continue
            out.extend(parsed.calls)
            self._raw = self._raw.after(parsed.end)
            self._takes_blanks = parsed.takes_blanks
            self._drop_blanks()
            self._at_start = True  # another call may follow at once
            self._may_separate = self._form.kind == JSON and not self._is_marked
        return out

    def _drop_blanks(self) -> None:
        """Take blanks behind a call for its own, where its mark ends in some."""
        if self._takes_blanks:
            self._raw = self._raw.after(skip_space(self._held, 0))
            self._takes_blanks = not self._held

    def _is_open(self) -> bool:
        """Whether arguments have begun, and do not end in what is held."""
        if self._scan is None or not self._scan.is_open(self._held):
            self._scan = None
        return self._scan is not None

    def _begun(self) -> Scan | None:
        """Follow the arguments that have begun, so that they are read once they are whole."""
        bracket = _BRACKETS.get(self._form.kind)
        at = -1 if bracket is None else self._held.find(bracket)
        scan = Scan(at, python=self._form.kind == PYTHON) if at >= 0 else None
        return scan if scan is not None and scan.is_open(self._held) else None

    def _give_text(self, out: list[str | ReadCall], n: int) -> None:
        self._scan = None
        text, self._raw = self._raw.first(n).shown, self._raw.after(n)
        if text.strip():
            self._at_start = self._may_separate = False
        if out and isinstance(out[-1], str):
            out[-1] += text
        else:
            out.append(text)

    def _refused_length(self) -> int:
        """How much of what is held is text for certain: up to the next place to look at."""
        begin = skip_space(self._held, 0) + 1
        return min(begin, len(self._held))

    def _candidate(self, *, final: bool) -> tuple[int, bool]:
        """Where a call may begin, blanks before it included, and whether its opening is there."""
        text = self._held
        if not self._is_marked:
            at, certain = self._at_beginning()
            if at == 0 or not self._openings:
                return at, certain
        best, whole = len(text), False
        for opening in self._openings:
            at = text.find(opening)
            if 0 <= at < best:
                best, whole = at, True
        if not whole and not final:
            best = min(len(text) - _overlap(text, opening) for opening in self._openings)
        start = len(text[:best].rstrip())
        if not whole and best == len(text) and final:
            return len(text), False
        return start, whole

    def _at_beginning(self) -> tuple[int, bool]:
        """A call without a mark of its own is one only where the answer begins with it."""
        if not self._at_start:
            return len(self._held), False
        at = self._unseparated(self._held, 0)
        if at == len(self._held):
            return 0, False
        if self._form.kind == NAMED:
            rest = self._held[at:]
            begins = any(rest.startswith(n) or n.startswith(rest) for n in self._tools.names)
        else:
            begins = self._held[at] in "{["
        return (0, True) if begins else (len(self._held), False)

    def _unseparated(self, text: str, at: int) -> int:
        """Skip blanks, and the semicolon that Llama 3 writes between two calls."""
        at = skip_space(text, at)
        separated = self._may_separate and text.startswith(";", at)
        return skip_space(text, at + 1) if separated else at

    # -- one section ---------------------------------------------------------------------------

    def _section(self, text: str, at: int, final: bool) -> _Parsed:  # noqa: FBT001
        """Read one call, or what follows one: the next call, or the section's end."""
        form = self._form
        if self._behind_call:
            at, goes_on = self._after(text, at, final)
            if at < 0 or not goes_on:
                self._behind_call = at == MORE
                return _Parsed((), at, takes_blanks=form.section_close.ends_blank)
        else:
            at = self._unseparated(text, at)
            if self._lead and text.startswith(self._lead, at):
                at = skip_space(text, at + len(self._lead))
            elif self._lead and self._lead.startswith(text[at:]):
                return _Parsed((), MORE)
            opened = form.section_open.match(text, at)
            if opened == MORE:
                return _Parsed((), MORE)
            self._in_section = opened != NO  # models leave the outer mark out
            at = opened if self._in_section else at
        call, end = self._call(text, at, final)
        if call is None:
            self._behind_call = self._behind_call and end == MORE
            return _Parsed((), end, is_text=end > 0)
        self._behind_call = True
        return _Parsed((call,), end, takes_blanks=form.call_close.ends_blank)

    def _after(self, text: str, at: int, final: bool) -> tuple[int, bool]:  # noqa: FBT001
        """Behind a call: where the next one begins, or the section ends; and which of the two."""
        form = self._form
        if not self._in_section:
            return at, False
        if not form.section_close.is_blank:
            closed = form.section_close.match(text, at)
            if closed == MORE and final:
                closed = len(text)
            if closed != NO:
                return closed, False
        if form.one_only or (form.between.is_blank and form.section_close.is_blank):
            return at, False
        onward = form.between.match(text, at)
        return (NO if onward == MORE and final else onward), onward >= 0

    def _call(self, text: str, at: int, final: bool) -> tuple[ReadCall | None, int]:  # noqa: FBT001
        form = self._form
        at = form.call_open.match(text, at)
        if at < 0:
            return None, at
        at = skip_space(text, at)
        name, arguments, at = _READERS[form.kind](form, text, at, self._tools, self._forced)
        if at < 0:
            return None, at
        end = form.call_close.match(text, at)
        if end == MORE and final:
            end = len(text)
        if end < 0:
            return None, end
        return self._checked(name, arguments), end

    def _checked(self, name: str, arguments: dict[str, Any]) -> ReadCall | None:
        try:
            arguments = plain(arguments, forced=self._forced)
        except AmbiguousError:
            return None
        return ReadCall(name, arguments) if self._tools.accepts(name, arguments) else None

    def _harmony(self, text: str, at: int, final: bool) -> _Parsed:  # noqa: FBT001
        header = _HARMONY_OPEN.match(text, skip_space(text, at))
        if header is None:
            waits = not final and len(text) < _MAX_HEADER and "<|message|>" not in text
            return _Parsed((), MORE if waits else NO)
        name = header["before"] or header["after"]
        end = json_end(text, skip_space(text, header.end()))
        if name is None or end < 0:
            return _Parsed((), NO if name is None else end)
        arguments = from_json(text[header.end() : end], forced=self._forced)
        call = None if arguments is None else self._checked(name, arguments)
        if call is None:
            return _Parsed((), end, is_text=True)
        closing = Literal.of("<|call|>").match(text, end)
        if closing == MORE and not final:
            return _Parsed((), MORE)
        return _Parsed((call,), closing if closing > 0 else end)


def _openings(form: ToolFormat) -> list[str]:
    """The texts by one of which a call begins; none where it begins with the answer itself."""
    if form.kind == HARMONY:
        return list(_HARMONY_MARKS)
    outer = form.section_open.core or form.call_open.core
    return [core for core in dict.fromkeys((outer, form.call_open.core)) if core]


def _overlap(text: str, opening: str) -> int:
    for n in range(min(len(text), len(opening) - 1), 0, -1):
        if text.endswith(opening[:n]):
            return n
    return 0


# -- the calls of each kind: name, arguments, and where they end -----------------------------------


_Read = tuple[str, dict[str, Any], int]
_FAILED: _Read = ("", {}, NO)
_WAITS: _Read = ("", {}, MORE)


def _read_json(form: ToolFormat, text: str, at: int, _tools: Tools, forced: bool) -> _Read:  # noqa: FBT001
    end = json_end(text, at)
    if end < 0:
        return ("", {}, end)
    value = from_json(text[at:end], forced=forced)
    if value is None:
        return _FAILED
    if form.name_key is None:
        if len(value) != 1:
            return _FAILED
        name, arguments = next(iter(value.items()))
    else:
        name = value.get(form.name_key, "")
        others = value.keys() - {form.name_key, *_BESIDE}
        arguments = value[others.pop()] if len(others) == 1 else None if others else {}
    if isinstance(arguments, str):
        arguments = from_json(arguments, forced=forced)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return _FAILED
    return name, arguments, end


def _read_name(text: str, at: int, known: Sequence[str] = ()) -> tuple[str, int]:
    """Read one of the ``known`` names, longest first, or any other that holds no marks."""
    for name in sorted(known, key=len, reverse=True):
        end = at + len(name)
        if not text.startswith(name, at):
            if name.startswith(text[at:]):
                return "", MORE
        elif end == len(text):
            return name, MORE
        elif not _NAME.match(text, end):
            return name, end
    found = _NAME.match(text, at)
    if found is None:
        return "", MORE if at == len(text) else NO
    return found[0], MORE if found.end() == len(text) else found.end()


def _read_named(form: ToolFormat, text: str, at: int, tools: Tools, forced: bool) -> _Read:  # noqa: FBT001
    name, at = _read_name(text, at, tools.names)
    at = at if at < 0 else form.after_name.match(text, at)
    if at < 0:
        return ("", {}, at)
    begin = skip_space(text, at)
    end = json_end(text, begin)
    if end < 0:
        return ("", {}, end)
    arguments = from_json(text[begin:end], forced=forced)
    return _FAILED if arguments is None else (name, arguments, end)


def _read_tagged(form: ToolFormat, text: str, at: int, tools: Tools, _forced: bool) -> _Read:  # noqa: FBT001
    name, at = _read_name(text, at, tools.names)
    at = at if at < 0 else form.after_name.match(text, at)
    if at < 0:
        return ("", {}, at)
    arguments: dict[str, Any] = {}
    while True:
        opened = form.arg_open.match(text, at)
        if opened == NO:
            return name, arguments, at
        if opened == MORE:
            # What may still become an argument may also be the end of the call already.
            ended = form.call_close.match(text, at)
            return (name, arguments, at) if ended >= 0 else _WAITS
        key, opened = _read_name(text, opened, tools.keys(name))
        if opened < 0:
            return ("", {}, opened)
        value, is_text, opened = _read_value(form, text, opened)
        if opened < 0:
            return ("", {}, opened)
        if key in arguments:
            return _FAILED
        value = _without_cdata(value) if form.cdata else value
        arguments[key] = tools.typed(name, key, value, is_text=is_text)
        at = opened


def _without_cdata(text: str) -> str:
    begin, end = "<![CDATA[", "]]>"
    whole = text.startswith(begin) and text.endswith(end)
    return text[len(begin) : -len(end)] if whole else text


def _read_value(form: ToolFormat, text: str, at: int) -> tuple[str, bool | None, int]:
    """Return a value's text, whether its mark says that it is text (None: no word), and the end."""
    begin, is_text = _begin_exactly(form.after_key, text, at), None
    if form.after_key.text != form.after_key_of_other.text:
        is_text = begin >= 0
        if begin == NO:
            begin = _begin_other(form, text, at)
    if begin < 0:
        return "", None, begin
    close = form.arg_close.text.strip()
    blanks = form.arg_close.text[: len(form.arg_close.text) - len(form.arg_close.text.lstrip())]
    end = text.find(close, begin)
    while end >= 0:
        behind = form.arg_close.match(text, end)
        if behind >= 0 and _ends_value(form, text, behind):
            return (
                text[begin:end].removesuffix(blanks) if blanks else text[begin:end],
                is_text,
                behind,
            )
        if behind == MORE or behind >= len(text):
            return "", None, MORE
        end = text.find(close, end + 1)
    return "", None, MORE


def _begin_exactly(literal: Literal, text: str, at: int) -> int:
    """Match without taking blanks of the value itself: only those that the literal ends in."""
    fixed = literal.text.rstrip()
    blanks = literal.text[len(fixed) :]
    end = Literal.of(fixed).match(text, at)
    return end + len(blanks) if end >= 0 and blanks and text.startswith(blanks, end) else end


def _begin_other(form: ToolFormat, text: str, at: int) -> int:
    """Match the mark of a value that is no text: it may name other types than the one seen."""
    text_mark, other = form.after_key.text, form.after_key_of_other.text
    before = common_start(text_mark, other).rstrip(_LETTERS)
    after = common_end(text_mark, other).lstrip(_LETTERS)
    at = Literal.of(before).match(text, at)
    if at < 0:
        return at
    _, at = _read_name(text, at)
    return at if at < 0 else _begin_exactly(Literal.of(after), text, at)


def _ends_value(form: ToolFormat, text: str, at: int) -> bool:
    """Whether another argument or the end of the call follows: a value may hold the mark itself."""
    follows = (form.arg_open.match(text, at), form.call_close.match(text, at))
    return any(end != NO for end in follows)


def _read_nested(form: ToolFormat, text: str, at: int, tools: Tools, _forced: bool) -> _Read:  # noqa: FBT001
    name, at = _read_name(text, at, tools.names)
    at = at if at < 0 else form.after_name.match(text, at)
    if at < 0:
        return ("", {}, at)
    marks = Marks(form.arg_open.text, form.arg_close.text, form.after_key.text)
    schema = tools.schema_of(name)
    arguments: dict[str, Any] = {}
    while True:
        ended = form.call_close.match(text, at)
        if ended >= 0 or at == len(text):
            return (name, arguments, at) if ended >= 0 else _WAITS
        key, begin = marks.tag(text, skip_space(text, at))
        if begin < 0:
            return ("", {}, MORE if ended == MORE else begin)
        value, at = element(text, begin, marks, key, inner(schema, key))
        if at < 0:
            return ("", {}, at)
        if key in arguments:
            return _FAILED
        arguments[key] = _of_leaves(value, inner(schema, key), schema)


def _of_leaves(value: Any, schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Any:
    """Return values in place of the texts of elements, by their schemas."""
    if isinstance(value, list):
        return [_of_leaves(item, inner(schema, ITEM), whole) for item in value]
    if isinstance(value, dict):
        return {key: _of_leaves(item, inner(schema, key), whole) for key, item in value.items()}
    if not value.text.strip() and schema.get("type") in ("object", "array"):
        return {} if schema["type"] == "object" else []
    return typed(value.text, schema, whole)


def _read_braced(form: ToolFormat, text: str, at: int, tools: Tools, _forced: bool) -> _Read:  # noqa: FBT001
    name, at = _read_name(text, at, tools.names)
    if at < 0:
        return ("", {}, at)
    if not text.startswith("{", at):
        return _FAILED
    arguments, at = braced(text, at, form.quote)
    return ("", {}, at) if at < 0 else (name, arguments, at)


def _read_python(_form: ToolFormat, text: str, at: int, tools: Tools, forced: bool) -> _Read:  # noqa: FBT001
    name, end = _read_name(text, at, tools.names)
    if end < 0:
        return ("", {}, end)
    begin, end = end, call_end(text, end)
    if end < 0:
        return ("", {}, end)
    written = text[begin:end]
    arguments = from_json_call(written) if forced else from_python(f"f{written}")
    return _FAILED if arguments is None else (name, arguments, end)


_READERS: dict[str, Callable[[ToolFormat, str, int, Tools, bool], _Read]] = {
    JSON: _read_json,
    NAMED: _read_named,
    TAGGED: _read_tagged,
    NESTED: _read_nested,
    BRACED: _read_braced,
    PYTHON: _read_python,
}


def read_all(form: ToolFormat, tools: Tools, text: str) -> list[str | ReadCall]:
    """Return the text and the calls of a whole answer."""
    reader = ToolReader(form, tools)
    return [*reader.push(text), *reader.finish()]


__all__: Sequence[str] = ("ReadCall", "ToolReader", "read_all")
