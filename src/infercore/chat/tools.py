"""The tools that a caller offers: their names, and what their schemas accept."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from infercore.errors import InvalidInputError
from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_SHARED = ("$defs", "definitions")
_EMPTY: dict[str, Any] = {"type": "object", "properties": {}}


class Tools:
    """Tools by name, from ``{"type": "function", "function": {...}}`` or the inner mapping alone.

    Raises `InvalidInputError` for a tool without a name, two of one name, or parameters that are
    no JSON schema.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        if isinstance(tools, (str, Mapping)):
            raise checks.refuse("tools", tools, "a sequence of tools")
        self.rows = [
            _as_api(tool) for tool in checks.items("tools", tools, "a list of mappings, or None")
        ]
        self._schemas: dict[str, dict[str, Any]] = {}
        self._validators: dict[str, Any] = {}
        for row in self.rows:
            function = row["function"]
            name = function["name"]
            if name in self._schemas:
                raise checks.refuse("tools", name, "tools of different names")
            self._schemas[name] = dict(function.get("parameters") or _EMPTY)
            self._validators[name] = _validator(name, self._schemas[name])

    @property
    def names(self) -> list[str]:
        """The names, in the order given."""
        return list(self._schemas)

    def schema(self, name: str) -> Mapping[str, Any]:
        """Return the JSON schema of a tool's arguments."""
        return self._schemas[name]

    def schema_of(self, name: str) -> Mapping[str, Any]:
        """Return the JSON schema of a tool's arguments; an empty one where none has this name."""
        return self._schemas.get(name, {})

    def keys(self, name: str) -> list[str]:
        """Return the names of a tool's arguments; none where no tool has this name."""
        return list(self._schemas.get(name, {}).get("properties", {}))

    def accepts(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """Return whether ``name`` is a tool and its schema accepts ``arguments``."""
        validator = self._validators.get(name)
        try:
            return validator is not None and bool(validator.is_valid(dict(arguments)))
        except RecursionError:
            return False

    def typed(self, name: str, key: str, text: str, *, is_text: bool | None) -> Any:
        """Return the value that ``text`` stands for where a form writes values without quotes.

        ``is_text`` is what the form itself says of it, None where it says nothing: then the
        schema decides.
        """
        if is_text:
            return text
        schema = self._schemas.get(name, {})
        kind = schema.get("properties", {}).get(key, {})
        if is_text is False or not isinstance(kind, Mapping):
            kind = {}
        return typed(text, kind, schema)


def typed(text: str, schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Any:
    """Return the value that ``text`` stands for: the first that its schema accepts.

    What is a string and nothing else is the text itself. ``whole`` holds the definitions.
    """
    if schema.get("type") == "string":
        return text
    found: list[Any] = []
    for read in (json.loads, ast.literal_eval):  # some templates write Python's own form
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            found.append(read(text))
    found.append(text)
    if len(found) == 1 or not schema:
        return found[0]
    accepts = _accepting({**{key: whole[key] for key in _SHARED if key in whole}, **schema})
    return next((value for value in found if accepts(value)), found[0])


def _accepting(schema: Mapping[str, Any]) -> Callable[[Any], bool]:
    from jsonschema import Draft202012Validator  # noqa: PLC0415  (only chats with tools)
    from referencing import Registry  # noqa: PLC0415

    validator = Draft202012Validator(schema, registry=Registry())

    def accepts(value: Any) -> bool:
        try:
            return bool(validator.is_valid(value))
        except RecursionError:
            return False

    return accepts


def _as_api(tool: Any) -> dict[str, Any]:
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise checks.refuse("tools", tool, 'mappings as {"type": "function", "function": {...}}')
    parameters = inner.get("parameters")
    if parameters is not None and not _is_json_object(parameters):
        raise checks.refuse("tools", parameters, "a JSON schema as parameters")
    outer = tool if "function" in tool else {"type": "function"}
    return {**outer, "function": dict(inner)}  # as the caller has it, which templates write


def _is_json_object(value: Any) -> bool:
    try:
        json.dumps(dict(value))
    except (TypeError, ValueError, RecursionError):
        return False
    return isinstance(value, Mapping)


def completed(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools in the API's form in which each has a description and parameters."""
    rows = [{**tool, "function": dict(tool.get("function", {}))} for tool in tools]
    for row in rows:
        function = row["function"]
        function.setdefault("description", "")
        function["parameters"] = function.get("parameters") or _EMPTY
    return rows


def _validator(name: str, schema: Mapping[str, Any]) -> Any:
    from jsonschema import Draft202012Validator, SchemaError  # noqa: PLC0415  (only chats with tools)
    from referencing import Registry  # noqa: PLC0415
    from referencing.exceptions import Unresolvable  # noqa: PLC0415
    from referencing.jsonschema import DRAFT202012  # noqa: PLC0415

    registry: Any = Registry()  # it fetches nothing: a schema refers to itself alone
    try:
        Draft202012Validator.check_schema(schema)
        resolver = registry.with_resource("", DRAFT202012.create_resource(schema)).resolver()
        for reference in _references(schema):
            resolver.lookup(reference)
    except (SchemaError, Unresolvable) as error:
        told = getattr(error, "message", None) or f"{error}"
        raise InvalidInputError(
            f"the parameters of tool {name!r} are not a JSON schema: {told}",
            field="tools",
            value=name,
            allowed="JSON schemas of draft 2020-12 that refer to themselves alone",
        ) from error
    except RecursionError as error:
        raise InvalidInputError(
            f"the parameters of tool {name!r} are nested too deeply; give a schema of fewer levels",
            field="tools",
            value=name,
            allowed="JSON schemas that are not nested without end",
        ) from error
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise checks.refuse("tools", schema, "parameters of type object")
    return Draft202012Validator(schema, registry=registry)


def _references(schema: Any) -> Iterator[str]:
    """Yield what a schema refers to, wherever it does."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            for key in ("$ref", "$dynamicRef"):
                if isinstance(part.get(key), str):
                    yield part[key]
            parts += part.values()
        elif isinstance(part, (list, tuple)):
            parts += part
