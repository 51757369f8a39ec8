"""The OpenAPI description of the routes, made from the requests that they read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

import infercore
from infercore.serve.guarding import OPEN_PATHS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infercore.serve.wire import Request

_REF = "#/components/schemas/{name}"
_NO_MODEL = "No such model"
_GETS = {
    "/v1/models": ("The models that are served", {}),
    "/v1/models/{name}": ("One of them", {"404": _NO_MODEL}),
    "/health": ("Whether the server takes requests", {}),
    "/metrics": ("Metrics in the text format of Prometheus", {}),
    "/openapi.json": ("This document", {}),
    "/": ("A page to chat", {}),
}
_KEY: list[dict[str, list[str]]] = [{}, {"key": []}]
"""A key, on a server that has any."""
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
_NO_KEY = "A key is missing or wrong"
_REFUSALS = {
    "400": "The request is wrong; the message says how",
    "401": _NO_KEY,
    "404": _NO_MODEL,
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
    paths |= {path: {"get": _get(path, *told)} for path, told in _GETS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "infercore", "version": infercore.__version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _get(path: str, summary: str, refusals: Mapping[str, str]) -> dict[str, Any]:
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    told: dict[str, Any] = {"summary": summary}
    if "{name}" in path:
        told["parameters"] = [name]
    if path in OPEN_PATHS:
        return {**told, "responses": _answers(refusals)}
    return {**told, "security": _KEY, "responses": _answers({"401": _NO_KEY, **refusals})}


def _post(kind: type[Request]) -> dict[str, Any]:
    schema = {"$ref": _REF.format(name=kind.__name__)}
    return {
        "summary": (kind.__doc__ or "").strip(),
        "security": _KEY,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": _answers(_REFUSALS),
    }


def _answers(refusals: Mapping[str, str]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}
    told = {status: {"description": text, "content": error} for status, text in refusals.items()}
    return {"200": {"description": "OK"}, **told}
