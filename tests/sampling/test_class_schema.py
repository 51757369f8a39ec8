from __future__ import annotations

import enum
import json
import sys
import types
from collections.abc import Mapping, Sequence  # noqa: TC003  (read by attrs)
from typing import Annotated, Any, Literal, Optional

import attrs
import jsonschema
import pytest

from infercore.errors import InvalidInputError, UnsupportedFeatureError
from infercore.sampling import compile_constraint
from infercore.sampling.class_schema import schema_of_class


class Colour(enum.Enum):
    RED = "red"
    BLUE = 2


@attrs.define
class Leaf:
    weight: float


@attrs.define
class Tree:
    name: str
    _hidden: int
    leaf: Leaf
    colour: Colour
    kind: Literal["oak", "ash"]
    parent: Tree | None
    tags: list[str]
    pair: tuple[int, bool]
    row: tuple[int, ...]
    seen: Sequence[int]
    scores: dict[str, float]
    more: Mapping[str, int]
    any: Any
    note: Annotated[str, "short"] = ""
    old: Optional[int] = None  # noqa: UP045  (the older way to write it)
    plain: list = attrs.field(factory=list)
    derived: int = attrs.field(init=False, default=0)


VALUE = {
    "name": "a",
    "hidden": 1,
    "leaf": {"weight": 0.5},
    "colour": 2,
    "kind": "ash",
    "parent": None,
    "tags": ["x"],
    "pair": [1, True],
    "row": [1, 2, 3],
    "seen": [],
    "scores": {"a": 0.5},
    "more": {"b": 1},
    "any": [{}],
}


def test_an_attrs_class_becomes_a_schema_of_its_arguments():
    schema = schema_of_class(Tree)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate({**VALUE, "parent": VALUE, "note": "n", "old": 3, "plain": [1]}, schema)
    wrong = [
        {"name": 3},
        {"leaf": {}},
        {"leaf": {"weight": 1, "x": 1}},
        {"colour": "blue"},
        {"kind": "elm"},
        {"parent": 3},
        {"tags": [1]},
        {"pair": [1]},
        {"pair": [1, True, 2]},
        {"row": ["a"]},
        {"scores": {"a": "b"}},
        {"derived": 1},
        {"_hidden": 1},
    ]
    for change in wrong:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**VALUE, **change}, schema)
    for name in VALUE:
        missing = {key: value for key, value in VALUE.items() if key != name}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(missing, schema)


def test_its_constraint_takes_its_instances(tokenizer):
    constraint = compile_constraint(Tree, tokenizer)
    constraint.accept_all(json.dumps(VALUE, separators=(",", ":")).encode())
    assert constraint.is_accepting
    assert "derived" not in schema_of_class(Tree)["$defs"][f"{__name__}.Tree"]["properties"]


@attrs.define
class Odd:
    when: complex


@attrs.define
class Numbered:
    by_number: dict[int, str]


@pytest.mark.parametrize(("cls", "place"), [(Odd, "Odd.when"), (Numbered, "Numbered.by_number")])
def test_a_type_that_json_lacks_is_refused_by_name(cls, place):
    with pytest.raises(InvalidInputError) as caught:
        schema_of_class(cls)
    assert caught.value.field == place


def test_a_pydantic_model_gives_its_own_schema(tokenizer, monkeypatch):
    class BaseModel:
        @classmethod
        def model_json_schema(cls):
            return {"type": "object", "title": "M", "properties": {"a": {"const": 1}}}

    class Mine(BaseModel):
        pass

    with pytest.raises(InvalidInputError):  # pydantic is not there, so this is none of its models
        compile_constraint(Mine, tokenizer)
    stand_in = types.ModuleType("pydantic")
    stand_in.BaseModel = BaseModel
    monkeypatch.setitem(sys.modules, "pydantic", stand_in)
    constraint = compile_constraint(Mine, tokenizer)
    constraint.accept_all(b'{"a":1')
    with pytest.raises(InvalidInputError):
        compile_constraint(int, tokenizer)


@pytest.mark.parametrize("response_format", [{}, {"type": "regex", "pattern": "a"}, Tree])
def test_without_llguidance_the_error_says_how_to_install_it(
    make_tokenizer, monkeypatch, response_format
):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedFeatureError, match=r"\[constraints\]") as caught:
        compile_constraint(response_format, make_tokenizer())
    assert caught.value.feature == "response_format"
