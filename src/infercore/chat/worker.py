"""Compiles and renders templates; it is run in the process with limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2.exceptions import SecurityError

from infercore.chat import sandbox
from infercore.limited.wire import (
    MAX_TEXT_BYTES,
    REFUSED,
    STOPPED,
    TEXT,
    TOO_MUCH_MEMORY,
    UNREADABLE,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jinja2 import Template


def answer(
    template: str, variables: Mapping[str, Any], now: tuple[float, float, str]
) -> tuple[bytes, str]:
    """Return what came of one render: `TEXT` and the text, or what is wrong and why.

    ``now`` is the time that `strftime_now` tells: seconds since the epoch, the offset from UTC in
    seconds, and the zone's name.
    """
    try:
        return TEXT, _text(_compiled(template), {**variables, "strftime_now": _clock(*now)})
    except Exception as error:  # noqa: BLE001  (whatever a template brings about is its refusal)
        return _what_it_means(error)


def _what_it_means(error: Exception) -> tuple[bytes, str]:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return UNREADABLE, f"line {error.lineno}: {error}"
    if isinstance(error, SyntaxError):  # of the Python that Jinja makes of it
        return UNREADABLE, f"nested too deeply for a template: {error.msg}"
    if isinstance(error, RecursionError):
        return STOPPED, "it calls itself without end, or is nested too deeply"
    if isinstance(error, MemoryError):
        return STOPPED, TOO_MUCH_MEMORY
    text = str(error) or type(error).__name__
    return STOPPED if isinstance(error, SecurityError) else REFUSED, text


def _text(compiled: Template, variables: dict[str, Any]) -> str:
    token = sandbox.start()
    try:
        parts, n_bytes = [], 0
        for part in compiled.generate(variables):
            n_bytes += len(part.encode())
            if n_bytes > MAX_TEXT_BYTES:
                raise SecurityError(f"it makes more than {MAX_TEXT_BYTES >> 20} MiB of text")
            parts.append(part)
        return "".join(parts)
    finally:
        sandbox.finish(token)


@lru_cache(maxsize=32)
def _compiled(template: str) -> Template:
    environment = sandbox.BoundedEnvironment()
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template)


def _raise(message: str) -> None:
    raise ValueError(message)


def _clock(seconds: float, offset: float, zone: str) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        there = timezone(timedelta(seconds=offset), zone)
        return datetime.fromtimestamp(seconds, there).strftime(form)

    return strftime_now


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
