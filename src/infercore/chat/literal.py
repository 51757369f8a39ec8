"""Fixed parts of a call's written form, found in text that is still arriving."""

from __future__ import annotations

import re
import sys
from typing import Final

import attrs

MORE: Final = -1
"""The text ended before it could be decided."""

NO: Final = -2
"""The text is something else."""

PROBE_ID: Final = "zqcall001"
"""The id that probing gives to calls: nine characters, as the strictest template wants."""

PROBE_NAMES: Final = ("zqtoolone", "zqtooltwo")
"""The names that probing gives to tools."""

_PROBES = "|".join((PROBE_ID, *PROBE_NAMES))
_PARTS = re.compile(rf"{_PROBES}|\s+|\d+|[^\s\d]+?(?=\s|\d|{_PROBES}|$)", re.DOTALL)
_ID = re.compile(r"[A-Za-z0-9_.-]+")
_NAME = re.compile(r"[^\s<>()\[\]{}\"'=:,|]+")
_DIGITS = re.compile(r"\d+")


@attrs.frozen
class Literal:
    """Text that a template writes around a call; blanks and numbers in it may differ.

    ``parts`` are pairs of a kind and a text: "text", "space" and "digits" as they were seen, "id"
    for the call's id and "name" for the tool's name, with nothing: those differ with each call.
    """

    parts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, text: str) -> Literal:
        """Return the literal that `text` shows once."""
        return cls(tuple(_part(found[0]) for found in _PARTS.finditer(text)))

    @classmethod
    def none(cls) -> Literal:
        """Return the literal of nothing."""
        return cls(())

    @property
    def text(self) -> str:
        """What the template wrote, without the id and the name of the call."""
        return "".join(value for _, value in self.parts)

    @property
    def core(self) -> str:
        """The first fixed text, by which a reader finds the literal; "" where there is none."""
        return next((value for kind, value in self.parts if kind == "text"), "")

    @property
    def is_blank(self) -> bool:
        """Whether nothing but blanks stands there."""
        return all(kind == "space" for kind, _ in self.parts)

    @property
    def ends_blank(self) -> bool:
        """Whether blanks at its end belong to it, however many there are."""
        return bool(self.parts) and self.parts[-1][0] == "space"

    def stripped(self, *, start: bool = False, end: bool = False) -> Literal:
        """Return the literal without line breaks at its start, or blanks at its end."""
        parts = list(self.parts)
        if start and parts and parts[0][0] == "space":
            kept = parts[0][1].lstrip("\n") if len(parts) > 1 else ""
            parts[:1] = [("space", kept)] if kept else []
        if end and parts and parts[-1][0] == "space":
            del parts[-1]
        return Literal(tuple(parts))

    def match(self, text: str, at: int) -> int:
        """Return where the literal ends that begins at ``at`` in ``text``, or `MORE` or `NO`."""
        for kind, value in self.parts:
            at = _MATCHERS[kind](text, at, value)
            if at < 0:
                return at
        return at


def _part(text: str) -> tuple[str, str]:
    if text == PROBE_ID:
        return "id", ""
    if text in PROBE_NAMES:
        return "name", ""
    if text.isspace():
        return "space", text
    return ("digits" if text.isdecimal() else "text"), text


def _match_text(text: str, at: int, value: str) -> int:
    at = skip_space(text, at) if not value[0].isspace() else at
    if text.startswith(value, at):
        return at + len(value)
    return MORE if value.startswith(text[at:]) else NO


def _match_pattern(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    if found is None:
        return MORE if at == len(text) else NO
    return MORE if found.end() == len(text) else found.end()


def _match_space(text: str, at: int, _value: str) -> int:
    return skip_space(text, at)


def _match_id(text: str, at: int, _value: str) -> int:
    return _match_pattern(_ID, text, at)


def _match_name(text: str, at: int, _value: str) -> int:
    return _match_pattern(_NAME, text, at)


def _match_digits(text: str, at: int, _value: str) -> int:
    return _match_pattern(_DIGITS, text, at)


_MATCHERS = {
    "text": _match_text,
    "space": _match_space,
    "id": _match_id,
    "name": _match_name,
    "digits": _match_digits,
}


def common_start(a: str, b: str) -> str:
    """Return the beginning that both texts have."""
    differ = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return a[: next(differ, min(len(a), len(b)))]


def common_end(a: str, b: str) -> str:
    """Return the end that both texts have."""
    return common_start(a[::-1], b[::-1])[::-1]


def skip_space(text: str, at: int) -> int:
    """Return the place of the next character that is no blank."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def json_end(text: str, at: int) -> int:
    """Return where the JSON value ends that begins at ``at`` with a bracket, or `MORE` or `NO`."""
    if at >= len(text):
        return MORE
    if text[at] not in "{[":
        return NO
    return _balanced_end(text, at, _JSON_STEPS)


def call_end(text: str, at: int) -> int:
    """Return where the arguments in parentheses end that begin at ``at``, or `MORE` or `NO`."""
    if at >= len(text):
        return MORE
    return _balanced_end(text, at, _PYTHON_STEPS) if text[at] == "(" else NO


_CLOSING = {"{": "}", "[": "]", "(": ")"}
_JSON_TEXT = r'"(?:[^"\\]+|\\.)*+"' if sys.version_info >= (3, 11) else r'"(?:[^"\\]|\\.)*"'
_JSON_STEPS = re.compile(rf'{_JSON_TEXT}|["{{}}\[\]()]', re.DOTALL)
_PYTHON_STEPS = re.compile(
    rf"{_JSON_TEXT}|{_JSON_TEXT.replace(chr(34), chr(39))}|[\"'{{}}\[\]()]", re.DOTALL
)


def _balanced_end(text: str, at: int, steps: re.Pattern[str]) -> int:
    """Go from bracket to bracket; a whole text in quotes is one step, a lone quote an open one."""
    expected: list[str] = []
    for found in steps.finditer(text, at):
        step = found[0]
        if step in _CLOSING:
            expected.append(_CLOSING[step])
        elif step in ("}", "]", ")"):
            if step != expected.pop():
                return NO
            if not expected:
                return found.end()
        elif len(step) == 1:
            return MORE
    return MORE


class Scan:
    """Follows brackets from ``at`` on in a text that only grows; quotes may hold any."""

    def __init__(self, at: int, *, python: bool) -> None:
        self._at = at
        self._steps = re.compile("[\"'(){}\\[\\]]" if python else '["(){}\\[\\]]')
        self._quote = ""
        self._depth = 0

    def is_open(self, text: str) -> bool:
        """Return whether the bracket at the beginning is not closed yet."""
        while self._at < len(text):
            steps = _IN_QUOTES[self._quote] if self._quote else self._steps
            found = steps.search(text, self._at)
            if found is None:
                self._at = len(text)
                return True
            step = found[0]
            if step == "\\":
                if found.end() == len(text):
                    self._at = found.start()
                    return True
                self._at = found.end() + 1
                continue
            self._at = found.end()
            if step in "\"'":
                self._quote = "" if self._quote else step
            elif step in _CLOSING:
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return False
        return True


_IN_QUOTES = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
