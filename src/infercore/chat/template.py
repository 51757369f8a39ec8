"""Renders a model's chat template. A file is untrusted, so a process with limits does it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import InvalidInputError
from infercore.limited import wire
from infercore.values import checks
from infercore.values.session import Message

if TYPE_CHECKING:
    from collections.abc import Sequence


class TemplateRefusalError(InvalidInputError):
    """The template refuses these messages, cannot be read, or wants too much memory or text.

    No other error tells anything about the template.
    """


class TemplateTimeoutError(InvalidInputError):
    """The template took too long."""


_WORK = "infercore.chat.worker:answer"
_PLAIN = "plain data: None, booleans, numbers, texts, and lists and mappings of these"
_AS_THEY_ARE = frozenset({type(None), bool, int, float, str})


def render(
    template: str,
    messages: Sequence[Message | Mapping[str, Any]],
    /,
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    **variables: Any,
) -> str:
    """Return ``messages`` in the words of ``template``; ``variables`` are known to it by name.

    Raises `InvalidInputError` where the messages are malformed or no plain data, the template
    refuses them or cannot be read, or takes more than 2 seconds of processor time, 256 MiB or
    16 MiB of text.
    """
    rows = [_as_dict(message) for message in messages]
    known = {
        **variables,
        "messages": rows,
        "add_generation_prompt": add_generation_prompt,
        "tools": _tools(tools),
    }
    return _checked(*_answer(template, known), rows)


def _answer(template: str, variables: Mapping[str, Any]) -> tuple[bytes, str]:
    from infercore.limited.process import limited  # noqa: PLC0415  (only chats need it)

    plain = {name: _plain_value(name, value) for name, value in variables.items()}
    return limited.run(_WORK, template, plain, _now())


def _now() -> tuple[float, float, str]:
    """Return the time here: seconds since the epoch, offset from UTC in seconds, zone."""
    now = datetime.now().astimezone()
    offset = now.utcoffset()
    return now.timestamp(), offset.total_seconds() if offset else 0.0, now.tzname() or ""


def _checked(kind: bytes, text: str, rows: list[dict[str, Any]]) -> str:
    if kind == wire.TEXT:
        return text
    too_slow = kind == wire.STOPPED and text.endswith("seconds")
    refusal = TemplateTimeoutError if too_slow else TemplateRefusalError
    what = {wire.UNREADABLE: "cannot be read", wire.STOPPED: "was stopped"}
    raise refusal(
        f"the model's chat template {what.get(kind, 'refuses these messages')}: {text}; change "
        "the messages, or render the text yourself and use ensure_prefix",
        field="messages",
        value=[row.get("role") for row in rows],
        allowed="messages that the template accepts",
    )


def _as_dict(message: Message | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(message, Message):
        return attrs.asdict(message)
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise checks.refuse("messages", message, "Message objects, or mappings with a role")
    return dict(message)


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    listed = checks.items("tools", tools, "a list of mappings, or None")
    for tool in listed:
        if not isinstance(tool, Mapping):
            raise checks.refuse("tools", tool, "a mapping for each tool")
    return [dict(tool) for tool in listed]


def _plain_value(field: str, value: Any) -> Any:
    """Return ``value`` in Python's own types. Raises `InvalidInputError` where it has none."""
    try:
        return _plain(value)
    except (TypeError, ValueError) as error:
        raise checks.refuse(field, value, _PLAIN) from error
    except RecursionError as error:
        raise checks.refuse(field, type(value), f"{_PLAIN}, not nested without end") from error


def _plain(value: Any) -> Any:
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, Message):
        value = attrs.asdict(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, str):
        return str.__str__(value)  # whatever its class makes of str()
    if isinstance(value, float):
        return float.__float__(value)
    return operator.index(value)
