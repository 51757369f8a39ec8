"""The OpenAPI description of the routes, made from the requests that they read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

import infercore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infercore.serve.wire import Request

_REF = "#/components/schemas/{name}"
_GETS = {
    "/v1/models": "The models that are served",
    "/health": "Whether the server takes requests",
    "/metrics": "Metrics in the text format of Prometheus",
    "/openapi.json": "This document",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_REFUSALS = {
    "400": "The request is wrong; the message says how",
    "401": "A key is missing or wrong",
    "404": "No such model",
    "408": "The request's time was over before the first token",
    "413": "The body is too large",
    "429": "Too many requests; Retry-After says when to ask again",
    "503": "Not at the moment",
}


def document(posts: Mapping[str, type[Request]], models: Sequence[str]) -> dict[str, Any]:
    """Return the description (https://spec.openapis.org/oas/v3.1.0), as JSON can hold it."""
    _, components = msgspec.json.schema_components(list(posts.values()), ref_template=_REF)
    for kind in posts.values():
        components[kind.__name__]["properties"]["model"] = {"type": "string", "enum": [*models]}
    paths: dict[str, Any] = {path: {"post": _post(kind)} for path, kind in posts.items()}
    for path, summary in _GETS.items():
        paths[path] = {"get": {"summary": summary, "responses": {"200": {"description": "OK"}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "infercore", "version": infercore.__version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _post(kind: type[Request]) -> dict[str, Any]:
    schema = {"$ref": _REF.format(name=kind.__name__)}
    error = {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}
    refusals = {
        status: {"description": text, "content": error} for status, text in _REFUSALS.items()
    }
    summary = (kind.__doc__ or "").strip()
    return {
        "summary": summary,
        "security": [{}, {"key": []}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "OK"}, **refusals},
    }
