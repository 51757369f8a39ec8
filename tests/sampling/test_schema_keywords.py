"""Keywords said in other words: what is allowed is valid, and what cannot be said is refused."""

from __future__ import annotations

import contextlib
import json

import jsonschema
import numpy as np
import pytest

from infercore.errors import GrammarError, InvalidInputError
from infercore.sampling import compile_constraint

NULLS = {"a": {"type": "null"}, "b": {"type": "null"}}
CLOSED = {"type": "object", "additionalProperties": False}
KINDS = {"enum": ["a", "b"]}
# schema, texts that must be possible
SCHEMAS = {
    "unique": (
        {"type": "array", "items": {"enum": ["a", "b", 1, 1.0]}, "uniqueItems": True,
         "minItems": 1},
        ['["b","a"]', '["a"]'],
    ),
    "unique of one": (
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1},
        ['["x"]', "[]"],
    ),
    "unique by reference": (
        {"$defs": {"c": {"enum": ["r", "g", "b"]}}, "type": "array", "uniqueItems": True,
         "items": {"$ref": "#/$defs/c"}, "maxItems": 2},
        ['["r","b"]'],
    ),
    "not unique": ({"type": "array", "items": KINDS, "uniqueItems": False}, ['["a","a"]']),
    "not": ({"enum": ["a", "b", 3, True], "not": {"enum": ["b", 1]}}, ['"a"', "3", "true"]),
    "not a boolean": ({"type": "boolean", "not": {"const": True}}, ["false"]),
    "contains": (
        {"type": "array", "items": {"enum": [1, 2, 3]}, "contains": {"const": 2}, "maxItems": 4},
        ["[1,1,1,2]", "[2]"],
    ),
    "not a type": (
        {"enum": [1, "a", None, 2.5], "not": {"type": ["string", "null"]}},
        ["1", "2.5"],
    ),
    "contains at least": (
        {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}, "minContains": 2,
         "maxItems": 3},
        ["[2,2]", "[1,2,2]", "[2,2,2]"],
    ),
    "contains at most": (
        {"type": "array", "items": {"enum": [1, 2]}, "contains": {"enum": [2, 3]},
         "maxContains": 1, "maxItems": 3, "minItems": 1},
        ["[2]", "[1,2,1]"],
    ),
    "contains none": (
        {"type": "array", "items": KINDS, "contains": {"const": "a"}, "minContains": 0,
         "maxContains": 0, "maxItems": 2},
        ["[]", '["b","b"]'],
    ),
    "contains any number": (
        {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}, "minContains": 0},
        ["[]", "[1]"],
    ),
    "dependent": (
        {**CLOSED, "properties": {**NULLS, "c": {"type": "boolean"}},
         "dependentRequired": {"a": ["b"], "c": ["a"]}},
        ["{}", '{"b":null}', '{"a":null,"b":null}', '{"a":null,"b":null,"c":true}'],
    ),
    "dependent on what is required": (
        {**CLOSED, "properties": NULLS, "required": ["a"], "dependentRequired": {"a": ["b"]}},
        ['{"a":null,"b":null}'],
    ),
    "names by pattern": (
        {"type": "object", "propertyNames": {"pattern": "^[a-c]{2}$"}, "maxProperties": 2,
         "additionalProperties": {"type": "boolean"}},
        ['{"ab":true}', "{}"],
    ),
    "names by list": (
        {"type": "object", "propertyNames": {"enum": ["x", "y"]},
         "additionalProperties": {"type": "null"}},
        ['{"x":null,"y":null}'],
    ),
    "if then else": (
        {**CLOSED, "properties": {"k": KINDS, "v": {"type": ["null", "boolean"]}},
         "required": ["k"], "if": {"properties": {"k": {"const": "a"}}},
         "then": {"properties": {"v": {"type": "null"}}, "required": ["v"]},
         "else": {"properties": {"v": {"type": "boolean"}}}},
        ['{"k":"a","v":null}', '{"k":"b","v":true}', '{"k":"b"}'],
    ),
    "if it is there": (
        {**CLOSED, "properties": {"k": KINDS, "v": {"type": "null"}},
         "if": {"properties": {"k": {"const": "a"}}, "required": ["k"]},
         "then": {"required": ["v"]}},
        ['{"k":"a","v":null}', '{"k":"b"}', "{}"],
    ),
    "if it is absent too": (
        {**CLOSED, "properties": {"k": {"type": "boolean"}, "v": {"type": "null"}},
         "if": {"properties": {"k": {"const": True}}}, "then": {"required": ["v"]}},
        ['{"v":null}', '{"k":true,"v":null}', '{"k":false}'],
    ),
    "then without if": ({"type": "null", "then": {"type": "string"}}, ["null"]),
    "a format that nobody knows": (
        {"type": "string", "format": "password", "maxLength": 4}, ['"abc"'],
    ),
    "bounds beyond 64 bits": (
        {"type": "integer", "minimum": -(2**70), "maximum": 10**400}, ["-5", "123456"],
    ),
    "sizes beyond 64 bits": ({"type": "string", "maxLength": 2**70}, ['"abc"']),
    "within": (
        {"type": "array", "maxItems": 2,
         "items": {"type": "object", "properties": {"s": {"type": "string", "format": "x"}},
                   "required": ["s"], "additionalProperties": False}},
        ['[{"s":"a"}]'],
    ),
}  # fmt: skip


