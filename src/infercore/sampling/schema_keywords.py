"""Says in keywords that llguidance has what a JSON schema says in others.

What comes out allows no text that the schema forbids; where it allows less, the docstrings say so.
A keyword that cannot be expressed stays, and llguidance refuses it by name.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from infercore.errors import GrammarError
from infercore.sampling.vocabulary import llguidance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Schema = dict[str, Any]

TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}
_MAX_EXACT = 2**53  # llguidance keeps numbers as float64
_MAX_ALTERNATIVES = 400
_MAX_CONTAINED_AT = 8
_TRIED = 20_000  # arrays that are looked at
_OF_ITEMS = ("minItems", "maxItems", "minContains", "maxContains")
_MAX_SIZE = 2**31 - 1
_SIZES = ("maxLength", "maxItems", "maxProperties")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "not", "if", "then", "else",
           "propertyNames")  # fmt: skip
_UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties", "maxContains")
_LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties", "minContains")


def simplified(schema: Schema, source: str) -> Schema:
    """Return a schema that llguidance can follow better; ``schema`` is plain JSON.

    Raises `GrammarError` for a number that it could not keep exactly.
    """
    try:
        return _Simplifier(schema, source).whole()
    except RecursionError as error:
        raise GrammarError("the JSON schema is nested too deeply", source=source) from error


class _Simplifier:
    def __init__(self, root: Schema, source: str) -> None:
        self._root = root
        self._source = source

    def whole(self) -> Schema:
        return self._schema(self._root)  # type: ignore[no-any-return]

    def _schema(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        found = dict(schema)
        for key in _MAPS:
            if isinstance(found.get(key), dict):
                found[key] = {name: self._schema(inner) for name, inner in found[key].items()}
        for key in _LISTS:
            if isinstance(found.get(key), list):
                found[key] = [self._schema(inner) for inner in found[key]]
        for key in _SINGLE:
            if key in found:
                found[key] = self._schema(found[key])
        steps: tuple[Callable[[Schema], Schema], ...] = (
            self._numbers, self._format, self._not, self._unique, self._contains, self._names,
            self._dependent, self._conditional,
        )  # fmt: skip
        for step in steps:
            found = step(found)
        return found

    # -- numbers and texts

    def _numbers(self, schema: Schema) -> Schema:
        """Numbers of more than 53 bits: as bounds they are narrowed, elsewhere refused."""
        for key in (*_UPPER, *_LOWER):
            value: Any = schema.get(key)
            if not _is_number(value) or abs(value) <= _MAX_EXACT:
                continue
            if (value > 0) != (key in _UPPER):
                self._refuse(key, value)
            schema = {**schema, key: _MAX_EXACT if value > 0 else -_MAX_EXACT}
        for key in _SIZES:  # no text is as long as that
            if _is_number(schema.get(key)) and schema[key] > _MAX_SIZE:
                schema = _without(schema, key)
        for key in ("const", "enum", "multipleOf"):
            if key in schema:
                for value in _numbers_in(schema[key]):
                    if isinstance(value, int) and abs(value) > _MAX_EXACT:
                        self._refuse(key, value)
        return schema

    def _refuse(self, key: str, value: Any) -> None:
        shown = str(value) if abs(value) < 10**30 else "a number of more than 30 digits"
        raise GrammarError(
            f"the JSON schema is refused: {key!r} holds {shown}, which is beyond 2**53 and could "
            "not be kept exactly",
            source=self._source,
        )

    def _format(self, schema: Schema) -> Schema:
        """A format that nobody knows is an annotation, as the standard has it."""
        name = schema.get("format")
        if isinstance(name, str) and not _is_known_format(name):
            return _without(schema, "format")
        return schema

    # -- values that can be listed

    def _values(self, schema: Any, depth: int = 8) -> list[Any] | None:
        """Return all values of a schema that lists them; None where it does not."""
        if not isinstance(schema, dict) or depth == 0:
            return None
        if isinstance(ref := schema.get("$ref"), str) and set(schema) <= {"$ref", *_LABELS}:
            return self._values(self._resolved(ref), depth - 1)
        if set(schema) - {"enum", "const", "type", *_LABELS, *_OF_ROOT}:
            return None
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            if not isinstance(values, list):
                return None
            if "enum" in schema and "const" in schema:
                values = [value for value in values if _same(value, schema["const"])]
            return [value for value in _distinct(values) if _is_of(value, schema.get("type"))]
        of_types: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
        return of_types.get(str(schema.get("type")))

    def _resolved(self, ref: str) -> Any:
        found: Any = self._root
        if not ref.startswith("#/"):
            return None
        for part in ref[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                return None
            found = found[name]
        return found

    def _not(self, schema: Schema) -> Schema:
        """``not`` of listed values, or of a type, where the rest lists its values."""
        if "not" not in schema:
            return schema
        rest = _without(schema, "not")
        inner = schema["not"]
        if inner is False:
            return rest
        values, others = self._values(rest), self._values(inner)
        is_a_type = isinstance(inner, dict) and set(inner) - {*_LABELS} == {"type"}
        if values is None or (others is None and not (is_a_type and _are_types(inner["type"]))):
            return schema
        if others is None:
            left = [value for value in values if not _is_of(value, inner["type"])]
        else:
            left = _parted(values, others)[1]
        if not left:
            raise GrammarError(
                "the JSON schema is refused: 'not' leaves no value", source=self._source
            )
        return {**{key: schema[key] for key in _OF_ROOT if key in schema}, "enum": left}

    # -- arrays

    def _unique(self, schema: Schema) -> Schema:
        """``uniqueItems`` over few listed values: every arrangement of them."""
        if "uniqueItems" not in schema:
            return schema
        rest = _without(schema, "uniqueItems")
        if schema["uniqueItems"] is False or schema.get("maxItems", 2) <= 1:
            return rest
        values = self._values(schema.get("items"))
        allowed = {"type", "items", "minItems", "maxItems", "uniqueItems", *_LABELS, *_OF_ROOT}
        if values is None or set(schema) - allowed or schema.get("type") != "array":
            return schema
        low = schema.get("minItems", 0)
        high = min(schema.get("maxItems", len(values)), len(values))
        arrangements = (
            list(chosen)
            for size in range(low, high + 1)
            for chosen in itertools.permutations(values, size)
        )
        listed = list(itertools.islice(arrangements, _MAX_ALTERNATIVES + 1))
        if not listed or len(listed) > _MAX_ALTERNATIVES:
            return schema
        return {**{key: schema[key] for key in _OF_ROOT if key in schema}, "enum": listed}

    def _contains(self, schema: Schema) -> Schema:
        """``contains``: one item of the kind, among the first eight (later ones are not tried)."""
        if "contains" not in schema:
            return _without(schema, "minContains", "maxContains")
        low, high = schema.get("minContains", 1), schema.get("maxContains")
        rest = _without(schema, "contains", "minContains", "maxContains")
        if low == 0 and high is None:
            return rest
        items = schema.get("items", {})
        if low != 1 or high is not None:
            return self._counted(schema, low, high)
        if "prefixItems" in schema or items is False:
            return schema
        last = min(schema.get("maxItems", _MAX_CONTAINED_AT), _MAX_CONTAINED_AT)
        wanted = _both(items, schema["contains"])
        ways: list[Schema] = [
            {
                **rest,
                "type": "array",
                "prefixItems": [*[items] * at, wanted],
                "minItems": max(at + 1, schema.get("minItems", 0)),
            }
            for at in range(last)
        ]
        if not ways or schema.get("type") != "array":
            return schema
        return self._one_of(schema, ways)

    def _counted(self, schema: Schema, low: Any, high: Any) -> Schema:
        """``contains`` with bounds, of few listed values: every array that holds so many."""
        values, wanted = self._values(schema.get("items")), self._values(schema["contains"])
        least, most = schema.get("minItems", 0), schema.get("maxItems", _MAX_CONTAINED_AT + 1)
        allowed = {"type", "items", "contains", *_OF_ITEMS, *_LABELS, *_OF_ROOT}
        if values is None or wanted is None or set(schema) - allowed or most > _MAX_CONTAINED_AT:
            return schema
        if schema.get("type") != "array" or sum(len(values) ** n for n in range(most + 1)) > _TRIED:
            return schema
        keys = set(map(_key, wanted))
        marked = [(value, _key(value) in keys) for value in values]
        listed = [
            [value for value, _ in chosen]
            for size in range(least, most + 1)
            for chosen in itertools.product(marked, repeat=size)
            if low <= sum(is_wanted for _, is_wanted in chosen) <= (size if high is None else high)
        ]
        if not listed or len(listed) > _MAX_ALTERNATIVES:
            return schema
        return {**{key: schema[key] for key in _OF_ROOT if key in schema}, "enum": listed}

    # -- objects

    def _names(self, schema: Schema) -> Schema:
        """``propertyNames`` by a list or a pattern."""
        if "propertyNames" not in schema or schema.get("patternProperties"):
            return schema
        rule, rest = schema["propertyNames"], _without(schema, "propertyNames")
        properties: Schema = dict(rest.get("properties", {}))
        others = rest.get("additionalProperties", {})
        values = self._values(rule)
        if values is not None:
            names = [value for value in values if isinstance(value, str)]
            kept = {name: properties.get(name, others) for name in names}
            kept = {name: inner for name, inner in kept.items() if inner is not False}
            return {**rest, "properties": kept, "additionalProperties": False}
        if not isinstance(rule, dict) or set(rule) - {"pattern", "type", *_LABELS}:
            return schema
        pattern = rule.get("pattern", "")
        if not all(_matches(pattern, name) for name in properties):
            return schema
        return (
            rest
            if others is False
            else {**rest, "patternProperties": {pattern: others}, "additionalProperties": False}
        )

    def _dependent(self, schema: Schema) -> Schema:
        """``dependentRequired``: without the property, or with what it needs."""
        if "dependentRequired" not in schema:
            return schema
        rest = _without(schema, "dependentRequired")
        ways: list[Schema] = [rest]
        for name, needed in schema["dependentRequired"].items():
            required = [*rest.get("required", [])]
            if not needed or _is_absent(rest, name):
                continue
            with_it = [
                {**way, "required": [*dict.fromkeys([*way.get("required", []), name, *needed])]}
                for way in ways
            ]
            without = [
                {**way, "properties": {**way.get("properties", {}), name: False}} for way in ways
            ]
            can_do_without = name not in required
            ways = with_it + [way for way in without if can_do_without and _is_open(way, name)]
            if len(ways) > _MAX_ALTERNATIVES:
                return schema
        return self._one_of(schema, ways)

    def _conditional(self, schema: Schema) -> Schema:
        """``if`` over one property with listed values: its values split in two."""
        if "if" not in schema:
            return _without(schema, "then", "else")
        rest = _without(schema, "if", "then", "else")
        test = schema["if"]
        if not isinstance(test, dict) or set(test) - {"properties", "required", "type", *_LABELS}:
            return schema
        properties = test.get("properties")
        if not isinstance(properties, dict) or len(properties) != 1:
            return schema
        ((name, inner),) = properties.items()
        values = self._values(rest.get("properties", {}).get(name))
        chosen = self._values(inner)
        if values is None or chosen is None or rest.get("type") != "object":
            return schema
        if test.get("required", [name]) != [name] or test.get("type", "object") != "object":
            return schema
        yes, no = _parted(values, chosen)
        ways = [_choosing(rest, name, part, schema.get(key, True))
                for part, key in ((yes, "then"), (no, "else")) if part]  # fmt: skip
        if name not in rest.get("required", []):
            key = "else" if "required" in test else "then"
            absent = {**rest, "properties": {**rest["properties"], name: False}}
            ways.append(_both(absent, schema.get(key, True)))
        return self._one_of(schema, [way for way in ways if way is not False])

    @staticmethod
    def _one_of(schema: Schema, ways: list[Schema]) -> Schema:
        if len(ways) == 1:
            return ways[0]
        shared: Schema = {key: schema[key] for key in _OF_ROOT if key in schema}
        return {**shared, "anyOf": [_without(way, *shared) for way in ways]}


# -- small things --------------------------------------------------------------------------------

_OF_ROOT = ("$defs", "definitions", "x-guidance", "$schema")
_LABELS = ("title", "description", "default", "examples", "$comment", "deprecated")


def _choosing(rest: Schema, name: str, values: list[Any], also: Any) -> Any:
    required = [*dict.fromkeys([*rest.get("required", []), name])]
    properties = {**rest["properties"], name: {"enum": values}}
    return _both({**rest, "properties": properties, "required": required}, also)


def _both(first: Any, second: Any) -> Any:
    if first is False or second is False:
        return False
    if first in (True, {}):
        return second
    return first if second in (True, {}) else {"allOf": [first, second]}


def _without(schema: Schema, *keys: str) -> Schema:
    return {key: value for key, value in schema.items() if key not in keys}


def _is_absent(schema: Schema, name: str) -> bool:
    """Whether no object of ``schema`` can have the property."""
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return closed and name not in schema.get("properties", {})


def _is_open(schema: Schema, name: str) -> bool:
    return name not in schema.get("required", [])


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numbers_in(value: Any) -> Iterator[Any]:
    if _is_number(value):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _numbers_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers_in(inner)


def _same(first: Any, second: Any) -> bool:
    """Equality as JSON has it: 1 is 1.0, and true is not 1."""
    return _key(first) == _key(second)


def _parted(values: list[Any], others: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return those of ``values`` that are among ``others``, and the rest."""
    keys = set(map(_key, others))
    parts: tuple[list[Any], list[Any]] = [], []
    for value in values:
        parts[_key(value) not in keys].append(value)
    return parts


