"""Errors as the protocol has them: a status, and ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
from starlette.requests import ClientDisconnect

from infercore import errors
from infercore.serve.wire import OF_MESSAGES

if TYPE_CHECKING:
    from collections.abc import Mapping


@attrs.frozen
class ApiError(Exception):
    """An answer that refuses or fails: its status, text and headers."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = attrs.field(factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """What the client gets."""
        fields = {"message": self.message, "type": self.kind, "param": self.param}
        return {"error": {**fields, "code": self.code}}


def timed_out(state: str, seconds: float | None) -> ApiError:
    """Return the answer to a request that took more than ``seconds``."""
    told = f"{state} after {seconds:g} seconds" if seconds is not None else state
    return ApiError(408, told, "timeout_error", code="timeout")


def server_ended() -> ApiError:
    """Return the answer to a request that the server's end cuts off."""
    return ApiError(
        503,
        "the server ended before this was answered; ask again",
        "server_error",
        code="closed",
        headers={"Retry-After": "5"},
    )


_OURS: tuple[tuple[type[BaseException], int, str, str | None], ...] = (
    (errors.ContextOverflowError, 400, "invalid_request_error", "context_length_exceeded"),
    (errors.InvalidInputError, 400, "invalid_request_error", None),
    (errors.UnsupportedFeatureError, 400, "invalid_request_error", "unsupported"),
    (errors.GrammarError, 400, "invalid_request_error", "invalid_schema"),
    (errors.PoolFullError, 429, "rate_limit_error", "busy"),
    (errors.CallTimeoutError, 408, "timeout_error", "timeout"),
    (errors.SessionClosedError, 503, "server_error", "unavailable"),
    (errors.TransientEngineError, 503, "server_error", "unavailable"),
)
_NOTHING_LEFT = "no token left"
"""The state in which fields of a request together forbid every token, of a sampler's errors."""
_ADVICE = {
    "open the session with overflow='truncate'": 'send truncation="auto"',
    "or open it with a larger n_ctx": "or serve the model with a larger n_ctx",
    "or open with a larger n_ctx": "or serve the model with a larger n_ctx",
    ", or open the pool with a larger max_waiting": "",
    "call again to continue from there, or give a longer timeout": (
        "ask again to continue from there"
    ),
    "give chat_template=... with one that renders them, or describe": "describe",
    "give chat_template=..., or render the text yourself and use ensure_prefix": (
        "render the text yourself and send it to /v1/completions"
    ),
    "close it and open a new one": "ask again",
    "open a new one": "ask again",
    "open a new pool": "ask again",
}
"""What a client, who opens no session, can do in place of what an error of ours advises."""
_PARAMS: dict[type[BaseException], str] = {
    errors.ContextOverflowError: "messages",
    errors.GrammarError: "response_format",
}


def api_error(error: BaseException, names: Mapping[str, str] | None = None) -> ApiError:
    """Return what a client sees of ``error``; what is not its fault is a 5xx without detail.

    ``names`` are what the route calls the fields that errors name, where it has other names.
    """
    if isinstance(error, ApiError):
        return error
    message = _for_clients(str(error))
    if isinstance(error, (msgspec.ValidationError, msgspec.DecodeError)):
        param = _param(message)
        field = (param or "").partition("[")[0]  # of an item, which is read apart
        return ApiError(400, message, param=(names or {}).get(field, param))
    if isinstance(error, ClientDisconnect):
        return ApiError(499, "the client disconnected before its request was complete")
    if isinstance(error, errors.InvalidStateError) and error.state == _NOTHING_LEFT:
        return ApiError(400, message, code="no_token_left")
    for kind, status, name, code in _OURS:
        if isinstance(error, kind):
            ours = _field_of(error, kind)
            param = (names or {}).get(ours, ours)
            if message.startswith(f"{ours}=") and ours not in OF_MESSAGES:
                message = f"{param}{message[len(ours) :]}"
            return ApiError(
                status,
                message,
                name,
                param=param or None,
                code=code,
                headers=_retry_after(error) if status in (429, 503) else {},
            )
    told = "the server failed; its log says more"
    is_ours = isinstance(error, errors.InferCoreError) and not _names_a_path(error, message)
    return ApiError(
        500,
        message if is_ours else told,
        "server_error",
        code=type(error).__name__ if is_ours else "internal",
    )


def _names_a_path(error: BaseException, message: str) -> bool:
    """Whether an error is about a file of the server, or quotes one that is."""
    path = getattr(getattr(error, "cause", None), "path", None)
    return hasattr(error, "path") or (path is not None and str(path) in message)


def _for_clients(message: str) -> str:
    for advice, theirs in _ADVICE.items():
        message = message.replace(advice, theirs)
    return message


def _field_of(error: BaseException, kind: type[BaseException]) -> str:
    """Return the field that an error of ours is about, as a chat calls it; "" where it is none."""
    if kind in _PARAMS:
        return _PARAMS[kind]
    field: str = getattr(error, "field", None) or getattr(error, "feature", None) or ""
    if field.startswith("reasoning="):
        return "reasoning_effort"
    return "messages" if field.endswith(" input") else field  # a kind of part


def _retry_after(error: BaseException) -> dict[str, str]:
    seconds = getattr(error, "retry_after", None) or 1
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def _param(message: str) -> str | None:
    """Return the field that a complaint of msgspec names."""
    quoted = message.split("`")[1::2]
    paths = [part for part in quoted if part.startswith("$.")]
    name = paths[-1][2:] if paths else None
    if "unknown field" in message or "required field" in message:
        return ".".join(part for part in (name, quoted[0]) if part)
    return name
