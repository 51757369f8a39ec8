"""What an operator decides about a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 2**20


def _strings(field: str, value: Sequence[str]) -> tuple[str, ...]:
    names = tuple(checks.items(field, value, "a sequence of strings"))
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise checks.refuse(field, "***", "strings that are not empty")
    return names


def _hosts(value: Sequence[str]) -> tuple[str, ...]:
    return tuple(name.lower() for name in _strings("allowed_hosts", value))


def _keys(value: Sequence[str]) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)):  # a key stands in no error
        raise checks.refuse("api_keys", "***", "a sequence of strings")
    return _strings("api_keys", value)


def _origins(value: Sequence[str]) -> tuple[str, ...]:
    return _strings("cors_origins", value)


@attrs.frozen(kw_only=True)
class ServeConfig:
    """Keys, limits and habits of a server.

    With ``api_keys`` every request but ``/health`` and ``/`` must bring one of them as
    ``Authorization: Bearer KEY``; each key has a namespace of its own, so that callers never
    share prefixes. ``max_body_bytes`` bounds a request's body, ``max_tokens`` the answer of one
    that asks for more or for no limit (None = until the window is full), and
    ``max_requests_per_key`` how many answers to one key are given or waited for at the same time
    (``n`` and prompts in one request count each). A request ends after ``request_timeout`` seconds,
    loading and waiting included (None = never). While a stream waits,
    a comment goes out every ``keep_alive`` seconds; one whose client takes nothing for
    ``reader_timeout`` seconds is cancelled. ``n_warm`` conversations of each model stay
    open after their answer, for their next turn. ``cors_origins`` are the origins of web pages
    that may call ("*" = any). Without keys, a server that is called at a loopback address answers
    to loopback names and to ``allowed_hosts`` alone: a name that somebody else points there is
    refused. Prompts are in no log.

    Raises `InvalidInputError` for a value that is not allowed.
    """

    api_keys: tuple[str, ...] = attrs.field(default=(), converter=_keys, repr=False)
    max_body_bytes: int = attrs.field(default=MIB, validator=checks.integer(1, optional=False))
    max_tokens: int | None = attrs.field(default=None, validator=checks.integer(1))
    max_requests_per_key: int = attrs.field(
        default=256, validator=checks.integer(1, optional=False)
    )
    request_timeout: float | None = attrs.field(default=None, validator=checks.number(1e-3, 1e9))
    keep_alive: float = attrs.field(
        default=15.0, validator=checks.number(1e-3, 1e9, optional=False)
    )
    reader_timeout: float = attrs.field(
        default=60.0, validator=checks.number(1e-3, 1e9, optional=False)
    )
    n_warm: int = attrs.field(default=64, validator=checks.integer(0, optional=False))
    cors_origins: tuple[str, ...] = attrs.field(default=(), converter=_origins)
    allowed_hosts: tuple[str, ...] = attrs.field(default=(), converter=_hosts)
