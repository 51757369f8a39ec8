"""What one chat template can do, found out by rendering with it, and how messages go into it."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from datetime import datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import attrs

from infercore.chat import template as templates
from infercore.chat.described import described_format, written
from infercore.chat.messages import as_row, one_call_each, systems_first, with_text_arguments
from infercore.chat.places import Places
from infercore.chat.reasoning import ReasoningFormat, find_headers, find_reasoning_format
from infercore.chat.template import TemplateTimeoutError
from infercore.chat.tool_format import (
    ToolFormat,
    empty_content,
    find_tool_format,
    renders_calls,
    renders_tools,
)
from infercore.chat.tools import completed
from infercore.errors import InvalidInputError, UnsupportedFeatureError
from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infercore.values.session import Message

_SLOW_S, _MOST_SLOW = 1.0, 3
_PYTHON_TAG = "<|python_tag|>"
_TOOLS_AS_TEXT = re.compile(r"[+{]-?\s*functions\b")


class Dialect:
    """A template with what it can do: tools, thoughts, parts. Made by `dialect_of`."""

    def __init__(self, template: str, bos: str, eos: str) -> None:
        self._template = template
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._n_slow = 0

    def _render(
        self,
        rows: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        **variables: Any,
    ) -> str:
        """Render; a template that was slow several times is not asked for more now."""
        known = {**self._tokens, **self._tools_as_text(tools), **variables}
        if self._n_slow >= _MOST_SLOW:
            self._n_slow = 0  # the next call asks again: the machine may have been busy
            raise TemplateTimeoutError(
                "the model's chat template takes seconds over each text; render it yourself and "
                "use ensure_prefix",
                field="messages",
                value=rows,
                allowed="messages that the template renders at once",
            )
        began = time.perf_counter()
        try:
            return templates.render(
                self._template,
                rows,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **known,
            )
        finally:
            self._n_slow += time.perf_counter() - began > _SLOW_S

    def _tools_as_text(self, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, str]:
        """What templates want that take the tools as a text, and the day, by names of their own."""
        if not _TOOLS_AS_TEXT.search(self._template):
            return {}
        text = json.dumps(tools, indent=2, ensure_ascii=False) if tools else ""
        return {"functions": text, "datetime": datetime.now().astimezone().strftime("%b %d %Y")}

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How calls are written; None where none could be read back."""
        found = find_tool_format(self._render)
        if found is None and self.renders_tools and not self._renders_calls:
            return described_format(self._template)
        if found is not None and "<![CDATA[" in self._template:
            return attrs.evolve(found, cdata=True)
        return found

    @cached_property
    def _renders_calls(self) -> bool:
        return renders_calls(self._render)

    @cached_property
    def renders_tools(self) -> bool:
        """Whether tools that are given show in the text."""
        return renders_tools(self._render)

    @cached_property
    def reasoning(self) -> ReasoningFormat | None:
        """How thoughts are marked; None where the template knows none."""
        return find_reasoning_format(self._render, self._template)

    @cached_property
    def headers(self) -> ReasoningFormat | None:
        """What a model writes before an answer; None if nothing, or if `reasoning` says it."""
        return None if self.reasoning is not None else find_headers(self._render)

    @property
    def call_lead(self) -> str:
        """What may stand before a call, wherever that is; "" where nothing may."""
        if self.headers is not None:
            return self.headers.restart
        if self.reasoning is not None:
            return self.reasoning.restart
        return _PYTHON_TAG if _PYTHON_TAG in self._template else ""

    @cached_property
    def _places(self) -> Places:
        return Places(self._render, lambda: self.reasoning, lambda: self.beside_calls)

    def takes_parts(self, role: str) -> bool:
        """Return whether the template reads content in parts by itself, in turns of this role."""
        return self._places.takes_parts(role)

    @cached_property
    def beside_calls(self) -> str | None:
        """The empty content beside which the template writes calls: "" or None."""
        return empty_content(self._render)

    def rows(self, messages: Sequence[Message | Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages as this template takes them; nothing of them is dropped.

        Raises `InvalidInputError` for malformed ones, `UnsupportedFeatureError` for parts other
        than text, and for calls where the template neither writes nor describes them.
        """
        rows = [as_row(message) for message in messages]
        for row in rows:
            if row["role"] == "developer" and not self._places.shows("developer"):
                row["role"] = "system"
            if row["content"] and self._places.drops(row["role"]):
                raise checks.refuse("role", row["role"], "a role that the model's template shows")
            if row["content"] in (None, "") and row.get("tool_calls"):
                row["content"] = self.beside_calls
            if isinstance(row["content"], list) and not self.takes_parts(row["role"]):
                row["content"] = "\n".join(part["text"] for part in row["content"])
        if any(row["role"] == "system" for row in rows[1:]) and not self._places.takes_systems:
            rows = systems_first(rows)
        if any(len(row.get("tool_calls", ())) > 1 for row in rows) and not self._places.takes_two:
            rows = one_call_each(rows)
        rows = [self._with_calls_written(row) if row.get("tool_calls") else row for row in rows]
        return self._places.arranged(rows)

    def _with_calls_written(self, row: dict[str, Any]) -> dict[str, Any]:
        """Put calls into the text where the template would leave them out."""
        if self._renders_calls:
            return row
        form = self.tool_format
        if form is None:
            raise UnsupportedFeatureError(
                feature="tool calls",
                hint="this model's chat template leaves the calls of a message out; write them "
                "into its content",
            )
        content, text = row["content"], written(form, row["tool_calls"])
        if isinstance(content, list):
            content = [*content, {"type": "text", "text": text}]
        else:
            content = f"{content or ''}{text}"
        return {**{k: v for k, v in row.items() if k != "tool_calls"}, "content": content}

    def render(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the messages in the words of the template.

        Raises what `rows` raises, `InvalidInputError` where the template refuses them, and
        `UnsupportedFeatureError` (feature "tools") where tools are given that it leaves out.
        """
        if tools and not self.renders_tools:
            raise UnsupportedFeatureError(
                feature="tools",
                hint="this model's chat template leaves tools out; give chat_template=... with one "
                "that renders them, or describe the tools in a message",
            )
        rows = self.rows(messages)
        given = {"add_generation_prompt": add_generation_prompt, **variables}
        text = self._tried(rows, tools, given)
        if all(row["role"] == "system" for row in rows):
            _check_shown(rows, text)
        return text

    def _tried(
        self,
        rows: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        given: Mapping[str, Any],
    ) -> str:
        """Render; where the template refuses that, with whole tools or arguments as text."""
        self._n_slow = 0  # what the template can do is known
        whole = tools and completed(tools)  # some templates fail where a tool says too little
        tries = [(rows, tools), *([(rows, whole)] if whole != tools else [])]
        if any(row.get("tool_calls") for row in rows):
            tries += [(with_text_arguments(rows), offered) for _, offered in tries]
        for chat, offered in tries[:-1]:
            with suppress(InvalidInputError):
                return self._render(chat, tools=offered, **given)
        return self._render(tries[-1][0], tools=tries[-1][1], **given)


def _check_shown(rows: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raise `InvalidInputError` where system messages alone are left out: no user speaks."""
    for row in rows:
        content = row["content"]
        parts = [content] if isinstance(content, str) else [part["text"] for part in content]
        if any(part.strip() not in text for part in parts):
            raise checks.refuse(
                "messages", rows, "a user's message too: the model's template shows no other alone"
            )


@lru_cache(maxsize=128)
def dialect_of(template: str, bos: str, eos: str) -> Dialect:
    """Return what ``template`` can do, with the texts of a model's first and last token."""
    return Dialect(template, bos, eos)
