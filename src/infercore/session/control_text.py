"""Keeps the text of control tokens in messages apart: it is text, and never a control token."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from infercore.errors import InvalidInputError
from infercore.sampling.per_tokenizer import PerTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from infercore.protocols.public import Tokenizer

_PRIVATE_USE = range(0xE000, 0xF8FF)


def _find(tokenizer: Tokenizer) -> re.Pattern[str]:
    ids = (token for token in range(tokenizer.n_vocab) if tokenizer.is_control(token))
    texts = {tokenizer.token_bytes(token).decode("utf-8", errors="replace") for token in ids}
    longest_first = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


_control_pattern = PerTokenizer(_find)


def leaves(value: Any) -> Iterator[str]:
    """Yield every text in a message or tool, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    return value


class ControlText:
    """Finds control tokens' text in messages and tools, and marks it through a render.

    ``parsed`` is what was found of texts before, for several of one chat.
    """

    def __init__(self, tokenizer: Any, given: Any, parsed: dict[str, bool]) -> None:
        self._tokenizer = tokenizer
        self._parsed = parsed
        self._pattern = _control_pattern(tokenizer)
        texts = list(leaves(given))
        for parts in _neighbours(given):
            self._check_apart(parts)
        self.found = any(map(self._is_parsed, texts))
        used = {character for text in texts for character in text} if self.found else set()
        free = [mark for mark in map(chr, _PRIVATE_USE) if mark not in used][:2]
        if len(free) < 2:  # noqa: PLR2004  (an opening mark and a closing one)
            raise _inseparable()
        self._open, self._close = free

    def _check_apart(self, parts: list[str]) -> None:
        """Refuse parts that only together make a control token's text: no mark can be set."""
        together = len(self._pattern.findall("".join(parts)))
        if together != sum(len(self._pattern.findall(part)) for part in parts):
            raise _inseparable()

    def _is_parsed(self, text: str) -> bool:
        """Whether ``text`` would turn into other tokens if control tokens were parsed."""
        if not text:
            return False
        if text not in self._parsed:
            encode = self._tokenizer.encode
            plain = encode(text, add_special=False, parse_special=False)
            parsed = encode(text, add_special=False, parse_special=True)
            self._parsed[text] = bool(plain != parsed)
        return self._parsed[text]

    def marked(self, given: Any) -> Any:
        """Return messages or tools with marks around the text of control tokens."""
        return _mapped(given, self._marked_text)

    def _marked_text(self, text: str) -> str:
        if not self._is_parsed(text):
            return text
        marked, n = self._pattern.subn(lambda m: f"{self._open}{m[0]}{self._close}", text)
        return marked if n else f"{self._open}{text}{self._close}"

    def tokens(self, rendered: str, marked: str) -> list[int]:
        """Return the ids of ``rendered``, which is ``marked`` without its marks.

        Raises `InvalidInputError` where the template did not leave the marks in pairs.
        """
        pieces = self._pieces(marked)
        if pieces is None or "".join(text for text, _ in pieces) != rendered:
            raise _inseparable()
        encode = self._tokenizer.encode
        ids: list[int] = []
        for text, is_control_text in pieces:
            ids += encode(text, add_special=False, parse_special=not is_control_text)
        return ids

    def _pieces(self, marked: str) -> list[tuple[str, bool]] | None:
        """Split at the marks; None where they are not in pairs any more."""
        parts = re.split(f"([{self._open}{self._close}])", marked)
        pieces, inside = [], False
        for part in parts:
            if part in (self._open, self._close):
                if inside != (part == self._close):
                    return None
                inside = not inside
            elif part:
                pieces.append((part, inside))
        return None if inside else pieces


def _neighbours(given: Any) -> Iterator[list[str]]:
    """Yield the texts of content parts, which a template may put side by side."""
    if isinstance(given, Mapping):
        for item in given.values():
            yield from _neighbours(item)
    elif isinstance(given, (list, tuple)):
        yield [part["text"] for part in given if isinstance(part, Mapping) and _has_text(part)]
        for item in given:
            yield from _neighbours(item)


def _has_text(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("text"), str)


def _inseparable() -> InvalidInputError:
    return InvalidInputError(
        "a message holds the text of a control token, and the model's template changes messages "
        "so that it cannot be kept apart; remove it, or pass parse_special=True",
        field="messages",
        allowed="messages without the text of control tokens",
    )
