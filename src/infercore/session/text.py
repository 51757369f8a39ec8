"""From token bytes to text in pieces: whole characters only, and no stop string leaks."""

from __future__ import annotations

from codecs import utf_8_decode
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopMatcher:
    """Passes text on, but for stop strings and what may yet become one."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.stops = tuple(stops)
        self._include = include
        self._held = ""
        self._n_passed = 0  # characters of it in which no stop may end
        self.looks = True
        """Whether a stop string may end in the text that comes now."""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is safe to show now; sets ``matched`` once a stop is complete."""
        if not self.stops:
            return text
        held = self._held + text
        if not self.looks:
            self._n_passed = len(held)
        found = [(at, stop) for stop in self.stops if (at := self._find(held, stop)) >= 0]
        if found:
            at, self.matched = min(found)
            self._held = ""
            return held[: at + len(self.matched)] if self._include else held[:at]
        keep = max((_overlap(held, stop) for stop in self.stops), default=0)
        safe = len(held) - keep
        self._held = held[safe:]
        self._n_passed = max(0, self._n_passed - safe)
        return held[:safe]

    def _find(self, held: str, stop: str) -> int:
        return held.find(stop, max(0, self._n_passed - len(stop) + 1))

    def flush(self) -> str:
        """Return what was held back, as no stop can be completed any more."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


class TextAssembler:
    """Turns token bytes into text: UTF-8 decoded incrementally, stop strings held back."""

    __slots__ = ("_has_stops", "_part", "_stops")

    def __init__(self, stops: Sequence[str] = (), *, include: bool = False) -> None:
        self._part = b""  # of a character
        self._stops = StopMatcher(stops, include=include)
        self._has_stops = bool(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed."""
        return self._stops.matched is not None

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was completed, None where none was."""
        return self._stops.matched

    def push(self, data: bytes, *, looks: bool = True) -> str:
        """Return the text that ``data`` completes and that is safe to show.

        ``looks=False``: what it completes ends no text.
        """
        part = self._part
        if part:
            data = part + data
        text, n = utf_8_decode(data, "replace", False)
        if part or n != len(data):
            self._part = data[n:]
        if not text or not self._has_stops:
            return text
        self._stops.looks = looks
        return self._stops.push(text)

    def flush(self) -> str:
        """Return the rest; bytes that never became a character are U+FFFD."""
        if self.stopped:
            return ""
        rest, self._part = utf_8_decode(self._part, "replace", True)[0], b""
        text = self._stops.push(rest)
        return text if self.stopped else text + self._stops.flush()
