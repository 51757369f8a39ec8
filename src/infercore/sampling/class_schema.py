"""The JSON schema of an attrs class or of a function's arguments, so that they can be generated."""

from __future__ import annotations

import enum
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs

from infercore.values import checks

_PLAIN = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    types.NoneType: {"type": "null"},
    list: {"type": "array"},
    dict: {"type": "object"},
}


def schema_of_class(cls: type) -> dict[str, Any]:
    """Return the JSON schema (2020-12) of the attrs class ``cls``.

    Properties are the arguments of its ``__init__``; those with a default may be left out, no
    others may come in. Known are str, int, float, bool, None, Literal, enums, unions, list,
    Sequence, tuple, dict and Mapping with str keys, attrs classes and Any. Raises
    `InvalidInputError` for another type, naming class and field.
    """
    defs: dict[str, Any] = {}
    root = _class(cls, defs)
    return {**root, "$defs": defs}


def _class(cls: type, defs: dict[str, Any]) -> dict[str, Any]:
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name not in defs:
        defs[name] = {}  # a class that holds itself finds its name here
        defs[name] = _object(cls, defs)
    return {"$ref": f"#/$defs/{name}"}


def _object(cls: type, defs: dict[str, Any]) -> dict[str, Any]:
    attrs.resolve_types(cls)
    fields = [field for field in attrs.fields(cls) if field.init]
    return {
        "type": "object",
        "properties": {
            field.alias: _schema(field.type, f"{cls.__qualname__}.{field.name}", defs)
            for field in fields
        },
        "required": [field.alias for field in fields if field.default is attrs.NOTHING],
        "additionalProperties": False,
    }


def _schema(kind: Any, where: str, defs: dict[str, Any]) -> dict[str, Any]:
    if kind is None or kind is Any:
        return {}
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    if isinstance(kind, type) and attrs.has(kind):
        return _class(kind, defs)
    return _composed(kind, where, defs)


def _composed(kind: Any, where: str, defs: dict[str, Any]) -> dict[str, Any]:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"enum": list(parts)}
    if origin is Annotated:
        return _schema(parts[0], where, defs)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(part, where, defs) for part in parts]}
    if origin in (list, Sequence) or (origin is tuple and parts[-1:] == (...,)):
        return {"type": "array", "items": _schema(parts[0], where, defs)}
    if origin is tuple:
        return _fixed_array([_schema(part, where, defs) for part in parts])
    if origin in (dict, Mapping) and parts[0] is str:
        return {"type": "object", "additionalProperties": _schema(parts[1], where, defs)}
    raise checks.refuse(where, kind, "a type that JSON has (see the documentation)")


def _fixed_array(items: list[dict[str, Any]]) -> dict[str, Any]:
    size = {"minItems": len(items), "maxItems": len(items)}
    return {"type": "array", "prefixItems": items, **size}


def schema_of_arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of the keyword arguments that ``function`` takes.

    Types come from its annotations, as in `schema_of_class`; those with a default may be left out.
    Raises `InvalidInputError` for a parameter that cannot be given by name, or whose type JSON
    does not have.
    """
    name = getattr(function, "__name__", repr(function))
    defs: dict[str, Any] = {}
    properties, required = {}, []
    hints = get_type_hints(function)
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise checks.refuse(f"{name}.{key}", parameter, "parameters that have a name")
        properties[key] = _schema(hints.get(key, str), f"{name}.{key}", defs)
        if parameter.default is parameter.empty:
            required.append(key)
    schema = {"type": "object", "properties": properties, "required": required}
    return {**schema, "additionalProperties": False, **({"$defs": defs} if defs else {})}