def may_be(constraint, text):
    try:
        constraint.accept_all(list(text.encode()))
    except InvalidInputError:
        return False
    return constraint.is_accepting


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_allowed_is_valid(tokenizer, name):
    schema, possible = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(schema)
    start = compile_constraint(schema, tokenizer)
    for text in possible:
        assert validator.is_valid(json.loads(text))
        assert may_be(start.clone(), text), text
    random = np.random.default_rng(7)
    n_whole = 0
    for _ in range(40):
        text = written(start.clone(), random)
        if text is not None:
            n_whole += 1
            assert validator.is_valid(json.loads(text)), text
    assert n_whole > 5


def written(constraint, random, budget=120):
    """Return a text that the constraint allows, of printable characters; None without an end."""
    taken = bytearray()
    for _ in range(budget):
        ways = np.flatnonzero(constraint.allowed()[32:127]) + 32
        if not len(ways) or (constraint.is_accepting and random.random() < 0.4):
            break
        taken.append(int(random.choice(ways)))
        constraint.accept(taken[-1])
    return taken.decode() if constraint.is_accepting else None


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        (
            {"type": "array", "items": {"enum": list("abcdefgh")}, "uniqueItems": True},
            "uniqueItems",
        ),
        ({"not": {"type": "string"}}, "not"),
        ({"enum": ["a"], "not": {"const": "a"}}, "not"),
        ({"enum": ["a"], "not": {"type": "text"}}, "not"),
        ({"if": {"type": "string"}, "then": {"maxLength": 2}}, "if"),
        ({"type": "array", "contains": {"const": 1}, "minContains": 2}, "contains"),
        ({"type": "array", "contains": {"const": 1}, "maxContains": 2}, "contains"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"const": 2**70}, "const"),
        ({"enum": [1, [2**53 + 1]]}, "enum"),
        ({"type": "integer", "minimum": 2**70}, "minimum"),
        ({"type": "integer", "maximum": -(10**400)}, "maximum"),
        ({"type": "integer", "multipleOf": 2**64}, "multipleOf"),
        ({"type": "string", "minLength": 2**70}, "minLength"),
    ],
)
def test_what_cannot_be_said_is_refused_by_its_name(tokenizer, schema, keyword):
    with pytest.raises(GrammarError, match=keyword):
        compile_constraint(schema, tokenizer)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_lacks(tokenizer, number):
    with pytest.raises(InvalidInputError):
        compile_constraint({"type": "number", "maximum": number}, tokenizer)


ODD = [
    "x",
    1.5,
    -1,
    None,
    True,
    [],
    {},
    2**70,
    10**400,
    [1],
    [2**70],
    {"a": 2**70},
    {"type": 2**70},
]
PLACES = (
    "items", "prefixItems", "contains", "minContains", "maxContains", "uniqueItems", "maxItems",
    "properties", "required", "dependentRequired", "propertyNames", "patternProperties", "pattern",
    "format", "type", "enum", "const", "not", "if", "then", "anyOf", "allOf", "$ref", "$defs",
    "minimum", "multipleOf", "maxLength", "minProperties", "title", "default", "no-such-keyword",
)  # fmt: skip


@pytest.mark.parametrize("key", PLACES)
def test_a_keyword_of_another_type_is_typed(tokenizer, key):
    """Wherever a number stands that the compiler cannot write, or a value that is none."""
    arrays = {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 1}, "maxItems": 3}
    for base in (arrays, {"type": "object", "properties": NULLS, "if": {"required": ["a"]}}, {}):
        for value in ODD:
            with contextlib.suppress(GrammarError, InvalidInputError):
                compile_constraint(
                    {"type": "json_schema", "schema": {**base, key: value}}, tokenizer
                )
