"""Twenty JSON schemas, one or more for each thing a schema can ask for."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

CLOSED = {"additionalProperties": False}


def closed(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    """Return an object of just ``properties``, all required but the ``optional`` ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, **CLOSED}


SCHEMAS = MappingProxyType(
    {
        "flags": closed({"a": {"type": "boolean"}, "b": {"type": "null"}}),
        "bounds": {"type": "integer", "minimum": -12, "maximum": 345},
        "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 10_000},
        "number": {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.25},
        "unicode": closed({"stra\u00dfe": {"type": "string", "minLength": 2, "maxLength": 12}}),
        "any text": closed({"text": {"type": "string"}}),
        "enum": {"enum": ["red", "gr\u00fcn", "\u65e5\u672c", 3, None, {"x": [1]}]},
        "const": closed({"kind": {"const": 'a "quoted" \\ word'}, "n": {"enum": [1, 2]}}),
        "list": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 1000},
            "minItems": 2,
            "maxItems": 4,
        },
        "nested": closed(
            {
                "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
                "tags": {
                    "type": "array",
                    "items": {"type": "string", "maxLength": 5},
                    "maxItems": 3,
                },
                "in": closed({"z": {"const": 1}, "deep": closed({"y": {"type": "boolean"}})}),
            },
            "tags",
        ),
        "optional": closed(
            {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in "abcd"},
            "a",
            "b",
            "d",
        ),
        "either": {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "integer"}]},
        "tuple": {
            "type": "array",
            "prefixItems": [{"type": "string", "maxLength": 3}, {"type": "boolean"}],
            "items": False,
            "minItems": 2,
        },
        "chain": {
            "$defs": {
                "node": closed(
                    {
                        "v": {"type": "integer", "minimum": 0, "maximum": 9},
                        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                    }
                )
            },
            "$ref": "#/$defs/node",
        },
        "tree": {
            "$defs": {
                "tree": closed(
                    {
                        "leaf": {"type": "boolean"},
                        "kids": {
                            "type": "array",
                            "items": {"$ref": "#/$defs/tree"},
                            "maxItems": 2,
                        },
                    },
                    "kids",
                )
            },
            **closed({"root": {"$ref": "#/$defs/tree"}}),
        },
        "patterns": {
            "type": "object",
            "patternProperties": {"^x[0-9]$": {"type": "integer", "minimum": 1, "maximum": 5}},
            "minProperties": 1,
            "maxProperties": 2,
            **CLOSED,
        },
        "extra": {
            "type": "object",
            "properties": {"name": {"enum": ["Mira", "Tom"]}},
            "required": ["name"],
            "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "both": {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer", "maximum": 5}}},
                {"properties": {"b": {"type": "boolean"}}, "required": ["a", "b"]},
            ],
            "properties": {"a": {"minimum": 0}, "b": {}},
            **CLOSED,
        },
        "times": closed(
            {
                "day": {"type": "string", "format": "date"},
                "at": {"type": "string", "format": "date-time"},
                "id": {"type": "string", "format": "uuid"},
                "host": {"type": "string", "format": "ipv4"},
            },
            "at",
        ),
        "types": closed({"v": {"type": ["string", "null", "boolean"], "maxLength": 4}}),
    }
)
