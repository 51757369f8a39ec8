"""Where in a JSON schema an error sits, for a checker that tells only what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "contains")
_MAX_CHECKS = 200
_SHARED = ("$defs", "definitions", "x-guidance")


def place_of_error(
    schema: Mapping[str, Any], error: str, check: Callable[[Mapping[str, Any]], str]
) -> str:
    """Return the JSON pointer ("#/properties/a") of the deepest part with the same ``error``.

    ``check(schema)`` returns the error of a schema by itself, "" where there is none. After some
    checks the place found so far has to do.
    """
    shared = {key: schema[key] for key in _SHARED if key in schema}
    path, part = "#", schema
    n_left = _MAX_CHECKS
    while True:
        for step, inner in _parts(part):
            n_left -= 1
            if n_left < 0:
                return path
            if check({**shared, **inner}) == error:
                path, part = f"{path}/{step}", inner
                break
        else:
            return path


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key in (*_MAPS, *_LISTS, *_SINGLE):
        held = schema.get(key)
        if key in _MAPS and isinstance(held, Mapping):
            named = [(f"{key}/{_escaped(str(name))}", inner) for name, inner in held.items()]
        elif key in _LISTS and isinstance(held, (list, tuple)):
            named = [(f"{key}/{place}", inner) for place, inner in enumerate(held)]
        else:
            named = [(key, held)]
        yield from ((step, inner) for step, inner in named if isinstance(inner, Mapping))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
