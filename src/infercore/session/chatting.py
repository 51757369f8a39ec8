"""A chat as prefix and suffix: what another last user turn would not change is stable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import InvalidInputError
from infercore.session.tape import common_prefix
from infercore.values import checks
from infercore.values.session import Message

if TYPE_CHECKING:
    from collections.abc import Sequence

# Private-use characters: they mark where a message's own text begins and ends in a render.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"


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
    **variables: Any,
) -> Turn:
    """Return the chat as it is to be put into the context.

    A control token's text within a message is text, unless ``parse_special``. Raises
    `InvalidInputError` for malformed messages and those the template refuses.
    """
    rows = _rows(messages)
    text, tokens = _tokenize(tokenizer, rows, add_bos, parse_special, variables)
    probe_rows = _with_other_last_user(rows)
    try:
        probe_text, probe = _tokenize(tokenizer, probe_rows, add_bos, parse_special, variables)
    except InvalidInputError:  # a template that refuses the probe has no stable part to show
        probe_text, probe = "", []
    return Turn(
        text=text,
        tokens=tokens,
        stable_text=os.path.commonprefix([text, probe_text]),
        n_stable=common_prefix(tokens, probe),
    )


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
        if rows[i]["role"] == "user" and isinstance(rows[i].get("content"), str):
            content = rows[i]["content"]
            other = "2" if content[:1] == "1" else "1"
            return [*rows[:i], {**rows[i], "content": other}, *rows[i + 1 :]]
    return [*rows, {"role": "user", "content": "1"}]


def _tokenize(
    tokenizer: Any,
    rows: list[dict[str, Any]],
    add_bos: bool,  # noqa: FBT001
    parse_special: bool,  # noqa: FBT001
    variables: dict[str, Any],
) -> tuple[str, list[int]]:
    text = tokenizer.apply_chat_template(rows, **variables)
    if parse_special or not any(_has_control(tokenizer, row) for row in rows):
        tokens = tokenizer.encode(text, add_special=False)
    else:
        tokens = _tokenize_apart(tokenizer, rows, text, variables)
    bos = tokenizer.bos
    if add_bos and bos is not None and tokens[:1] != [bos]:
        tokens = [bos, *tokens]
    return text, tokens


def _has_control(tokenizer: Any, row: dict[str, Any]) -> bool:
    """Whether a message's text would turn into control tokens if it were parsed."""
    content = row.get("content")
    if not isinstance(content, str) or not content:
        return False
    parsed = tokenizer.encode(content, add_special=False, parse_special=True)
    plain = tokenizer.encode(content, add_special=False, parse_special=False)
    return bool(parsed != plain)


def _tokenize_apart(
    tokenizer: Any, rows: list[dict[str, Any]], text: str, variables: dict[str, Any]
) -> list[int]:
    """Tokenize the template's words with control tokens, the messages' without."""
    marked_rows = [_marked(row) for row in rows]
    marked = tokenizer.apply_chat_template(marked_rows, **variables)
    if marked.replace(_OPEN, "").replace(_CLOSE, "") != text:
        raise InvalidInputError(
            "a message holds the text of a control token, and the model's template changes "
            "messages so that it cannot be kept apart; remove it, or pass parse_special=True",
            field="messages",
            value=text,
            allowed="messages without control tokens",
        )
    tokens: list[int] = []
    for outside, inside in _pieces(marked):
        tokens += tokenizer.encode(outside, add_special=False, parse_special=True)
        tokens += tokenizer.encode(inside, add_special=False, parse_special=False)
    return tokens


def _marked(row: dict[str, Any]) -> dict[str, Any]:
    content = row.get("content")
    if not isinstance(content, str) or not content.strip():
        return row
    core = content.strip()
    start = content.index(core)
    end = start + len(core)
    return {**row, "content": content[:start] + _OPEN + core + _CLOSE + content[end:]}


def _pieces(marked: str) -> list[tuple[str, str]]:
    """Split into (template's words, message's words) pairs."""
    first, *rest = marked.split(_OPEN)
    pairs = [(first, "")]
    for part in rest:
        inside, _, outside = part.partition(_CLOSE)
        pairs[-1] = (pairs[-1][0], inside)
        pairs.append((outside, ""))
    return pairs
