"""How a model marks its thoughts, found in its template, and how they are split from the answer."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import attrs

from infercore.chat.literal import common_start
from infercore.chat.raw import RawText
from infercore.chat.template import TemplateRefusalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
_SWITCHES = ("enable_thinking", "thinking")
_ELEMENT = re.compile(r"<([\w:]+)>$|<\|open\|>(\w+)<\|sep\|>$")
_TOKEN = re.compile(r"<\|[^|<>]*\|>")


@attrs.frozen
class ReasoningFormat:
    """The marks around a thought, without blanks; ``switch`` is the variable that turns it off.

    ``headers`` are marks before the answer itself, which are no text either. ``restart`` is what a
    model writes before another message of its own, which may be a thought or the answer.
    ``footer`` stands behind the answer. Without ``open`` there are headers alone.
    """

    open: str
    close: str
    switch: str | None = None
    headers: tuple[str, ...] = ()
    restart: str = ""
    footer: str = ""

    def begins_inside(self, prompt: str) -> bool:
        """Return whether ``prompt`` ends in an open thought, so that the answer goes on with it."""
        return bool(self.open) and prompt.rstrip().endswith(self.open)


def find_reasoning_format(render: Render, template: str) -> ReasoningFormat | None:
    """Return how thoughts are marked, None where the template knows none."""
    if _HARMONY in template:
        headers = tuple(f"{_HARMONY}{name}<|message|>" for name in ("final", "commentary"))
        thought = f"{_HARMONY}analysis<|message|>"
        return ReasoningFormat(thought, "<|end|>", None, headers, "<|start|>assistant")
    known = [(a.strip(), b) for a, b in _KNOWN if a.strip() in template and b in template]
    found = _rendered_format(render)
    if found is None or any(found.close.startswith(close) for _, close in known):
        found = ReasoningFormat(*known[0]) if known else None
    return None if found is None else attrs.evolve(found, switch=_switch(render))


def find_headers(render: Render) -> ReasoningFormat | None:
    """Return what a model writes before an answer, where the template has its prompt end in a mark.

    So it is where a model names whom it speaks to, as Functionary's do: ``>>>all``, or a tool.
    """
    start = _start(render)
    plain = _turn(render, {"role": "assistant", "content": _ANSWER}) if start else None
    if plain is None or start[-1].isalnum() or start[-1].isspace():
        return None
    header = plain.partition(_ANSWER)[0].removeprefix(start)
    if not plain.startswith(start) or not header.endswith("\n") or not header.strip():
        return None
    restart = start[len(start.rstrip(start[-1])) :]
    return ReasoningFormat("", "", headers=(header,), restart=restart)


def _rendered_format(render: Render) -> ReasoningFormat | None:
    plain = _turn(render, {"role": "assistant", "content": _ANSWER})
    if plain is None:
        return None
    lead, _, tail = plain.partition(_ANSWER)
    for key in _KEYS:
        text = _turn(render, {"role": "assistant", "content": _ANSWER, key: _THOUGHT})
        if text is None or _THOUGHT not in text:
            continue
        before, _, after = text.partition(_THOUGHT)
        opening = before[len(common_start(before, plain)) :].strip()
        closing = after.partition(_ANSWER)[0].strip()
        if not opening:  # the plain turn has an empty thought of its own
            return _of_element(before.rstrip(), closing, tail)
        if not closing:
            continue
        start = _start(render)
        header = lead.removeprefix(start).strip()
        between = closing.removesuffix(header).strip() if start and header else closing
        ended = _TOKEN.match(between)
        if ended is not None and between != closing and before.startswith(start):
            return ReasoningFormat(
                before.removeprefix(start).strip(),
                ended[0],
                headers=(header,),
                restart=between[ended.end() :].strip(),
            )
        return ReasoningFormat(_whole(before, opening), closing)
    return None


def _of_element(before: str, behind: str, tail: str) -> ReasoningFormat | None:
    """The form of a thought between marks of one name, with what else is around the answer."""
    known = [(a.strip(), b) for a, b in _KNOWN if before.endswith(a.strip())]
    found = _ELEMENT.search(before)
    if found is not None:
        name = found[1] or found[2]
        known.append((found[0], f"</{name}>" if found[1] else f"<|close|>{name}<|sep|>"))
    for opening, closing in known:
        if behind.startswith(closing):
            header = behind.removeprefix(closing).strip()
            return ReasoningFormat(
                opening, closing, headers=(header,) if header else (), footer=_footer(tail)
            )
    return None


def _footer(tail: str) -> str:
    """What of the turn's end is written in words: it is followed by the token that ends all."""
    if not _TOKEN.sub("", tail).strip():
        return ""
    return tail[: max((found.start() for found in _TOKEN.finditer(tail)), default=0)]


def _start(render: Render) -> str:
    """What the template writes between a question and a model's answer."""
    try:
        text = render([_USER], tools=None, add_generation_prompt=True)
    except TemplateRefusalError:
        return ""
    return text.rpartition(_USER["content"])[2]


def _whole(before: str, opening: str) -> str:
    """The mark whole, where an equal beginning was cut off it."""
    at = before.rfind("<", 0, len(before.rstrip()) - len(opening) + 1)
    cut = before[at:].rstrip() if at >= 0 else opening
    return cut if cut.endswith(opening) and ">" not in cut[: -len(opening)] else opening


