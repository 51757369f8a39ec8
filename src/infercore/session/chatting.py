"""A chat as prefix and suffix: what another last user turn would not change is stable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import InvalidInputError
from infercore.session.control_text import ControlText
from infercore.session.tape import common_prefix
from infercore.values import checks
from infercore.values.session import Message

if TYPE_CHECKING:
    from collections.abc import Sequence

_GIVEN_APART = ("messages", "tools", "bos_token", "eos_token", "chat_template")


@attrs.frozen(kw_only=True)
class Turn:
    """A rendered chat: its text, its tokens, and how much of both is stable."""

    text: str
    tokens: list[int]
    stable_text: str
    n_stable: int


def prepare(
    tokenizer: Any,
    messages: Sequence[Message | Mapping[str, Any]],
    *,
    add_bos: bool,
    parse_special: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Turn:
    """Return the chat as it is to be put into the context.

    The text of a control token within messages and tools is text, unless ``parse_special``.
    Raises `InvalidInputError` for malformed messages and those the template refuses.
    """
    given = _checked(variables or {})
    if template is not None:
        given["chat_template"] = template
    chat = _Chat(tokenizer, tools, given, add_bos=add_bos, parse_special=parse_special)
    rows = _rows(messages)
    text, tokens = chat.tokenize(rows)
    try:
        probe_text, probe = chat.tokenize(_with_other_last_user(rows))
    except InvalidInputError:  # a template that refuses the probe has no stable part to show
        probe_text, probe = "", []
    return Turn(
        text=text,
        tokens=tokens,
        stable_text=text[: _common_text(text, probe_text)],
        n_stable=common_prefix(tokens, probe),
    )


def _common_text(a: str, b: str) -> int:
    differ = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))


def _checked(variables: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise checks.refuse("template_variables", variables, "a mapping with names as keys")
    taken = [name for name in _GIVEN_APART if name in variables]
    if taken:
        raise checks.refuse(
            "template_variables", taken, "names other than those that the session gives itself"
        )
    return dict(variables)


def _rows(messages: Sequence[Message | Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, Mapping, Message)) or not messages:
        raise checks.refuse("messages", messages, "a sequence of messages that is not empty")
    rows = []
    for message in messages:
        row = attrs.asdict(message) if isinstance(message, Message) else message
        if not isinstance(row, Mapping) or not isinstance(row.get("role"), str):
            raise checks.refuse("messages", message, "Message objects, or mappings with a role")
        if isinstance(row.get("content"), str):
            checks.check_text("content", row["content"])
        rows.append(dict(row))
    return rows


def _with_other_last_user(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same chat with another last user turn (appended where there is none)."""
    for i in range(len(rows) - 1, -1, -1):
        if rows[i]["role"] == "user":
            content = _other_content(rows[i].get("content"))
            return [*rows[:i], {**rows[i], "content": content}, *rows[i + 1 :]]
    return [*rows, {"role": "user", "content": "1"}]


def _other_content(content: Any) -> Any:
    """Another text in the same form: a text, or a list of parts."""
    if isinstance(content, (list, tuple)):
        texts = [part["text"] for part in content if isinstance(part, Mapping) and "text" in part]
        return [{"type": "text", "text": _other_content(texts[0] if texts else "")}]
    return "2" if str(content)[:1] == "1" else "1"


class _Chat:
    """Renders rows and tokenizes the result, with what is the same for each of them."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: dict[str, Any],
        *,
        add_bos: bool,
        parse_special: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._variables = variables
        self._add_bos = add_bos
        self._parse_special = parse_special

    def _render(self, rows: Any, tools: Any) -> str:
        text: str = self._tokenizer.apply_chat_template(rows, tools=tools, **self._variables)
        return text

    def tokenize(self, rows: list[dict[str, Any]]) -> tuple[str, list[int]]:
        """Return the rendered text and its ids."""
        text = self._render(rows, self._tools)
        tokens = self._ids(rows, text)
        bos = self._tokenizer.bos
        if self._add_bos and bos is not None and tokens[:1] != [bos]:
            tokens = [bos, *tokens]
        return text, tokens

    def _ids(self, rows: list[dict[str, Any]], text: str) -> list[int]:
        if not self._parse_special:
            control = ControlText(self._tokenizer, [rows, self._tools])
            if control.found:
                marked = self._render(control.marked(rows), control.marked(self._tools))
                return control.tokens(text, marked)
        ids: list[int] = self._tokenizer.encode(text, add_special=False)
        return ids
