"""Renders a model's chat template. A model file is untrusted, so Jinja's sandbox does it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import InvalidInputError
from infercore.values import checks
from infercore.values.session import Message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2 import Template


def render(
    template: str,
    messages: Sequence[Message | Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    **variables: Any,
) -> str:
    """Return ``messages`` in the words of ``template``.

    Raises `InvalidInputError` where the messages are malformed or the template refuses them.
    """
    import jinja2  # noqa: PLC0415  (only chats need it)

    rows = [_as_dict(message) for message in messages]
    try:
        return _compiled(template).render(
            messages=rows,
            add_generation_prompt=add_generation_prompt,
            tools=None if tools is None else [dict(tool) for tool in tools],
            **variables,
        )
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise InvalidInputError(
            f"the model's chat template refuses these messages: {error}",
            field="messages",
            value=[row.get("role") for row in rows],
            allowed="messages that the template accepts",
        ) from error


def _as_dict(message: Message | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(message, Message):
        return attrs.asdict(message)
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise checks.refuse("messages", message, "Message objects, or mappings with a role")
    return dict(message)


@lru_cache(maxsize=32)
def _compiled(template: str) -> Template:
    """The settings are those of Hugging Face's ``apply_chat_template``, as templates expect."""
    from jinja2.ext import loopcontrols  # noqa: PLC0415
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _raise(message: str) -> None:
    raise ValueError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _to_json(value: Any, **options: Any) -> str:
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)
