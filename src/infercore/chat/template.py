"""Renders a model's chat template. A model file is untrusted, so Jinja's sandbox does it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
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

    Raises `InvalidInputError` where the messages are malformed, the template refuses them, or it
    is broken or without bounds.
    """
    import jinja2  # noqa: PLC0415  (only chats need it)

    rows = [_as_dict(message) for message in messages]
    try:
        return _bounded_render(
            _compiled(template),
            messages=rows,
            add_generation_prompt=add_generation_prompt,
            tools=None if tools is None else [dict(tool) for tool in tools],
            **variables,
        )
    except jinja2.TemplateSyntaxError as error:
        raise _refused(f"cannot be read (line {error.lineno}): {error}", rows) from error
    except jinja2.exceptions.SecurityError as error:
        raise _refused(f"was stopped: {error}", rows) from error
    except RecursionError as error:
        raise _refused("was stopped: it calls itself without end", rows) from error
    except MemoryError as error:
        raise _refused("was stopped: it takes all memory", rows) from error
    except (
        jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
        AssertionError,
    ) as error:  # fmt: skip
        raise _refused(f"refuses these messages: {error}", rows) from error


def _bounded_render(compiled: Template, **variables: Any) -> str:
    from jinja2.exceptions import SecurityError  # noqa: PLC0415

    from infercore.chat import sandbox  # noqa: PLC0415  (imports Jinja)

    token = sandbox.start()
    try:
        parts, n_characters = [], 0
        for part in compiled.generate(**variables):
            n_characters += len(part)
            if n_characters > sandbox.MAX_SIZE:
                raise SecurityError("the text it makes is too large")
            parts.append(part)
        return "".join(parts)
    finally:
        sandbox.finish(token)


def _refused(what: str, rows: list[dict[str, Any]]) -> InvalidInputError:
    return InvalidInputError(
        f"the model's chat template {what}; change the messages, or render the text yourself and "
        "use ensure_prefix",
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


@lru_cache(maxsize=32)
def _compiled(template: str) -> Template:
    from infercore.chat.sandbox import BoundedEnvironment  # noqa: PLC0415  (imports Jinja)

    environment = BoundedEnvironment()
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _raise(message: str) -> None:
    raise ValueError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  (as templates call it)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Without the HTML escapes of Jinja's own, as Hugging Face transformers has it."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_as_list,
    )


def _as_list(value: Any) -> list[Any]:
    """What a filter such as ``map`` returns is a list to a template's author."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
