"""What a fresh reader found: each of these got through once."""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from infercore.chat.budget import ThoughtBudget
from infercore.chat.dialect import dialect_of
from infercore.chat.history import droppable
from infercore.chat.literal import Literal
from infercore.chat.reasoning import ReasoningFormat, ReasoningReader, find_reasoning_format
from infercore.chat.tool_format import JSON, NAMED, PYTHON, TAGGED, ToolFormat
from infercore.chat.tool_reader import ReadCall, ToolReader, read_all
from infercore.chat.tools import Tools
from infercore.errors import InvalidInputError
from infercore.session import tool_loop
from infercore.values.session import StreamChunk, ToolCall


def tool(parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"name": "w", **fields, "parameters": parameters}


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x.json"}}},
        {"type": "object", "properties": {"a": {"$ref": "file:///etc/hostname"}}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/nothing"}}},
        {"type": "array"},
    ],
)
def test_a_schema_that_leads_elsewhere_is_refused(
    parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("it was fetched"))
    with pytest.raises(InvalidInputError):
        Tools([tool(parameters)])


def test_a_schema_that_refers_to_itself_is_taken() -> None:
    parameters = {"$defs": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n"}}}
    tools = Tools([tool(parameters)])
    assert tools.accepts("w", {"a": 1})
    assert not tools.accepts("w", {"a": "x"})


def test_keys_of_a_tool_stay_in_order() -> None:
    (row,) = Tools([tool({"type": "object"}, description="d", strict=True)]).rows
    assert list(row["function"]) == ["name", "description", "strict", "parameters"]


HARMONY = (
    "<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>analysis<|message|>two"
    "<|end|><|start|>assistant<|channel|>final<|message|>Hi"
)


def test_two_thoughts_of_harmony() -> None:
    form = find_reasoning_format(lambda *_, **__: "", "<|channel|>")
    assert form is not None
    reader = ReasoningReader(form, inside=False)
    pieces = [piece for c in HARMONY for piece in reader.push(c)] + list(reader.finish())
    assert "".join(text.shown for text, inside in pieces if inside) == "onetwo"
    assert "".join(text.shown for text, inside in pieces if not inside) == "Hi"


class Letters:
    """A tokenizer whose tokens are bytes."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def is_control(self, _token: int) -> bool:
        return False


def test_a_second_thought_is_closed_as_the_first() -> None:
    budget: Any = ThoughtBudget(
        Letters(), ReasoningFormat("<t>", "</t>"), 2, inside=False, n_prompt=1
    )  # type: ignore[arg-type]
    ids = np.array([65], dtype=np.int32)
    text = b""
    plan = list(b"<t>xyz")
    for wanted in (plan, plan):
        for token in [*wanted, *b"\n" * 12]:
            logits = np.zeros(256, dtype=np.float32)
            logits[token] = 9.0
            chosen = int(np.argmax(budget(ids, logits)))
            ids = np.append(ids, np.int32(chosen))
            text += bytes([chosen])
    assert text.count(b"</t>") == 2


CALL = {"role": "assistant", "tool_calls": [{"id": "1"}]}
RESULT = {"role": "tool", "tool_call_id": "1"}
USER = {"role": "user"}


def test_a_call_never_goes_without_its_result() -> None:
    assert droppable([USER, CALL, USER, RESULT]) == []
    two = {"role": "assistant", "tool_calls": [{"id": "2"}]}
    last = {"role": "tool", "tool_call_id": "2"}
    rows = [USER, CALL, two, RESULT, last, {"role": "assistant"}]
    assert droppable(rows) == [(1, 2, 3, 4)]
    answer = {"role": "assistant"}
    assert droppable([{"role": "system"}, answer, answer, answer]) == [(1,), (2,)]
    assert droppable([RESULT, answer, CALL, RESULT]) == [(0, 1)]
    assert droppable([USER, CALL, RESULT, {"role": "assistant"}, USER]) == [(0, 1, 2, 3)]


LLAMA = ToolFormat(kind=JSON, name_key="name", arguments_key="parameters")
ONE = '{"name": "w", "parameters": {}}'


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"{ONE}; {ONE}\n;{ONE}", "www"),
        (f"{ONE}; and more", "w; and more"),
        (f"{ONE};", "w;"),
        (f"; {ONE}", f"; {ONE}"),
        (f"{ONE};; {ONE}", f"w;; {ONE}"),
    ],
)
def test_calls_of_llama_may_be_parted_by_semicolons(text: str, wanted: str, step: int) -> None:
    reader = ToolReader(LLAMA, Tools([tool({"type": "object"})]))
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    read = [item for piece in pieces for item in reader.push(piece)] + reader.finish()
    assert "".join(item if isinstance(item, str) else item.name for item in read) == wanted


def test_what_has_no_name_is_no_function() -> None:
    with pytest.raises(InvalidInputError):
        tool_loop._by_name([functools.partial(print)])
    for functions, fields in (([int], {}), ([test_keys_of_a_tool_stay_in_order], {"tools": []})):
        with pytest.raises(InvalidInputError):
            tool_loop.run(lambda *_, **__: [], [], functions, max_rounds=1, **fields)


# -- messages -------------------------------------------------------------------------------------

SHOWS_TWO = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "row",
    [
        {"role": "userr", "content": "a"},
        {"role": "", "content": "a"},
        {"role": "user", "content": "a", "tool_calls": [{"function": {"name": "w"}}]},
        {"role": "user", "contents": "a"},
        {"role": "user"},
        {"role": "assistant", "tool_calls": [{"name": "w", "arguments": {"a": object()}}]},
        {"role": "assistant", "tool_calls": [{"name": "w", "arguments": {"a": float("nan")}}]},
        {"role": "assistant", "tool_calls": [ToolCall(id="1", name="w", arguments={"a": 1j})]},
        {"role": "assistant", "content": "a", "function_call": {"name": "w", "arguments": "{}"}},
        {"role": "assistant", "content": "a", "reasoning": 5},
        {"role": "user", "content": "a", "name": 5},
    ],
)
def test_what_would_be_lost_of_a_message_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        dialect_of(SHOWS_TWO, "", "").render([row], add_generation_prompt=False)


def test_results_of_calls_whose_ids_come_again_go_with_the_nearest_call() -> None:
    turn = [USER, CALL, RESULT, {"role": "assistant"}]
    assert droppable([*turn, *turn, USER, CALL, RESULT]) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    nameless = {"role": "tool"}
    turn = [USER, {"role": "assistant", "tool_calls": [{}]}, nameless]
    assert droppable([*turn, *turn, USER]) == [(0, 1, 2), (3, 4, 5)]


def test_a_tool_is_rendered_as_it_is_given() -> None:
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    given = [{"type": "function", "function": {"name": "w"}, "x": 1}]
    tools = Tools(given)
    assert tools.rows == given
    assert tools.accepts("w", {})
    user = {"role": "user", "content": "a"}
    picky = "{{ tools[0].function.description + '' }}" + template
    for text in (template, picky):
        shown = dialect_of(text, "", "").render([user], add_generation_prompt=True, tools=given)
        assert shown.startswith('[{"type": "function", "function": {"name": "w"')


# -- calls ----------------------------------------------------------------------------------------

TAGGED_FORM = ToolFormat(
    kind=TAGGED,
    call_open=Literal.of("<f="),
    after_name=Literal.of(">"),
    arg_open=Literal.of("<p="),
    after_key=Literal.of(">"),
    after_key_of_other=Literal.of(">"),
    arg_close=Literal.of("</p>"),
    call_close=Literal.of("</f>"),
)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "42", "42"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, '"abc"', "abc"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"$ref": "#/$defs/s"}, "[1]", "[1]"),
        ({"type": "string"}, "<![CDATA[x]]>", "<![CDATA[x]]>"),
        ({"type": "integer"}, "3", 3),
    ],
)
def test_a_text_that_looks_like_something_else(kind: Any, text: str, value: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"a b": kind},
        "$defs": {"s": {"type": "string"}},
    }
    tools = Tools([{"name": "mcp:add", "parameters": parameters}])
    found = read_all(TAGGED_FORM, tools, f"<f=mcp:add><p=a b>{text}</p></f>")
    assert found == [ReadCall("mcp:add", {"a b": value})]


def test_names_of_any_kind_are_read_in_every_form() -> None:
    tools = Tools([{"name": name} for name in ("mcp:add", "get-it", "a/b c", "add")])
    named = ToolFormat(kind=NAMED, call_open=Literal.of("[C]"), after_name=Literal.of("[A]"))
    python = ToolFormat(kind=PYTHON, section_open=Literal.of("[P]["))
    for name in tools.names:
        assert read_all(named, tools, f"[C]{name}[A]{{}}") == [ReadCall(name, {})]
        assert read_all(python, tools, f"[P][{name}()") == [ReadCall(name, {})]


def test_a_long_call_is_read_in_time_that_grows_with_it() -> None:
    tools = Tools([{"name": "w"}])
    form = ToolFormat(kind=NAMED, call_open=Literal.of("[C]"), after_name=Literal.of("[A]"))
    for filler in ("abc ", '\\"{}', "\\\\[]"):
        reader = ToolReader(form, tools)
        out = [item for piece in ["[C]w[A]", '{"a": "'] for item in reader.push(piece)]
        steps = Counter[str]()
        sys.setprofile(lambda frame, *_, s=steps: s.update([frame.f_code.co_name]))
        try:
            for _ in range(2_000):
                out += reader.push(filler)
        finally:
            sys.setprofile(None)
        assert steps["_balanced_end"] == 0
        out += [*reader.push('"}'), *reader.finish()]
        assert [item.name for item in out if isinstance(item, ReadCall)] == ["w"]


# -- functions ------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Found:
    colour: Colour
    words: set[str]


def asked_once(function: Any) -> list[Any]:
    def chat(messages: Any, **_: Any) -> list[StreamChunk]:
        calls = (ToolCall(id="1", name=function.__name__, arguments={}),)
        made = () if len(messages) > 1 else calls
        return [StreamChunk(text="ok", tokens=(), tool_calls=made, finish_reason="eos")]

    return tool_loop.run(chat, [{"role": "user", "content": "?"}], [function], max_rounds=2)


def test_results_of_a_programs_own_types_are_json() -> None:
    def find() -> Found:
        return Found(Colour.RED, {"é"})

    def divide() -> float:
        return float("nan")

    def read() -> Any:
        return (text.encode() for text in ("a", "é"))

    assert asked_once(read)[1].content == '["a", "é"]'
    assert asked_once(find)[1].content == '{"colour": "red", "words": ["é"]}'
    assert "ValueError" in str(asked_once(divide)[1].content)


def test_a_function_that_has_to_be_awaited_is_refused() -> None:
    async def inner() -> int:
        return 1

    def outer() -> Any:
        return inner()

    with pytest.raises(InvalidInputError, match="AsyncSession"):
        asked_once(outer)


def test_a_lambda_has_no_name_to_be_called_by() -> None:
    with pytest.raises(InvalidInputError):
        tool_loop._by_name([lambda: 1])


def test_the_end_of_a_call_of_harmony_is_no_text_wherever_it_is_cut() -> None:
    tools = Tools([{"name": "w"}])
    text = "<|channel|>commentary to=functions.w <|constrain|>json<|message|>{}<|call|>"
    for cuts in ([text], list(text)):
        reader = ToolReader(ToolFormat(kind="harmony"), tools)
        out = [item for piece in cuts for item in reader.push(piece)] + reader.finish()
        assert out == [ReadCall("w", {})]


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.f code<|message|>",
        "<|channel|>commentary to=f <|constrain|>json<|message|>",
        " to=f<|channel|>commentary json<|message|>",
    ],
)
def test_headers_of_harmony_as_models_write_them(header: str) -> None:
    tools = Tools([{"name": "f", "parameters": {"type": "object"}}])
    reader = ToolReader(ToolFormat(kind="harmony"), tools)
    out = [*reader.push(header + '{"q": 1}<|call|>'), *reader.finish()]
    assert [part for part in out if part] == [ReadCall("f", {"q": 1})]
    plain = "from 1 to=2 and on, as it is"
    reader = ToolReader(ToolFormat(kind="harmony"), tools)
    assert "".join([*reader.push(plain), *reader.finish()]) == plain
