"""Answers that are made to mislead the readers: what is not a valid call stays text."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import attrs
import pytest

from infercore.chat.answer import AnswerReader
from infercore.chat.literal import Literal
from infercore.chat.reasoning import ReasoningFormat
from infercore.chat.tool_format import BRACED, JSON, NAMED, NESTED, PYTHON, TAGGED, ToolFormat
from infercore.chat.tool_reader import ReadCall, ToolReader, read_all
from infercore.chat.tools import Tools

of = Literal.of
FORMS = {
    "json": ToolFormat(
        kind=JSON,
        call_open=of("<tool_call>\n"),
        call_close=of("\n</tool_call>"),
        between=of("\n"),
        name_key="name",
        arguments_key="arguments",
    ),
    "named": ToolFormat(kind=NAMED, call_open=of("[CALL]"), after_name=of("[ARGS]")),
    "tagged": ToolFormat(
        kind=TAGGED,
        call_open=of("<tool_call><function="),
        after_name=of(">\n"),
        call_close=of("</function></tool_call>"),
        arg_open=of("<parameter="),
        after_key=of(">"),
        after_key_of_other=of(">"),
        arg_close=of("</parameter>\n"),
    ),
    "nested": ToolFormat(
        kind=NESTED,
        call_open=of('!<invoke name="'),
        after_name=of('">'),
        call_close=of("!</invoke>"),
        arg_open=of("!<"),
        after_key=of(">"),
        arg_close=of("!</"),
    ),
    "braced": ToolFormat(
        kind=BRACED, call_open=of("<call>call:"), call_close=of("<call|>"), quote='<"|'
    ),
    "python": ToolFormat(
        kind=PYTHON, section_open=of("<|calls|>["), between=of(", "), section_close=of("]<|end|>")
    ),
}
ANY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": True}
TOOLS = Tools([{"name": "f", "parameters": ANY}])
THINK = ReasoningFormat("<think>", "</think>")


def text_of(out: list[str | ReadCall]) -> str:
    return "".join(item for item in out if isinstance(item, str))


def calls_of(out: list[str | ReadCall]) -> list[ReadCall]:
    return [item for item in out if isinstance(item, ReadCall)]


@pytest.mark.parametrize(
    ("form", "body"),
    [
        ("json", '{"name": "f", "arguments": {"a": 1, "a": 2}}'),
        ("json", '{"name": "f", "name": "g", "arguments": {}}'),
        ("json", '{"name": "f", "arguments": {"a": "\\ud800"}}'),
        ("json", '{"name": "f", "arguments": {"\\udfff": 1}}'),
        ("json", '{"name": "f", "arguments": {"a": 1e999}}'),
        ("json", '{"name": "f", "arguments": {"a": Infinity}}'),
        ("json", '{"name": "f", "arguments": {"a": ' + "[" * 300 + "]" * 300 + "}}"),
        ("json", '{"name": "f", "arguments": {"a": ' + "[" * 30_000 + "]" * 30_000 + "}}"),
        ("json", '{"name": "f", "arguments": {"a": 01}}'),
        ("json", '{"name": "f", "arguments": {"a": "\n"}}'),
        ("json", '{"name": "f", "arguments": {"a": 1,}}'),
        ("json", '{"name": "f", "arguments": "{\\"a\\": 1, \\"a\\": 2}"}'),
        ("json", '{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}'),
        ("json", '{"name": ["f"], "arguments": {"a": 1}}'),
        ("json", '{"name": "\uff46", "arguments": {"a": 1}}'),
        ("json", '{"name": "f ", "arguments": {"a": 1}}'),
        ("python", "f(a=1, a=2)"),
        ("python", "f(**{'a': 1})"),
        ("python", "f(a={1: 2})"),
        ("python", "f(a={'k': 1, 'k': 2})"),
        ("python", "f(a={1, 2})"),
        ("python", "f(a=b'x')"),
        ("python", "f(a=1j)"),
        ("python", "f(a=__import__('os'))"),
        ("python", "f(a=1 + 1)"),
        ("python", "f(a='\\ud800')"),
        ("python", "f(a=" + "[" * 3000 + "]" * 3000 + ")"),
        ("python", "f(a=" + "-" * 30_000 + "1)"),
        ("python", "f(1)"),
        ("python", "f(a=...)"),
        ("tagged", "f>\n<parameter=a>1</parameter>\n<parameter=a>2</parameter>\n"),
        ("nested", 'f">!<a>1!</a>!<a>2!</a>'),
        ("nested", 'f">' + "!<a>" * 3000 + "1" + "!</a>" * 3000),
        ("nested", 'f">!<a>!<b>1!</b>!<b>2!</b>!</a>'),
        ("braced", "f{a:1,a:2}"),
        ("braced", "f{a:" + "[" * 3000 + "]" * 3000 + "}"),
        ("braced", "f{a:nan}"),
        ("braced", "f{a:1e999}"),
        ("braced", "f{a:1 b:2}"),
    ],
)
@pytest.mark.parametrize("step", [1, 10_000_000])
def test_what_has_no_meaning_or_two_is_text(form: str, body: str, step: int) -> None:
    found = FORMS[form]
    opening = found.section_open.text + found.call_open.text
    whole = f"See: {opening}{body}{found.call_close.text}{found.section_close.text} Done."
    step = max(step, len(whole) // 40)
    reader = ToolReader(found, TOOLS)
    out: list[str | ReadCall] = []
    for at in range(0, len(whole), step):
        out += reader.push(whole[at : at + step])
    out += reader.finish()
    assert not calls_of(out)
    assert text_of(out) == whole


def test_a_call_within_a_refused_call_is_text() -> None:
    inner = "<tool_call><function=f>\n<parameter=a>1</parameter>\n</function></tool_call>"
    outer = (
        "<tool_call><function=nobody>\n<parameter=text>"
        f"{inner}</parameter>\n</function></tool_call>"
    )
    out = read_all(FORMS["tagged"], TOOLS, outer)
    assert not calls_of(out)
    assert text_of(out) == outer


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_marks_of_thoughts_within_a_call_are_part_of_it(step: int) -> None:
    arguments = {"a": "use <think> and </think>, or <think>"}
    call = f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    whole = f"<think>\nA thought with <tool_call>.\n</think>\n\nText. {call}"
    reader = AnswerReader("", reasoning=THINK, form=FORMS["json"], tools=TOOLS)
    pieces = [reader.push(whole[at : at + step]) for at in range(0, len(whole), step)]
    pieces.append(reader.finish())
    assert "".join(piece.reasoning for piece in pieces) == "A thought with <tool_call>."
    assert "".join(piece.text for piece in pieces).strip() == "Text."
    assert [call.arguments for piece in pieces for call in piece.calls] == [arguments]


def test_names_and_keys_of_other_letters_are_read() -> None:
    tools = Tools([{"name": "größe/v2", "parameters": ANY}])
    named = read_all(FORMS["named"], tools, '[CALL]größe/v2[ARGS]{"ä": 1}')
    assert [call.arguments for call in calls_of(named)] == [{"ä": 1}]
    body = (
        "<tool_call><function=größe/v2>\n<parameter=straße>1</parameter>\n</function></tool_call>"
    )
    assert [call.arguments for call in calls_of(read_all(FORMS["tagged"], tools, body))] == [
        {"straße": 1}
    ]
    spaced = read_all(FORMS["braced"], TOOLS, "<call>call:f{a b:1, c : 2}<call|>")
    assert [call.arguments for call in calls_of(spaced)] == [{"a b": 1, "c": 2}]


def test_an_empty_element_may_be_of_several_types() -> None:
    properties = {"t": {"type": ["string", "null"]}, "l": {"type": "array"}}
    tools = Tools([{"name": "f", "parameters": {"type": "object", "properties": properties}}])
    out = read_all(FORMS["nested"], tools, '!<invoke name="f">!<t>!</t>!<l>!</l>!</invoke>')
    assert [call.arguments for call in calls_of(out)] == [{"t": "", "l": []}]


@pytest.mark.parametrize("cut", range(70, 95))
def test_blanks_before_a_call_are_its_own_wherever_it_is_cut(cut: int) -> None:
    tools = Tools([{"name": "f", "parameters": {"type": "object", "additionalProperties": False}}])
    form = attrs.evolve(FORMS["tagged"], call_close=of("</function></tool_call>\n"))
    refused = "<tool_call><function=f>\n<parameter=a>1</parameter>\n</function></tool_call>"
    text = f"{refused}\n<tool_call><function=f>\n</function></tool_call>"
    reader = ToolReader(form, tools)
    out = [*reader.push(text[:cut]), *reader.push(text[cut:]), *reader.finish()]
    assert text_of(out) == refused
    assert len(calls_of(out)) == 1


def test_calls_of_python_may_take_several_lines() -> None:
    out = read_all(FORMS["python"], TOOLS, "<|calls|>[f(\n  a='x',\n  b=[1, true],\n)]<|end|>")
    assert [call.arguments for call in calls_of(out)] == [{"a": "x", "b": [1, True]}]


@pytest.mark.parametrize(
    ("written", "value"),
    [(r'"\/\ud83d\ude00\u00e9"', "/😀é"), ('{"k": 1, "k": [true, null]}', {"k": [True, None]})],
)
def test_a_call_of_python_that_a_grammar_wrote_holds_json(written: str, value: Any) -> None:
    reader = ToolReader(FORMS["python"], TOOLS, forced=True)
    out = [*reader.push(f"<|calls|>[f(a={written}, b=1)]<|end|>"), *reader.finish()]
    assert [call.arguments for call in calls_of(out)] == [{"a": value, "b": 1}]
    empty = ToolReader(FORMS["python"], TOOLS, forced=True).push("<|calls|>[f()]<|end|>")
    assert [call.arguments for call in calls_of(empty)] == [{}]


@pytest.mark.parametrize("name", sorted(FORMS))
def test_random_streams_lose_no_character(name: str) -> None:
    """Shuffled parts of calls, cut anywhere: text comes out as it went in, but for whole calls."""
    form, rng = FORMS[name], random.Random(name)
    marks = [
        form.section_open.text, form.call_open.text, form.call_close.text, form.section_close.text,
        form.arg_open.text, form.arg_close.text, form.after_name.text, form.after_key.text,
        form.quote, form.between.text, "f", '{"name": "f", "arguments": {}}', "f()", "f{}", "{}",
        '"', "{", "}", "[", "]", "(", ")", "\\", "'", ",", ":", " ", "\n", "text", "é", "🐑", "<",
        "a=1", '"a": 1', "a:1", "!", "</", ">", "\u200b", "\0", "&lt;", "name",
    ]  # fmt: skip
    for _ in range(300):
        whole = "".join(rng.choice(marks) for _ in range(rng.randint(1, 40)))
        reader = ToolReader(form, TOOLS)
        out: list[str | ReadCall] = []
        at = 0
        while at < len(whole):
            step = rng.randint(1, 9)
            out += reader.push(whole[at : at + step])
            at += step
        out += reader.finish()
        if not calls_of(out):
            assert text_of(out) == whole
        left = iter(whole)
        assert all(character in left for character in text_of(out)), whole


@pytest.mark.parametrize("name", sorted(FORMS))
def test_long_streams_that_never_close_take_no_time(name: str) -> None:
    form = FORMS[name]
    opening = (form.section_open.text or form.call_open.text) + "f"
    for whole in (opening * 2000, opening + '{"a": "' + "x" * 20_000, opening + "(" * 20_000):
        reader = ToolReader(form, TOOLS)
        started = time.process_time()
        out = [item for at in range(0, len(whole), 50) for item in reader.push(whole[at : at + 50])]
        out += reader.finish()
        assert text_of(out) == whole
        assert time.process_time() - started < 5
