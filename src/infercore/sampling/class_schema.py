"""The JSON schema of an attrs class or of a function's arguments, so that they can be generated."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

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
    Sequence, tuple, dict and Mapping with str keys, attrs classes, dataclasses, typed dicts and
    Any. Raises `InvalidInputError` for another type, naming class and field.
    """
    defs: dict[str, Any] = {}
    root = _class(cls, defs)
    return {**root, "$defs": defs}


@attrs.frozen
class Field:
    """An argument of a class, or a key of a `TypedDict`."""

    key: str
    name: str
    kind: Any
    is_required: bool


def is_object(kind: Any) -> bool:
    """Return whether ``kind`` is an attrs class, a dataclass or a `TypedDict`."""
    if not isinstance(kind, type):
        return False
    return attrs.has(kind) or dataclasses.is_dataclass(kind) or is_typeddict(kind)


def fields_of(cls: Any) -> list[Field]:
    """Return what makes an instance of an attrs class, a dataclass or a `TypedDict`."""
    hints = hints_of(cls)
    if attrs.has(cls):
        return [
            Field(f.alias, f.name, hints.get(f.name, f.type), f.default is attrs.NOTHING)
            for f in attrs.fields(cls)
            if f.init
        ]
    if is_typeddict(cls):
        return [Field(key, key, kind, key in cls.__required_keys__) for key, kind in hints.items()]
    none = dataclasses.MISSING
    return [
        Field(f.name, f.name, hints[f.name], f.default is none and f.default_factory is none)
        for f in dataclasses.fields(cls)
        if f.init
    ]


def hints_of(thing: Any) -> dict[str, Any]:
    """Return the types that a class or a function names.

    Raises `InvalidInputError` where one of them cannot be found.
    """
    try:
        return get_type_hints(thing)
    except (NameError, TypeError, AttributeError) as error:
        name = getattr(thing, "__qualname__", repr(thing))
        raise checks.refuse(
            name, f"{error}", "types that can be found where it is defined"
        ) from error


def _class(cls: type, defs: dict[str, Any]) -> dict[str, Any]:
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name not in defs:
        defs[name] = {}  # a class that holds itself finds its name here
        defs[name] = _object(cls, defs)
    return {"$ref": f"#/$defs/{name}"}


def _object(cls: type, defs: dict[str, Any]) -> dict[str, Any]:
    fields = fields_of(cls)
    return {
        "type": "object",
        "properties": {
            field.key: _schema(field.kind, f"{cls.__qualname__}.{field.name}", defs)
            for field in fields
        },
        "required": [field.key for field in fields if field.is_required],
        "additionalProperties": False,
    }


def _schema(kind: Any, where: str, defs: dict[str, Any]) -> dict[str, Any]:
    if kind is None or kind is Any:
        return {}
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _choice([member.value for member in kind], kind, where)
    if is_object(kind):
        return _class(kind, defs)
    return _composed(kind, where, defs)


def _composed(kind: Any, where: str, defs: dict[str, Any]) -> dict[str, Any]:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _choice(list(parts), kind, where)
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


def _choice(values: list[Any], kind: Any, where: str) -> dict[str, Any]:
    if not all(value is None or type(value) in (str, int, float, bool) for value in values):
        raise checks.refuse(where, kind, "values that JSON has")
    return {"enum": values}


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
    hints = hints_of(function)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:  # some builtins do not say what they take
        raise checks.refuse(name, function, "functions whose parameters are known") from error
    for key, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise checks.refuse(f"{name}.{key}", parameter, "parameters that have a name")
        properties[key] = _schema(hints.get(key, str), f"{name}.{key}", defs)
        if parameter.default is parameter.empty:
            required.append(key)
    schema = {"type": "object", "properties": properties, "required": required}
    return {**schema, "additionalProperties": False, **({"$defs": defs} if defs else {})}