def _key(value: Any) -> str:
    def plain(inner: Any) -> Any:
        if isinstance(inner, float) and inner.is_integer():
            return int(inner)
        if isinstance(inner, list):
            return [plain(item) for item in inner]
        if isinstance(inner, dict):
            return {name: plain(item) for name, item in inner.items()}
        return inner

    return json.dumps(plain(value), sort_keys=True)


def _distinct(values: list[Any]) -> list[Any]:
    return list({_key(value): value for value in values}.values())


def _are_types(kind: Any) -> bool:
    kinds = kind if isinstance(kind, list) else [kind]
    return all(isinstance(one, str) and one in TYPES for one in kinds)


def _is_of(value: Any, kind: Any) -> bool:
    if kind is None:
        return True
    if isinstance(kind, list):
        return any(_is_of(value, one) for one in kind)
    is_integer = _is_number(value) and float(value).is_integer()
    return {
        "boolean": isinstance(value, bool),
        "null": value is None,
        "string": isinstance(value, str),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
        "number": _is_number(value),
        "integer": is_integer,
    }.get(kind, False)


@functools.lru_cache(maxsize=256)
def _is_known_format(name: str) -> bool:
    matcher = llguidance().LLMatcher
    grammar = matcher.grammar_from_json_schema({"type": "string", "format": name})
    return "Unknown format" not in str(matcher.validate_grammar(grammar))
