"""What a tool's schema offers is what its function gets; other types are refused as it is given."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import itertools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import attrs
import pytest

from infercore.chat.tools import Tools
from infercore.errors import InvalidInputError
from infercore.sampling.class_schema import schema_of_arguments
from infercore.sampling.class_values import arguments_of
from infercore.session import tool_loop
from infercore.values.session import StreamChunk, ToolCall


class Colour(enum.Enum):
    RED = "red"
    NONE = 0


class Level(enum.IntEnum):
    LOW = 1


@attrs.frozen
class Place:
    name: str
    _miles: int = 3


@dataclasses.dataclass
class Trip:
    places: list[Place]
    colour: Colour = Colour.RED
    next: Trip | None = None
    n_made: int = dataclasses.field(default=0, init=False)


class Options(TypedDict, total=False):
    place: Place
    fast: bool


@attrs.frozen
class Even:
    value: int = attrs.field()

    @value.validator
    def _check(self, _attribute: Any, value: int) -> None:
        if value % 2:
            raise ValueError("odd")


class Pair(NamedTuple):
    a: int


class Plain:
    """A class of which nothing is known."""


CASES: list[tuple[Any, Any, Any]] = [
    (Place, {"name": "a"}, Place("a")),
    (Place, {"name": "a", "miles": 7.0}, Place("a", 7)),
    (Trip, {"places": [{"name": "a"}]}, Trip([Place("a")])),
    (
        Trip,
        {"places": [], "colour": 0, "next": {"places": []}},
        Trip([], Colour.NONE, Trip([])),
    ),
    (Options, {"place": {"name": "a"}}, {"place": Place("a")}),
    (Colour, "red", Colour.RED),
    (Level, 1, Level.LOW),
    (Place | None, None, None),
    (Place | None, {"name": "a"}, Place("a")),
    (int | Place, {"name": "a"}, Place("a")),
    (Even | Place, {"name": "a"}, Place("a")),
    (int | float, 2.5, 2.5),
    (list[Place], [{"name": "a"}], [Place("a")]),
    (Sequence[Colour], ["red"], [Colour.RED]),
    (tuple[Place, int], [{"name": "a"}, 1], (Place("a"), 1)),
    (tuple[Colour, ...], ["red", 0], (Colour.RED, Colour.NONE)),
    (dict[str, Place], {"x": {"name": "a"}}, {"x": Place("a")}),
    (Mapping[str, list[Colour]], {"x": [0]}, {"x": [Colour.NONE]}),
    (Annotated[Colour, "which"], "red", Colour.RED),
    (Literal["a", 1, True], 1, 1),
    (Literal["a", 1, True], True, True),
    (float, 2, 2.0),
    (int, 2.0, 2),
    (bool, True, True),
    (Any, {"a": [1]}, {"a": [1]}),
    (None, None, None),
]
REFUSED = (datetime, Pair, Plain, set[int], bytes, Literal[b"x"], dict[int, str], list[datetime])


def function_of(kind: Any) -> Any:
    def tell(value: Any) -> str:
        """Tell it."""
        return repr(value)

    tell.__annotations__["value"] = kind
    return tell


@pytest.mark.parametrize(("kind", "given", "expected"), CASES)
def test_a_function_gets_what_its_types_say(kind: Any, given: Any, expected: Any) -> None:
    function = function_of(kind)
    tools = Tools([{"name": "tell", "parameters": schema_of_arguments(function)}])
    given = json.loads(json.dumps({"value": given}))
    assert tools.accepts("tell", given)
    made = arguments_of(function, given)["value"]
    assert made == expected
    assert type(made) is type(expected)


@pytest.mark.parametrize("kind", REFUSED, ids=str)
def test_a_type_that_json_has_not_is_refused_as_the_function_is_given(kind: Any) -> None:
    with pytest.raises(InvalidInputError, match="tell"):
        tool_loop._tool("tell", function_of(kind))


def test_a_type_that_cannot_be_found_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="Nowhere"):
        schema_of_arguments(function_of("Nowhere"))


def test_what_a_class_refuses_goes_to_the_model() -> None:
    seen: list[Any] = []

    def chat(messages: Any, **_: Any) -> list[StreamChunk]:
        if len(messages) > 1:
            return [StreamChunk(text="ok", tokens=(), finish_reason="eos")]
        calls = [ToolCall(id=f"{i}", name="halve", arguments={"x": {"value": i}}) for i in (3, 4)]
        chunk = StreamChunk(text="", tokens=(), finish_reason="tool_calls")
        return [attrs.evolve(chunk, tool_calls=tuple(calls))]

    def halve(x: Even) -> int:
        seen.append(x)
        return x.value // 2

    halve.__annotations__["x"] = Even
    came = tool_loop.run(chat, [{"role": "user", "content": "?"}], [halve], max_rounds=2)
    assert [m.content for m in came] == ["", '{"error": "ValueError: odd"}', "2", "ok"]
    assert seen == [Even(4)]


@pytest.mark.parametrize("nested", [False, True])
def test_an_iterator_without_an_end_is_refused_by_the_name_of_its_function(nested) -> None:
    def chat(messages: Any, **_: Any) -> list[StreamChunk]:
        calls = (ToolCall(id="1", name="ones", arguments={}),)
        return [StreamChunk(text="", tokens=(), finish_reason="tool_calls", tool_calls=calls)]

    def ones() -> Any:
        return {"ones": itertools.repeat(1)} if nested else itertools.repeat(1)

    async def achat(messages: Any, **_: Any) -> Any:
        for chunk in chat(messages):
            yield chunk

    question = [{"role": "user", "content": "?"}]
    with pytest.raises(InvalidInputError, match="iterators end"):
        tool_loop.run(chat, question, [ones], max_rounds=2)
    with pytest.raises(InvalidInputError, match="iterators end"):
        asyncio.run(tool_loop.arun(achat, question, [ones], max_rounds=2))
