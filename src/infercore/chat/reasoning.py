"""How a model marks its thoughts, found in its template, and how they are told from the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from infercore.chat.literal import common_start
from infercore.chat.template import TemplateTimeoutError
from infercore.errors import InferCoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from infercore.chat.tool_format import Render

_USER = {"role": "user", "content": "zquser"}
_THOUGHT, _ANSWER = "zqthought", "zqanswer"
_KEYS = ("reasoning_content", "reasoning", "thinking", "thoughts")
_KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<thinking>", "</thinking>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought\n", "<channel|>"),
    ("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
)
_HARMONY = "<|channel|>"
_NEXT = "<|start|>assistant"
_FINAL = tuple(
    f"{start}{_HARMONY}{name}<|message|>"
    for name in ("final", "commentary")
    for start in (_NEXT, "")
)
_SWITCHES = ("enable_thinking", "thinking")


@attrs.frozen
class ReasoningFormat:
    """The marks around a thought, without blanks; ``switch`` is the variable that turns it off.

    ``headers`` are marks before the answer itself, which are no text either; ``also_open`` open a
    thought as ``open`` does.
    """

    open: str
    close: str
    switch: str | None = None
    headers: tuple[str, ...] = ()
    also_open: tuple[str, ...] = ()

    def begins_inside(self, prompt: str) -> bool:
        """Tell whether ``prompt`` ends in an open thought, so that the answer goes on with it."""
        return prompt.rstrip().endswith(self.open)


def find_reasoning_format(render: Render, template: str) -> ReasoningFormat | None:
    """Return how thoughts are marked, None where the template knows none."""
    if _HARMONY in template:
        thought = f"{_HARMONY}analysis<|message|>"
        return ReasoningFormat(thought, "<|end|>", None, _FINAL, (_NEXT + thought,))
    known = [(a.strip(), b) for a, b in _KNOWN if a.strip() in template and b in template]
    marks = _rendered_marks(render)
    if marks is None or any(marks[1].startswith(close) for _, close in known):
        marks = known[0] if known else None
    return None if marks is None else ReasoningFormat(*marks, _switch(render))


def _rendered_marks(render: Render) -> tuple[str, str] | None:
    plain = _turn(render, {"role": "assistant", "content": _ANSWER})
    if plain is None:
        return None
    for key in _KEYS:
        text = _turn(render, {"role": "assistant", "content": _ANSWER, key: _THOUGHT})
        if text is None or _THOUGHT not in text:
            continue
        before, _, after = text.partition(_THOUGHT)
        opening = before[len(common_start(before, plain)) :].strip()
        if not opening:  # the plain turn has an empty thought of its own
            known = [a.strip() for a, _ in _KNOWN if before.rstrip().endswith(a.strip())]
            opening = known[0] if known else ""
        closing = after.partition(_ANSWER)[0].strip()
        if opening and closing:
            return _whole(before, opening), closing
    return None


def _whole(before: str, opening: str) -> str:
    """The mark whole, where an equal beginning was cut off it."""
    at = before.rfind("<", 0, len(before.rstrip()) - len(opening) + 1)
    cut = before[at:].rstrip() if at >= 0 else opening
    return cut if cut.endswith(opening) and ">" not in cut[: -len(opening)] else opening


def _turn(render: Render, answer: dict[str, Any]) -> str | None:
    try:
        text = render([_USER, answer], tools=None, add_generation_prompt=False)
    except TemplateTimeoutError:
        raise
    except InferCoreError:
        return None
    return text[text.rfind(_USER["content"]) + len(_USER["content"]) :]


def _switch(render: Any) -> str | None:
    """Return the variable by which the template leaves thoughts out, None where it has none."""
    for name in _SWITCHES:
        try:
            off = render([_USER], tools=None, add_generation_prompt=True, **{name: False})
            on = render([_USER], tools=None, add_generation_prompt=True, **{name: True})
        except TemplateTimeoutError:
            raise
        except InferCoreError:
            continue
        if off != on:
            return name
    return None


class ReasoningReader:
    """Parts thoughts from the answer in a text that arrives in pieces.

    ``push`` and ``finish`` yield pairs of text and whether it is a thought. Marks are left out,
    and blanks next to them; all other text is given out as it came. ``may_open`` is asked once what
    stands before a mark has been given out: where it says no, the mark is text.
    """

    def __init__(
        self,
        form: ReasoningFormat,
        *,
        inside: bool,
        may_open: Callable[[], bool] = lambda: True,
    ) -> None:
        self._form = form
        self._may_open = may_open
        self.inside = inside
        self._held = ""
        self._trim = inside  # blanks behind a mark are no text

    def push(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield what ``text`` completes."""
        self._held += text
        while (found := self._next_mark()) is not None:
            at, mark = found
            before = self._held[:at].rstrip() if self.inside else self._held[:at]
            self._held = self._held[at:]
            yield from self._given(before)
            self._held = self._held[len(mark) :]
            if not self.inside and not self._may_open():
                yield from self._given(mark)
                continue
            if mark not in self._form.headers:
                self.inside = not self.inside
            self._trim = True
        keep = max(_held_back(self._held, mark, blanks=self.inside) for mark in self._marks())
        rest = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        yield from self._given(rest)

    def _marks(self) -> tuple[str, ...]:
        form = self._form
        return (form.close,) if self.inside else (form.open, *form.also_open, *form.headers)

    def _next_mark(self) -> tuple[int, str] | None:
        found = [(at, mark) for mark in self._marks() if (at := self._held.find(mark)) >= 0]
        return min(found, default=None)

    def finish(self) -> Iterator[tuple[str, bool]]:
        """Yield what was held back: the text has ended."""
        rest, self._held = self._held, ""
        yield from self._given(rest)

    def _given(self, text: str) -> Iterator[tuple[str, bool]]:
        if self._trim:
            text = text.lstrip()
        if text:
            self._trim = False
            yield text, self.inside


def _held_back(text: str, mark: str, *, blanks: bool) -> int:
    """How many characters at the end may yet belong to ``mark``, with blanks before it."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    keep = next((n for n in lengths if mark.startswith(text[-n:])), 0)
    if not blanks:
        return keep
    body = text[: len(text) - keep]
    return keep + len(body) - len(body.rstrip())
