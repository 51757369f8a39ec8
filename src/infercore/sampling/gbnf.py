"""Reads GBNF, llama.cpp's grammar format, into rules over characters.

What is read and what is refused follows ``llama_grammar_parser`` in llama.cpp's
``src/llama-grammar.cpp``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import attrs

from infercore.errors import GrammarError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

MAX_REPETITIONS = 2000  # llama.cpp's: a bound above it is none, a product above it an error
MAX_CODE_POINT = 0x10FFFF
_MAX_DEPTH = 100
_SURROGATES = range(0xD800, 0xE000)
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{char: char for char in '\\"[]-'}}
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-")
_QUANTIFIERS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@attrs.frozen
class Chars:
    """One character out of ``ranges`` (first and last code point)."""

    ranges: tuple[tuple[int, int], ...]


@attrs.frozen
class Token:
    """One token: an id or a text in angle brackets. ``negated``: any other."""

    name: int | str
    negated: bool
    at: int


@attrs.frozen
class Ref:
    """A rule by its name."""

    name: str
    at: int


@attrs.frozen
class Group:
    """One of several sequences."""

    alternatives: tuple[tuple[Item, ...], ...]


@attrs.frozen
class Repeat:
    """``item``, at least ``low`` and at most ``high`` times (None: without end)."""

    item: Item
    low: int
    high: int | None


Item = Chars | Token | Ref | Group | Repeat


def read(source: str) -> dict[str, Group]:
    """Return the rules of ``source`` by their names.

    Raises `GrammarError`, with line, column and text, for what llama.cpp does not read, does not
    define, or would not follow (left recursion), and for what could match nothing.
    """
    return _Reader(source).rules()


def refuse(source: str, at: int, why: str) -> NoReturn:
    """Raise the `GrammarError` for the place ``at`` in ``source``."""
    line = source.count("\n", 0, at) + 1
    start = source.rfind("\n", 0, at) + 1
    text = source[start:].split("\n", 1)[0]
    raise GrammarError(
        f"the GBNF grammar is refused at line {line}, column {at - start + 1}: {why}\n"
        f"    {_shortened(text, at - start)}",
        source=source,
    )


def _shortened(text: str, at: int) -> str:
    start = max(0, at - 40)
    cut = text[start : at + 40]
    return ("..." if start else "") + cut + ("..." if at + 40 < len(text) else "")


class _Reader:
    """A position in the text, which every method moves on."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._text = source + "\0"  # an end that is no character of any grammar
        self._at = 0
        self._names: set[str] = set()
        self._n_made = 0
        self._depth = 0

    # -- small steps

    @property
    def _here(self) -> str:
        return self._text[self._at]

    def _refuse(self, why: str, at: int | None = None) -> NoReturn:
        refuse(self._source, self._at if at is None else at, why)

    def _skip_space(self, *, newline: bool) -> None:
        blanks = " \t\r\n" if newline else " \t"
        while self._here in blanks or self._here == "#":
            if self._here == "#":
                while self._here not in "\r\n\0":
                    self._at += 1
            else:
                self._at += 1

    def _take(self, expected: str) -> None:
        if not self._text.startswith(expected, self._at):
            self._refuse(f"expected {expected!r}")
        self._at += len(expected)

    def _run(self, allowed: frozenset[str], what: str) -> str:
        start = self._at
        while self._here in allowed:
            self._at += 1
        if start == self._at:
            self._refuse(f"expected {what}")
        return self._text[start : self._at]

    def _number(self) -> int:
        digits = self._run(frozenset("0123456789"), "a number")
        if len(digits) > 10:  # noqa: PLR2004  (of no id and no bound)
            self._refuse(f"the number {digits[:10]}... is too large")
        return int(digits)

    def _n_symbols(self) -> int:
        return len(self._names) + self._n_made

    # -- rules

    def rules(self) -> dict[str, Group]:
        if (nul := self._source.find("\0")) >= 0:
            self._refuse("a NUL character", nul)
        found: dict[str, Group] = {}
        self._skip_space(newline=True)
        while self._at < len(self._source):
            name = self._run(_NAME, "the name of a rule (letters, digits and -)")
            self._names.add(name)
            self._skip_space(newline=False)
            self._take("::=")
            self._skip_space(newline=True)
            found[name] = self._alternatives(nested=False)
            if self._here not in "\r\n\0":
                self._refuse("expected the end of the line, or more of the rule")
            self._skip_space(newline=True)
        if "root" not in found:
            refuse(self._source, 0, "it has no rule 'root'")
        _check_names(self._source, found)
        _check_recursion(self._source, found)
        if endless(found)["root"]:
            refuse(self._source, self._source.find("root"), "rule 'root' never ends: whatever "
                   "it begins with needs more of itself")  # fmt: skip
        return found

    def _alternatives(self, *, nested: bool) -> Group:
        found = [self._sequence(nested=nested)]
        while self._here == "|":
            self._at += 1
            self._skip_space(newline=True)
            found.append(self._sequence(nested=nested))
        return Group(tuple(found))

    def _sequence(self, *, nested: bool) -> tuple[Item, ...]:
        items: list[Item] = []
        last: Item | None = None  # what a repetition repeats
        n_rules = 1  # that llama.cpp makes of it
        while True:
            if (bounds := self._bounds(nested=nested)) is not None:
                start, low, high = bounds
                if last is None:
                    self._refuse("nothing stands before the repetition", start)
                n_rules *= self._counted(n_rules, low, high, start)
                items.pop()
                last = Repeat(last, low, high) if high != 0 else None
            else:
                n_before = self._n_symbols()
                if not self._begins_item():
                    return tuple(items)
                last = self._item()
                n_rules = max(1, self._n_symbols() - n_before) if isinstance(last, Group) else 1
                self._skip_space(newline=nested)
            if last is not None:
                items.append(last)

    def _begins_item(self) -> bool:
        return self._here in '"[<!(.' or self._here in _NAME

    def _item(self) -> Item | None:
        """Return what begins here; None where llama.cpp makes nothing of it."""
        start, first = self._at, self._here
        if first in _NAME:
            name = self._run(_NAME, "a name")
            self._names.add(name)
            return Ref(name, start)
        self._at += 1
        if first == ".":
            return Chars(_characters([(1, MAX_CODE_POINT)]))
        if first == '"':
            return self._literal()
        if first == "[":
            return self._class(start)
        if first == "(":
            return self._group()
        return self._token(start, negated=first == "!")

    def _group(self) -> Group:
        self._n_made += 1
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._refuse(f"groups are nested more than {_MAX_DEPTH} deep")
        self._skip_space(newline=True)
        found = self._alternatives(nested=True)
        self._take(")")
        self._depth -= 1
        return found

    def _literal(self) -> Item | None:
        chars: list[Item] = []
        while self._here != '"':
            start = self._at
            code = self._character()
            chars.append(Chars(self._checked([(code, code)], start)))
        self._at += 1
        if len(chars) == 1:
            return chars[0]
        return Group((tuple(chars),)) if chars else None

    def _class(self, start: int) -> Chars | None:
        negated = self._here == "^"
        self._at += negated
        ranges = []
        while self._here != "]":
            at = self._at
            low = high = self._character()
            if self._here == "-" and self._text[self._at + 1] != "]":
                self._at += 1
                high = self._character()
            if high < low:
                self._refuse(f"the range {self._text[at : self._at]} holds no character", at)
            ranges.append((low, high))
        self._at += 1
        if not ranges:
            return None
        return Chars(self._checked(_inverted(ranges) if negated else ranges, start))

    def _checked(self, ranges: list[tuple[int, int]], start: int) -> tuple[tuple[int, int], ...]:
        """Return the characters in ``ranges``: no text has NUL, a surrogate or more than 10FFFF."""
        found = _characters(ranges)
        if not found:
            self._refuse(f"{self._text[start : self._at]} matches no character of a text", start)
        return found

    def _character(self) -> int:
        start = self._at
        if self._here == "\0":
            self._refuse("the text ends within quotes or brackets")
        self._at += 1
        if self._text[start] != "\\":
            return ord(self._text[start])
        kind = self._here
        self._at += 1
        if kind in _ESCAPES:
            return ord(_ESCAPES[kind])
        n_digits = _HEX_DIGITS.get(kind)
        if n_digits is None:
            self._refuse(f"unknown escape \\{kind if kind != chr(0) else ''}", start)
        digits = self._text[self._at : self._at + n_digits]
        if len(digits) < n_digits or not set(digits) <= set("0123456789abcdefABCDEF"):
            self._refuse(f"\\{kind} needs {n_digits} hexadecimal digits", start)
        self._at += n_digits
        return int(digits, 16)

    def _token(self, start: int, *, negated: bool) -> Token:
        if negated:
            self._take("<")
        if self._here == "[":
            self._at += 1
            number = self._number()
            self._take("]>")
            return Token(number, negated, start)
        end = self._text.find(">", self._at)
        if end < 0:
            self._refuse("expected '>'", start)
        name = f"<{self._text[self._at : end]}>"
        self._at = end + 1
        return Token(name, negated, start)

    # -- repetitions

    def _bounds(self, *, nested: bool) -> tuple[int, int, int | None] | None:
        """Return where a repetition stands and its bounds; None where there is none."""
        start = self._at
        if self._here in _QUANTIFIERS:
            low, high = _QUANTIFIERS[self._here]
            self._at += 1
        elif self._here == "{":
            low, high = self._braces(start, nested=nested)
        else:
            return None
        self._skip_space(newline=nested)
        return start, low, high

    def _braces(self, start: int, *, nested: bool) -> tuple[int, int | None]:
        self._at += 1
        self._skip_space(newline=nested)
        low = self._number()
        high: int | None = low
        self._skip_space(newline=nested)
        if self._here == ",":
            self._at += 1
            self._skip_space(newline=nested)
            high = None
            if self._here in "0123456789":
                high = self._number()
                self._skip_space(newline=nested)
        self._take("}")
        if low > MAX_REPETITIONS:
            self._refuse(f"more than {MAX_REPETITIONS} repetitions", start)
        if high is not None and high > MAX_REPETITIONS:
            high = None
        if high is not None and high < low:
            self._refuse("the upper bound is below the lower", start)
        return low, high

    def _counted(self, n_rules: int, low: int, high: int | None, start: int) -> int:
        n_times = high or low or 1
        if n_rules * n_times > MAX_REPETITIONS:
            self._refuse(f"repetitions within repetitions exceed {MAX_REPETITIONS}", start)
        self._n_made += 1 if high is None else high - low
        return n_times


