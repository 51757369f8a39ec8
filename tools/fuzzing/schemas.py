"""JSON schemas at random: what the constraint lets through is valid, by jsonschema."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import jsonschema

from fuzzing import Wrong
from fuzzing.states import parts, put
from infercore.sampling import compile_constraint

if TYPE_CHECKING:
    from random import Random

LIMIT_S = 15.0
BATCH = 200
N_TEXTS = 5
MAX_LENGTH = 160
_HUGE_SHARE = 0.1
_POINTED_SHARE = 0.1
_ODD_SHARE = 0.2  # of schemas with a value that is none there
NAMES = ("a", "b", "c d", "é", "x-1", "")
PATTERNS = ("^[a-c]+$", "^x[0-9]{2}$", "b", "^$", "(ab|c)d?", "^[^a]*$", "[", "(?=a)", "\\d")
FORMATS = ("date", "uuid", "email", "password", "binary", "ipv4", "no-such-format")
VALUES = (None, True, False, 0, 1, 1.0, -7, 2.5, "a", "b", "", "é", [], [1, "a"], {}, {"a": 1})
HUGE = (2**53 + 1, 2**63, 2**64, 2**70, -(2**70), 10**400, 1e308, -1, 2**31)


class _Maker:
    def __init__(self, random: Random) -> None:
        self._random = random

    def schema(self, depth: int) -> Any:
        r = self._random
        kind = r.randrange(9 if depth > 0 else 6)
        if kind == 0:
            return r.choice((True, {}, {"const": r.choice(VALUES)}, {"type": ["null", "boolean"]}))
        if kind == 1:
            return self._listed()
        if kind in (2, 3):
            return self._number()
        if kind in (4, 5):
            return self._string()
        if kind == 6:
            return self._array(depth)
        if kind == 7:
            return {r.choice(("anyOf", "allOf", "oneOf")): [self.schema(depth - 1)
                    for _ in range(r.choice((1, 2, 2, 3)))]}  # fmt: skip
        return self._object(depth)

    def _listed(self) -> dict[str, Any]:
        r = self._random
        values = (*VALUES, *[r.choice(HUGE)] * (r.random() < _HUGE_SHARE))
        found: dict[str, Any] = {"enum": r.sample(values, r.randrange(1, 5))}
        if r.random() < 0.3:
            found["not"] = {"enum": r.sample(VALUES, r.randrange(1, 3))}
        return found

    def _number(self) -> dict[str, Any]:
        r = self._random
        found: dict[str, Any] = {"type": r.choice(("integer", "number"))}
        for key in r.sample(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), 2):
            if r.random() < 0.5:
                found[key] = r.choice((0, 1, -12, 99, 2.5, 1e3, r.randrange(-500, 500)))
            if r.random() < 0.06:
                found[key] = r.choice(HUGE)
        if r.random() < 0.15:
            found["multipleOf"] = r.choice((1, 2, 5, 0.5, 3))
        return found

    def _string(self) -> dict[str, Any]:
        r = self._random
        found: dict[str, Any] = {"type": "string"}
        key = r.randrange(5)
        if key == 0:
            found["pattern"] = r.choice(PATTERNS)
        if key == 1:
            found["format"] = r.choice(FORMATS)
        if key == 2:
            found["maxLength"] = r.choice((0, 1, 4, *HUGE))
        if key == 3:
            found["minLength"] = r.choice((0, 1, 3))
        return found

    def _array(self, depth: int) -> dict[str, Any]:
        r = self._random
        listed = r.random() < 0.5
        found: dict[str, Any] = {"type": "array"}
        found["items"] = self._listed() if listed else self.schema(depth - 1)
        found["maxItems"] = r.choice((1, 2, 3, 5))
        if r.random() < 0.4:
            found["minItems"] = r.choice((0, 1, 2))
        if r.random() < 0.4:
            found["uniqueItems"] = r.random() < 0.8
        if r.random() < 0.3:
            found["contains"] = self._listed()
            if r.random() < 0.4:
                found[r.choice(("minContains", "maxContains"))] = r.choice((0, 1, 2))
        if r.random() < 0.2:
            found["prefixItems"] = [self.schema(depth - 1)]
        return found

    def _object(self, depth: int) -> dict[str, Any]:
        r = self._random
        names = r.sample(NAMES, r.randrange(1, 4))
        found: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._listed() if r.random() < 0.4 else self.schema(depth - 1)
                           for name in names},
            "additionalProperties": r.choice((False, False, False, self.schema(depth - 1))),
        }  # fmt: skip
        if r.random() < 0.6:
            found["required"] = r.sample(names, r.randrange(len(names) + 1))
        if r.random() < 0.2:
            found["dependentRequired"] = {r.choice(names): [r.choice(names)]}
        if r.random() < 0.25:
            self._condition(found, names, depth)
        if r.random() < 0.15:
            found["propertyNames"] = r.choice(
                ({"enum": names[:2]}, {"pattern": r.choice(PATTERNS)}, {"maxLength": 1})
            )
        if r.random() < 0.1:
            found["patternProperties"] = {r.choice(PATTERNS): self.schema(depth - 1)}
        return found

    def pointed(self) -> dict[str, Any]:
        """Return an object of a few listed values, and what few of its texts keep."""
        r = self._random
        names = r.sample(NAMES[:5], 3)
        found: dict[str, Any] = {
            "type": "object",
            "properties": {name: {"enum": [0, "a"]} for name in names},
            "additionalProperties": False,
        }
        a, b, _ = names
        found |= r.choice((
            {"dependentRequired": {a: [b]}}, {"propertyNames": {"enum": [a, b]}},
            {"propertyNames": {"pattern": "^[a-c]"}}, {"maxProperties": 1}, {"minProperties": 2},
            {"if": {"required": [a]}, "then": {"required": [b]}}, {"not": {"required": [a]}},
            {"if": {"properties": {a: {"const": 0}}}, "else": {"properties": {b: {"const": "a"}}}},
        ))  # fmt: skip
        return found

    def _condition(self, found: dict[str, Any], names: list[str], depth: int) -> None:
        r = self._random
        name = r.choice(names)
        found["properties"][name] = {"enum": ["a", "b", 1]}
        found["if"] = {"properties": {name: {"const": r.choice(("a", 1.0, "z"))}}}
        if r.random() < 0.5:
            found["if"]["required"] = [name]
        for key in ("then", "else"):
            if r.random() < 0.7:
                found[key] = r.choice((
                    {"required": [r.choice(names)]}, True, False,
                    {"properties": {r.choice(names): self.schema(depth - 1)}},
                ))  # fmt: skip


class Schemas:
    """Writes texts that the constraint allows, and has jsonschema judge them."""

    def __init__(self) -> None:
        from infercore.testing import load_toy_model  # noqa: PLC0415

        self._model = load_toy_model()
        self._tokenizer = self._model.tokenizer
        self._printable = [
            token for token in range(self._tokenizer.n_vocab)
            if not self._tokenizer.is_control(token)
            and self._tokenizer.token_bytes(token).isascii()
            and self._tokenizer.token_bytes(token).decode().isprintable()
        ]  # fmt: skip

    def case(self, random: Random) -> str:
        """Compile, write, judge."""
        maker = _Maker(random)
        schema = maker.pointed() if random.random() < _POINTED_SHARE else maker.schema(3)
        if isinstance(schema, bool):
            schema = {}
        if is_odd := random.random() < _ODD_SHARE:
            schema = json.loads(json.dumps(schema))
            put(random.choice([schema, *parts(schema)]) or schema, random)
        response_format = {"type": "json_schema", "schema": schema}
        start = compile_constraint(response_format, self._tokenizer)
        if is_odd:
            return "a schema of wrong types was taken"
        validator = jsonschema.Draft202012Validator(schema)
        found = []
        for _ in range(N_TEXTS):
            text = self._text(start.clone(), random)
            if text is None:
                continue
            value = json.loads(text)
            if not _is_valid(validator, value):
                raise Wrong(f"{text} is allowed and not valid: {json.dumps(schema)[:2000]}")
            found.append(text)
        return f"{schema}: {found}"

    def _text(self, constraint: Any, random: Random) -> str | None:
        """Return a text that the constraint allows; None where it finds no end."""
        taken = b""
        for _ in range(MAX_LENGTH):
            if constraint.is_accepting and random.random() < 0.5:
                break
            allowed = constraint.allowed()
            ways = [token for token in self._printable if allowed[token]]
            if not ways:
                break
            token = random.choice(ways)
            constraint.accept(token)
            taken += self._tokenizer.token_bytes(token)
        return taken.decode() if constraint.is_accepting else None


def _is_valid(validator: Any, value: Any) -> bool:
    """Judge; a pattern that nobody can read stands in a branch that nothing can enter."""
    try:
        return bool(validator.is_valid(value))
    except re.error:
        return True


def open_target() -> Schemas:
    """Return the target."""
    return Schemas()
