"""Values that are neither JSON nor Python: Gemma's braces, and elements within elements."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import attrs

from infercore.chat.literal import MORE, NO, skip_space

if TYPE_CHECKING:
    from collections.abc import Mapping

ITEM = "item"
"""The name of an element that stands for an entry of a list."""

_MAX_DEPTH = 64
_KEY = re.compile(r"[^\s:,{}\[\]<>]+(?: +[^\s:,{}\[\]<>]+)*")
_WORD = re.compile(r"[A-Za-z0-9_.+-]+")
_TAG = re.compile(r"[^\s<>\[\]/]+")
_WORDS = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}

_Value = tuple[Any, int]
_WAITS: _Value = (None, MORE)
_FAILED: _Value = (None, NO)


# -- {key:<|"|>text<|"|>,other:[1,2]} -------------------------------------------------------------


def braced(text: str, at: int, quote: str, depth: int = 0) -> _Value:
    """Return the value that begins at ``at``, and where it ends, or `MORE` or `NO`."""
    at = skip_space(text, at)
    if depth > _MAX_DEPTH:
        return _FAILED
    if text.startswith(quote, at):
        begin = at + len(quote)
        end = text.find(quote, begin)
        return _WAITS if end < 0 else (text[begin:end], end + len(quote))
    if quote.startswith(text[at:]):
        return _WAITS
    if text[at] == "{":
        return _mapping(text, at + 1, quote, depth)
    if text[at] == "[":
        return _list(text, at + 1, quote, depth)
    return _plain(text, at)


def _plain(text: str, at: int) -> _Value:
    found = _WORD.match(text, at)
    if found is None:
        return _FAILED
    if found.end() == len(text):
        return _WAITS
    if found[0] in _WORDS:
        return _WORDS[found[0]], found.end()
    try:
        value = json.loads(found[0], parse_constant=_refuse)
    except ValueError:
        return _FAILED
    return value, found.end()


def _refuse(name: str) -> Any:
    raise ValueError(name)


def _mapping(text: str, at: int, quote: str, depth: int) -> _Value:
    found: dict[str, Any] = {}
    at = skip_space(text, at)
    if text.startswith("}", at):
        return found, at + 1
    while True:
        key, at = _key(text, skip_space(text, at), quote)
        if at < 0:
            return None, at
        if key in found:
            return _FAILED
        found[key], at = braced(text, at, quote, depth + 1)
        at, goes_on = _next(text, at, "}")
        if not goes_on:
            return (found, at) if at >= 0 else (None, at)


def _key(text: str, at: int, quote: str) -> tuple[str, int]:
    if text.startswith(quote, at):
        value, end = braced(text, at, quote)
        key = str(value)
    elif quote.startswith(text[at:]):
        return "", MORE
    else:
        found = _KEY.match(text, at)
        key, end = ("", NO) if found is None else (found[0], found.end())
    end = end if end < 0 else skip_space(text, end)
    if end == len(text):
        return "", MORE
    return (
        (key, end + 1) if end >= 0 and text[end] == ":" else ("", min(end, NO) if end < 0 else NO)
    )


def _list(text: str, at: int, quote: str, depth: int) -> _Value:
    found: list[Any] = []
    at = skip_space(text, at)
    if text.startswith("]", at):
        return found, at + 1
    while True:
        value, at = braced(text, at, quote, depth + 1)
        found.append(value)
        at, goes_on = _next(text, at, "]")
        if not goes_on:
            return (found, at) if at >= 0 else (None, at)


def _next(text: str, at: int, closing: str) -> tuple[int, bool]:
    """Behind a value: where the next one begins, or the end of what holds it; and which."""
    at = at if at < 0 else skip_space(text, at)
    if at < 0 or at == len(text):
        return (at if at < 0 else MORE), False
    if text[at] not in "," + closing:
        return NO, False
    return at + 1, text[at] == ","


# -- elements within elements ---------------------------------------------------------------------


@attrs.frozen
class Marks:
    """What stands before an element's name, before its name at its end, and behind either."""

    opening: str
    closing: str
    behind: str

    def tag(self, text: str, at: int) -> tuple[str, int]:
        """Return the name of the element that begins at ``at``, and where its content begins."""
        if not text.startswith(self.opening, at):
            return "", MORE if self.opening.startswith(text[at:]) else NO
        found = _TAG.match(text, at + len(self.opening))
        if found is None:
            return "", MORE if at + len(self.opening) == len(text) else NO
        if text.startswith(self.behind, found.end()):
            return found[0], found.end() + len(self.behind)
        return "", MORE if self.behind.startswith(text[found.end() :]) else NO

    def is_nested(self, text: str, at: int) -> bool:
        """Whether an element begins at ``at``."""
        return text.startswith(self.opening, at) and not text.startswith(self.closing, at)


@attrs.frozen
class Leaf:
    """The text of an element that holds no others."""

    text: str


def element(
    text: str, at: int, marks: Marks, name: str, schema: Mapping[str, Any], depth: int = 0
) -> _Value:
    """Return what the element ``name`` holds whose content begins at ``at``, and its end.

    The value is a `Leaf`, or a mapping or list of such values; a list where ``schema`` says so, or
    says nothing and all elements are called `ITEM`.
    """
    if depth > _MAX_DEPTH:
        return _FAILED
    if schema.get("type") != "string":
        rest = text[at:]
        if marks.is_nested(text, at):
            return _elements(text, at, marks, name, schema, depth)
        if rest and marks.opening.startswith(rest):
            return _WAITS
    end_mark = marks.closing + name + marks.behind
    end = text.find(end_mark, at)
    while end >= 0:
        behind = end + len(end_mark)
        rest = text[behind:].lstrip()
        if rest.startswith(marks.opening):  # another element, or the end of what holds this one
            return Leaf(text[at:end]), behind
        if marks.opening.startswith(rest):
            return _WAITS
        end = text.find(end_mark, end + 1)
    return _WAITS


def _elements(
    text: str, at: int, marks: Marks, name: str, schema: Mapping[str, Any], depth: int
) -> _Value:
    end_mark = marks.closing + name + marks.behind
    found: list[tuple[str, Any]] = []
    while not text.startswith(end_mark, at):
        if end_mark.startswith(text[at:]):
            return _WAITS
        key, at = marks.tag(text, at)
        if at < 0:
            return None, at
        value, at = element(text, at, marks, key, inner(schema, key), depth + 1)
        if at < 0:
            return None, at
        found.append((key, value))
    at += len(end_mark)
    kind = schema.get("type")
    if kind == "array" or (kind is None and all(key == ITEM for key, _ in found)):
        return ([value for _, value in found], at) if all(k == ITEM for k, _ in found) else _FAILED
    mapping = dict(found)
    return (mapping, at) if len(mapping) == len(found) else _FAILED


def inner(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the schema of a property or an item; an empty one where nothing is said."""
    rows = schema.get("properties")
    found = rows.get(key) if isinstance(rows, dict) else None
    if found is None and key == ITEM:
        found = schema.get("items")
    return found if isinstance(found, dict) else {}