def _turn(render: Render, answer: dict[str, Any]) -> str | None:
    try:
        text = render([_USER, answer], tools=None, add_generation_prompt=False)
    except TemplateRefusalError:
        return None
    return text[text.rfind(_USER["content"]) + len(_USER["content"]) :]


def _switch(render: Any) -> str | None:
    """Return the variable by which the template leaves thoughts out, None where it has none."""
    for name in _SWITCHES:
        try:
            off = render([_USER], tools=None, add_generation_prompt=True, **{name: False})
            on = render([_USER], tools=None, add_generation_prompt=True, **{name: True})
        except TemplateRefusalError:
            continue
        if off != on:
            return name
    return None


class ReasoningReader:
    """Parts thoughts from the answer in a text that arrives in pieces.

    ``push`` and ``finish`` yield pairs of text and whether it is a thought. A thought begins where
    the answer does, behind another thought, or behind `ReasoningFormat.restart`; the mark is text
    anywhere else. Marks are left out, and blanks next to them; all other text is given out as it
    came. ``may_open`` is asked once what stands before a mark has been given out: where it says no,
    the mark is text. ``is_control`` says of a mark whether it begins with a control token, which
    text that is only spelled like one does not.
    """

    def __init__(
        self,
        form: ReasoningFormat,
        *,
        inside: bool,
        may_open: Callable[[], bool] = lambda: True,
        is_control: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._form = form
        self._may_open = may_open
        self._is_control = lru_cache(maxsize=None)(is_control)
        self.inside = inside
        self._held = RawText("", "")
        self._trim = inside  # blanks behind a mark are no text
        self._at_start = True  # nothing of the answer itself has come
        bare = [mark for mark in (form.open, *form.headers) if mark]
        self._bare = sorted(bare, key=len, reverse=True)
        again = [form.restart, f"{form.restart} "] if form.restart else []
        self._opening = {restart + form.open for restart in again} | {form.open}
        self._anywhere = [restart + mark for restart in again for mark in self._bare]
        self._anywhere += [form.footer] if form.footer else []

    def push(self, text: str | RawText) -> Iterator[tuple[RawText, bool]]:
        """Yield what ``text`` completes."""
        self._held += RawText.of(text)
        while len(self._held):
            if not self.inside and self._at_start:
                mark = self._mark_at_start()
                if mark is None:
                    return
                if mark:
                    blanks = len(self._held) - len(self._held.text.lstrip())
                    self._drop(blanks + len(mark), opens=mark == self._form.open)
                    continue
            marks = [self._form.close] if self.inside else self._anywhere
            found = self._next(marks)
            if found is None:
                keep = max(
                    (_held_back(self._held.text, mark, blanks=self.inside) for mark in marks),
                    default=0,
                )
                yield from self._given(len(self._held) - keep)
                return
            at, mark = found
            before = self._held.text[:at]
            yield from self._given(len(before.rstrip()) if self.inside else at)
            if not self.inside and not self._may_open():
                yield from self._given(len(mark))
                continue
            blanks = len(before) - len(before.rstrip()) if self.inside else 0
            self._drop(blanks + len(mark), opens=not self.inside and mark in self._opening)

    def _mark_at_start(self) -> str | None:
        """The mark that the answer begins with, "" where it is none, None where more may come."""
        blanks = len(self._held) - len(self._held.text.lstrip())
        text = self._held.text[blanks:]
        for mark in self._bare:
            if text.startswith(mark) and self._is_real(mark, blanks):
                return mark
        return None if any(mark.startswith(text) for mark in self._bare) else ""

    def _next(self, marks: Sequence[str]) -> tuple[int, str] | None:
        found = []
        for mark in marks:
            at = self._held.text.find(mark)
            while at >= 0 and not self._is_real(mark, at):
                at = self._held.text.find(mark, at + 1)
            found += [(at, mark)] if at >= 0 else []
        return min(found, key=lambda pair: (pair[0], -len(pair[1])), default=None)

    def _is_real(self, mark: str, at: int) -> bool:
        return self._held.flags[at] == "1" or not self._is_control(mark)

    def _drop(self, n: int, *, opens: bool) -> None:
        """Leave out a mark: it opens a thought, closes one, or says that the answer begins."""
        self._held = self._held.after(n)
        self._at_start = self.inside or opens
        self.inside = opens
        self._trim = True

    def finish(self) -> Iterator[tuple[RawText, bool]]:
        """Yield what was held back: the text has ended."""
        yield from self._given(len(self._held))

    def _given(self, n: int) -> Iterator[tuple[RawText, bool]]:
        text, self._held = self._held.first(n), self._held.after(n)
        if self._trim:
            text = text.after(len(text) - len(text.text.lstrip()))
        if len(text):
            self._trim = False
            self._at_start = self._at_start and (self.inside or text.text.isspace())
            yield text, self.inside


def _held_back(text: str, mark: str, *, blanks: bool) -> int:
    """How many characters at the end may yet belong to ``mark``, with blanks before it."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    keep = next((n for n in lengths if mark.startswith(text[-n:])), 0)
    if not blanks:
        return keep
    body = text[: len(text) - keep]
    return keep + len(body) - len(body.rstrip())
