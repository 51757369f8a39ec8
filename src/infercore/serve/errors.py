"""Errors as the protocol has them: a status, and ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import math
from typing import Any

import attrs
import msgspec

from infercore import errors

_UNPROCESSED = 408


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


def api_error(error: BaseException) -> ApiError:
    """Return what a client is told of ``error``; what is not its fault is a 5xx without detail."""
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, (msgspec.ValidationError, msgspec.DecodeError)):
        return ApiError(400, message, param=_param(message))
    if isinstance(error, errors.ContextOverflowError):
        return ApiError(400, message, param="messages", code="context_length_exceeded")
    if isinstance(error, errors.InvalidInputError):
        return ApiError(400, message, param=error.field)
    if isinstance(error, errors.UnsupportedFeatureError):
        return ApiError(400, message, param=error.feature, code="unsupported")
    if isinstance(error, errors.GrammarError):
        return ApiError(400, message, param="response_format", code="invalid_schema")
    if isinstance(error, errors.PoolFullError):
        seconds = max(1, math.ceil(error.retry_after or 1))
        retry = {"Retry-After": str(seconds)}
        return ApiError(429, message, "rate_limit_error", code="busy", headers=retry)
    if isinstance(error, errors.CallTimeoutError):
        return ApiError(_UNPROCESSED, message, "timeout_error", code="timeout")
    if isinstance(error, (errors.SessionClosedError, errors.TransientEngineError)):
        retry = {"Retry-After": "1"}
        return ApiError(503, message, "server_error", code="unavailable", headers=retry)
    if isinstance(error, errors.InferCoreError):
        return ApiError(500, message, "server_error", code=type(error).__name__)
    return ApiError(500, "the server failed; its log says more", "server_error", code="internal")


def _param(message: str) -> str | None:
    """Return the field that a complaint of msgspec names (`` `$.field` ``, unknown `` `field` ``)."""
    quoted = message.split("`")[1::2]
    paths = [part for part in quoted if part.startswith("$.")]
    name = paths[-1][2:] if paths else None
    if "unknown field" in message or "required field" in message:
        return ".".join(part for part in (name, quoted[0]) if part)
    return name