# -- characters and checks ---------------------------------------------------------------------


def _inverted(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return [*found, (start, MAX_CODE_POINT)]


def _characters(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    found = []
    for low, high in ranges:
        for first, last in ((1, _SURROGATES.start - 1), (_SURROGATES.stop, MAX_CODE_POINT)):
            if max(low, first) <= min(high, last):
                found.append((max(low, first), min(high, last)))
    return tuple(found)


def items_of(item: Item) -> Iterator[Item]:
    """Yield ``item`` and all that it holds."""
    todo = [item]
    while todo:
        item = todo.pop()
        yield item
        if isinstance(item, Repeat):
            todo.append(item.item)
        elif isinstance(item, Group):
            todo += [inner for sequence in item.alternatives for inner in sequence]


def _check_names(source: str, rules: Mapping[str, Group]) -> None:
    for rule in rules.values():
        for item in items_of(rule):
            if isinstance(item, Ref) and item.name not in rules:
                refuse(source, item.at, f"there is no rule {item.name!r}")


def _check_recursion(source: str, rules: Mapping[str, Group]) -> None:
    """Refuse a rule that may begin with itself."""
    empty = _may_be_empty(rules)
    begins = {name: list(_first_refs(rule, empty)) for name, rule in rules.items()}
    for name in rules:
        todo, seen = list(begins[name]), set()
        while todo:
            ref = todo.pop()
            if ref.name == name:
                refuse(source, ref.at, f"rule {name!r} begins with itself (left recursion), which "
                       "llama.cpp refuses; write it as a repetition")  # fmt: skip
            if ref.name not in seen:
                seen.add(ref.name)
                todo += begins[ref.name]


def endless(rules: Mapping[str, Group]) -> dict[str, bool]:
    """Return for each rule whether it only leads on to itself, so that no text is whole."""
    ended = _fixed_point(rules, _ends)
    return {name: name not in ended for name in rules}


def _ends(item: Item, ended: set[str]) -> bool:
    if isinstance(item, Repeat):
        return item.low == 0 or _ends(item.item, ended)
    if isinstance(item, Group):
        return any(all(_ends(i, ended) for i in seq) for seq in item.alternatives)
    return not isinstance(item, Ref) or item.name in ended


def _may_be_empty(rules: Mapping[str, Group]) -> set[str]:
    return _fixed_point(rules, _is_empty)


def _fixed_point(rules: Mapping[str, Group], holds: Callable[[Item, set[str]], bool]) -> set[str]:
    """Return the rules of which something holds, given those of which it holds."""
    found: set[str] = set()
    while True:
        more = {name for name, rule in rules.items() if holds(rule, found)}
        if more == found:
            return found
        found = more


def _is_empty(item: Item, empty: set[str]) -> bool:
    if isinstance(item, Repeat):
        return item.low == 0 or _is_empty(item.item, empty)
    if isinstance(item, Group):
        return any(all(_is_empty(i, empty) for i in seq) for seq in item.alternatives)
    return isinstance(item, Ref) and item.name in empty


def _first_refs(item: Item, empty: set[str]) -> Iterator[Ref]:
    if isinstance(item, Ref):
        yield item
    elif isinstance(item, Repeat):
        yield from _first_refs(item.item, empty)
    elif isinstance(item, Group):
        for sequence in item.alternatives:
            for inner in sequence:
                yield from _first_refs(inner, empty)
                if not _is_empty(inner, empty):
                    break
