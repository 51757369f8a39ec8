"""Templates of every kind: what they are given, and what stops those that go too far."""

from __future__ import annotations

import collections
import enum
import time
import types
from typing import Any

import numpy as np
import pytest

import infercore as ic
from infercore.chat.template import render

DOUBLING = "{{% set n = namespace(x='abcdefgh') %}}{{% for i in range(60) %}}{}{{% endfor %}}"
ENDS = {"bos_token": "<s>"}
USER = [{"role": "user", "content": "hello"}]


def rendered(template: str, rows: Any = USER, **fields: Any) -> str:
    fields = {"add_generation_prompt": True, "tools": None, **fields}
    return render(template, rows, **fields)


def test_what_templates_expect_is_there() -> None:
    assert rendered("{{ bos_token }}{{ messages[0].content }}", bos_token="<s>") == "<s>hello"  # noqa: S106
    assert rendered("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    loop = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert rendered(loop) == "01"
    assert rendered("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hello!"
    assert rendered("{{ {'b': 'é<', 'a': 1} | tojson }}") == '{"b": "é<", "a": 1}'
    assert rendered("{{ {'a': [1]} | tojson(indent=2) }}") == '{\n  "a": [\n    1\n  ]\n}'
    assert rendered("{{ [1, 2] | map('string') | tojson }}") == '["1", "2"]'
    assert rendered("{% if add_generation_prompt %}yes{% endif %}") == "yes"
    assert rendered("{{ thinking }}", thinking="on") == "on"
    assert rendered("{{ tools[0].name }}", tools=[{"name": "weather"}]) == "weather"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert rendered("{% for p in messages[0].content %}{{ p.text }}{% endfor %}", parts) == "a"


def test_loops_keep_their_variables() -> None:
    loop = "{{ loop.index }}/{{ loop.length }}{{ loop.last }} "
    template = "{% for m in messages %}" + loop + "{% endfor %}"
    assert rendered(template, USER * 2) == "1/2False 2/2True "
    nested = "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% else %}none{% endfor %}"
    assert rendered(nested) == "a1"
    assert rendered("{% for x in [] %}{% else %}none{% endfor %}") == "none"
    assert rendered("{% for x in missing %}{% else %}none{% endfor %}") == "none"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('System role not supported') }}",
        "{% if %}",
        "{{ messages[7].content }}{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{{ none | length }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ undefined_function() }}",
    ],
)
def test_a_refusal_is_typed_and_says_what_to_do(template: str) -> None:
    with pytest.raises(ic.InvalidInputError, match="chat template") as caught:
        rendered(template)
    assert "ensure_prefix" in str(caught.value)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ '{0.__class__}'.format(1) }}",
    ],
)
def test_the_sandbox(template: str) -> None:
    with pytest.raises(ic.InvalidInputError):
        rendered(template + "{{ 1 / 0 }}")


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{{ [0] * 10000000000 }}",
        "{{ 9 ** 999999999 }}",
        "{{ 'a'.ljust(10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        DOUBLING.format("{% set n.x = n.x + n.x %}"),
        DOUBLING.format("{% set n.x = n.x ~ n.x %}"),
        DOUBLING.format("{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"),
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_without_bounds_is_stopped(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infercore.limited.process.MAX_SECONDS", 0.3)
    started = time.perf_counter()
    with pytest.raises(ic.InvalidInputError, match=r"stopped|refuses"):
        rendered(template)
    assert time.perf_counter() - started < 20


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in x %}" * 110 + "{% endfor %}" * 110,
        "{{ '1e999' | float | int }}",
        "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    ],
)
def test_what_the_compiler_itself_stumbles_over_is_typed(template: str) -> None:
    with pytest.raises(ic.InvalidInputError, match=r"nested too deeply|name 'inf'"):
        rendered(template)


class Role(str, enum.Enum):
    USER = "user"


class Number(int):
    pass


def test_values_of_classes_of_their_own_are_what_they_hold() -> None:
    rows = [{"role": Role.USER, "content": collections.OrderedDict(a=Number(3))}]
    assert rendered("{{ messages[0].role }}{{ messages[0].content.a + 1 }}", rows) == "user4"
    all_of_them = "{{ a is mapping }}{{ b + 1 }}{{ c }}{{ d }}"
    values = {"a": types.MappingProxyType({}), "b": np.float64(1), "c": Role.USER, "d": Number(3)}
    assert rendered(all_of_them, **values) == "True2.0user3"
    assert rendered("{{ a.content }}", a=ic.Message(role="user", content="x")) == "x"
    assert rendered("{{ a }}", a=(1, Number(2))) == "(1, 2)"


NOT_PLAIN = [
    object(), len, type, iter([1]), {1}, frozenset("a"), b"xy", bytearray(b"xy"), 1j, ...,
    np.zeros(2), np.float32(1),
]  # fmt: skip


@pytest.mark.parametrize("value", NOT_PLAIN, ids=lambda value: type(value).__name__)
def test_a_variable_that_is_no_plain_data_is_refused(value: Any) -> None:
    with pytest.raises(ic.InvalidInputError, match="plain data") as caught:
        rendered("{{ thing }}", thing=[value])
    assert caught.value.field == "thing"
    with pytest.raises(ic.InvalidInputError, match="plain data") as caught:
        rendered("{{ tools }}", tools=[{"name": "weather", "parameters": {"x": value}}])
    assert caught.value.field == "tools"


def test_data_that_holds_itself_is_refused() -> None:
    endless: Any = collections.OrderedDict()
    endless["self"] = endless
    with pytest.raises(ic.InvalidInputError, match="nested without end"):
        rendered("{{ thing }}", thing=endless)


def test_no_name_of_a_variable_is_taken() -> None:
    names = {"self": 1, "template": 2, "context": 3, "environment": 4}
    fields = {"add_generation_prompt": True, "tools": None, **names}
    text = render("{{ template }}{{ context }}{{ environment }}", USER, **fields)
    assert text == "234"


@pytest.mark.parametrize("rows", ["text", [5], [{"content": "x"}]])
def test_malformed_messages(rows: Any) -> None:
    with pytest.raises(ic.InvalidInputError):
        rendered("{{ messages }}", rows)
