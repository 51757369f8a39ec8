"""Values of a function's own types, from the JSON that its schema describes."""

from __future__ import annotations

import enum
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, Union, get_args, get_origin, is_typeddict

from infercore.sampling.class_schema import fields_of, hints_of, is_object

_PLAIN = (str, int, float, bool, types.NoneType, list, dict)


class MismatchError(ValueError):
    """A value is none of the type in question."""


def arguments_of(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given``, which `schema_of_arguments` accepts, as ``function`` declares it.

    Objects become instances of attrs classes and dataclasses, values members of enums, lists
    tuples. Raises `ValueError` for a value that the schema does not accept, and what a class
    raises when it is made.
    """
    hints = hints_of(function)
    known = inspect.signature(function).parameters
    return {
        key: value_of(hints.get(key, str) if key in known else Any, v) for key, v in given.items()
    }


def value_of(kind: Any, value: Any) -> Any:
    """Return ``value``, of JSON's types, as one of type ``kind``."""
    if kind is Any or kind is None:
        return value
    if kind in _PLAIN:
        return _plain(kind, value)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _member(list(kind), [member.value for member in kind], value)
    if is_object(kind):
        made = _fields(kind, value)
        return made if is_typeddict(kind) else kind(**made)
    return _composed(kind, value)


def _plain(kind: Any, value: Any) -> Any:
    """Return a number as the kind of number it is to be, and anything else as it is."""
    if kind in (int, float) and type(value) in (int, float):
        _checked(value, holds=kind is float or value == int(value), kind=kind)
        return kind(value)
    return _checked(value, holds=type(value) is kind, kind=kind)


def _composed(kind: Any, value: Any) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return value_of(parts[0], value)
    if origin is Literal:
        return _member(parts, parts, value)
    if origin in (Union, types.UnionType):
        return _first(parts, value)
    if origin in (dict, Mapping):
        _checked(value, holds=isinstance(value, dict), kind=dict)
        return {key: value_of(parts[1], item) for key, item in value.items()}
    _checked(value, holds=isinstance(value, list), kind=list)
    if origin is tuple and parts[-1:] != (...,):
        _checked(value, holds=len(value) == len(parts), kind=kind)
        return tuple(value_of(part, item) for part, item in zip(parts, value, strict=True))
    made = [value_of(parts[0], item) for item in value]
    return tuple(made) if origin is tuple else made


def _first(parts: Sequence[Any], value: Any) -> Any:
    """Return the value as the first of the types that takes it."""
    for part in parts:
        with suppress(MismatchError):
            return value_of(part, value)
    return _checked(value, holds=False, kind=parts)


def _fields(kind: Any, value: Any) -> dict[str, Any]:
    _checked(value, holds=isinstance(value, dict), kind=kind)
    fields = {field.key: field for field in fields_of(kind)}
    needed = {key for key, field in fields.items() if field.is_required}
    _checked(value, holds=needed <= value.keys() <= fields.keys(), kind=kind)
    return {key: value_of(fields[key].kind, item) for key, item in value.items()}


def _member(members: Sequence[Any], values: Sequence[Any], value: Any) -> Any:
    """Return the member whose value this is; true and 1 are two values."""
    for member, known in zip(members, values, strict=True):
        if known == value and isinstance(known, bool) == isinstance(value, bool):
            return member
    return _checked(value, holds=False, kind=values)


def _checked(value: Any, *, holds: bool, kind: Any) -> Any:
    if not holds:
        raise MismatchError(f"{value!r} is not of type {getattr(kind, '__name__', kind)}")
    return value
