"""Tool calls: their form is found in a template, and they are read out of a stream."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import infercore as ic
from infercore.chat.dialect import dialect_of
from infercore.chat.messages import as_row
from infercore.chat.tool_reader import ReadCall, ToolReader, read_all
from infercore.chat.tools import Tools

FOLDER = "INFERCORE_CHAT_TEMPLATES"
TOOLS = [
    {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "where"},
                "days": {"type": "integer", "description": "how many"},
                "opts": {"type": "object", "description": "more", "additionalProperties": True},
            },
            "required": ["city"],
        },
    },
    {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {key: {"type": "number", "description": key} for key in "ab"},
            "required": ["a", "b"],
        },
    },
]
HEAD = (
    "{%- for t in tools or [] %}{{ t | tojson }}{% endfor -%}"
    "{%- for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
)
TAIL = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
LOOP = "{%- for c in m.tool_calls or [] -%}"
OWN = {
    "json": LOOP + "<tool_call>\n{{ c.function | tojson }}\n</tool_call>{%- endfor -%}",
    "list": "{%- if m.tool_calls %}[TOOL_CALLS][" + LOOP + "{{ c.function | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}]{% endif -%}",
    "named": LOOP + "<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function>"
    "{%- endfor -%}",
    "tagged": LOOP + "<tool_call><function={{ c.function.name }}>\n"
    "{%- for k, v in c.function.arguments.items() %}\n<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>{% endfor %}\n</function></tool_call>"
    "{%- endfor -%}",
    "python": "{%- if m.tool_calls %}<|calls|>[" + LOOP + "{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]<|/calls|>"
    "{% endif -%}",
    "braced": "{%- macro v(x) -%}{%- if x is string -%}<|q|>{{ x }}<|q|>"
    "{%- elif x is boolean -%}{{ 'true' if x else 'false' }}{%- elif x is mapping -%}"
    "{{ '{' }}{%- for k, w in x.items() -%}{{ ',' if not loop.first }}{{ k }}:{{ v(w) }}"
    "{%- endfor -%}{{ '}' }}"
    "{%- elif x is iterable -%}[{%- for w in x -%}{{ ',' if not loop.first }}{{ v(w) }}"
    "{%- endfor -%}]{%- else -%}{{ x }}{%- endif -%}{%- endmacro -%}" + LOOP + "<|call>call:"
    "{{ c.function.name }}{{ v(c.function.arguments) }}<call|>{%- endfor -%}",
    "nested": "{%- macro v(x) -%}{%- if x is mapping -%}{%- for k, w in x.items() -%}"
    "]![<{{ k }}>{{ v(w) }}]![</{{ k }}>{%- endfor -%}"
    "{%- elif x is iterable and x is not string -%}{%- for w in x -%}"
    "]![<item>{{ v(w) }}]![</item>{%- endfor -%}{%- else -%}{{ x }}{%- endif -%}"
    "{%- endmacro -%}{%- if m.tool_calls %}]![<tools>\n" + LOOP + ']![<invoke name="'
    '{{ c.function.name }}">{{ v(c.function.arguments) }}]![</invoke>\n{%- endfor -%}]![</tools>'
    "{%- endif -%}",
    "bare": "{%- if m.tool_calls %}{{ raise_exception('one') if m.tool_calls | length > 1 }}"
    "{{ {'name': m.tool_calls[0].function.name, 'parameters': m.tool_calls[0].function.arguments}"
    " | tojson }}{% endif -%}",
}
CALLS: list[list[tuple[str, dict[str, Any]]]] = [
    [
        (
            "get_weather",
            {"city": 'Zürich "x" </tool_call> {a}', "days": 3, "opts": {"u": [1, {"v": 2}]}},
        )
    ],
    [("add", {"a": 1, "b": 2.5}), ("get_weather", {"city": "Rome", "days": 2})],
    [("add", {"a": 1, "b": 2})] * 3,
]


def template_of(kind: str) -> str:
    return HEAD + OWN[kind] + TAIL


def dialect(template: str) -> Any:
    return dialect_of(template, "<s>", "</s>")


def written(found: Any, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """What the template writes for an assistant's calls, up to the end of the turn."""
    rows = [
        {"id": f"callid{i:03}", "type": "function", "function": {"name": n, "arguments": a}}
        for i, (n, a) in enumerate(calls)
    ]
    user = {"role": "user", "content": "zqwhere"}
    answer = {"role": "assistant", "content": None, "tool_calls": rows}
    tools = TOOLS_AS_API if found.renders_tools else None
    text = found.render([user, answer], add_generation_prompt=False, tools=tools)
    return text[text.rindex("zqwhere") + len("zqwhere") :]


TOOLS_AS_API = Tools(TOOLS).rows


def calls_of(out: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(item.name, item.arguments) for item in out if isinstance(item, ReadCall)]


def text_of(out: list[Any]) -> str:
    return "".join(item for item in out if isinstance(item, str))


@pytest.mark.parametrize("kind", sorted(OWN))
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_calls_are_read_as_they_are_written(kind: str, step: int) -> None:
    found = dialect(template_of(kind))
    form, tools = found.tool_format, Tools(TOOLS)
    assert form is not None
    for calls in CALLS if kind != "bare" else CALLS[:1]:
        body = written(found, calls).removeprefix("<|end|><|assistant|>").removesuffix("<|end|>")
        reader = ToolReader(form, tools)
        out: list[Any] = []
        for at in range(0, len(body), step):
            out += reader.push(body[at : at + step])
        out += reader.finish()
        assert calls_of(out) == calls
        assert not text_of(out).strip()


@pytest.mark.parametrize("kind", sorted(set(OWN) - {"bare"}))
def test_text_around_calls_stays(kind: str) -> None:
    found = dialect(template_of(kind))
    body = written(found, CALLS[1]).removeprefix("<|end|><|assistant|>").removesuffix("<|end|>")
    out = read_all(found.tool_format, Tools(TOOLS), f"See: <b> [x] {{y}} {body} Done.")
    assert calls_of(out) == CALLS[1]
    assert text_of(out).split() == ["See:", "<b>", "[x]", "{y}", "Done."]


@pytest.mark.parametrize("kind", sorted(OWN))
def test_what_is_cut_off_stays_text_to_the_last_character(kind: str) -> None:
    found = dialect(template_of(kind))
    body = written(found, CALLS[0]).removeprefix("<|end|><|assistant|>").removesuffix("<|end|>")
    for end in range(len(body)):
        out = read_all(found.tool_format, Tools(TOOLS), body[:end])
        assert calls_of(out) or text_of(out) == body[:end]


@pytest.mark.parametrize(
    "body",
    [
        '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": "one", "b": 2}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": NaN, "b": 2}}\n</tool_call>',
        "<tool_call>\nadd(1, 2)\n</tool_call>",
        '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>',
    ],
)
def test_a_call_that_is_not_valid_stays_text(body: str) -> None:
    found = dialect(template_of("json"))
    out = read_all(found.tool_format, Tools(TOOLS), f"a {body} b")
    assert out == [f"a {body} b"] or text_of(out) == f"a {body} b"
    assert not calls_of(out)


def test_a_call_is_given_out_before_the_next_one_is_written() -> None:
    found = dialect(template_of("list"))
    body = written(found, CALLS[1])
    reader = ToolReader(found.tool_format, Tools(TOOLS))
    before, comma, after = body.partition("}, {")
    out = reader.push(before.removeprefix("<|end|><|assistant|>") + comma)
    assert calls_of(out) == CALLS[1][:1]
    cut = [*out, *reader.push(after[:5]), *reader.finish()]
    assert calls_of(cut) == CALLS[1][:1]
    assert text_of(cut) == f", {{{after[:5]}"


def test_templates_without_tools_have_no_form() -> None:
    plain = dialect("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert plain.tool_format is None
    assert not plain.renders_tools


@pytest.mark.parametrize("bad", ["x", [1], [{"name": "a"}, {"name": "a"}], [{"nam": "a"}]])
def test_malformed_tools_are_refused(bad: Any) -> None:
    with pytest.raises(ic.InvalidInputError):
        Tools(bad)


def test_parameters_that_are_no_schema_are_refused() -> None:
    with pytest.raises(ic.InvalidInputError, match="not a JSON schema"):
        Tools([{"name": "a", "parameters": {"type": "nothing"}}])
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ic.InvalidInputError, match="nested too deeply") as caught:
        Tools([{"name": "a", "parameters": {"type": "object", "properties": {"x": deep}}}])
    assert caught.value.field == "tools"


def templates() -> list[Any]:
    folder = os.environ.get(FOLDER)
    if not folder:
        reason = f"set {FOLDER} to a folder of .jinja files (llama.cpp: models/templates)"
        return [pytest.param(None, marks=pytest.mark.skip(reason=reason))]
    found = sorted(pathlib.Path(folder).glob("*.jinja"))
    assert found, f"{FOLDER} has no .jinja files"
    return [pytest.param(path, id=path.stem) for path in found]


UNREAD = {  # their templates offer no tools
    "HuggingFaceTB-SmolLM3-3B", "google-gemma-2-2b-it", "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}  # fmt: skip


@pytest.mark.parametrize("path", templates())
def test_templates_of_models(path: pathlib.Path) -> None:
    found = dialect(path.read_text(encoding="utf-8"))
    form, tools = found.tool_format, Tools(TOOLS)
    assert (form is None) == (path.stem in UNREAD)
    if form is None:
        return
    for calls in (CALLS[0], CALLS[1]):
        wanted = calls[:1] if form.one_only else calls
        body = written(found, wanted)
        body = body[_start(body, form) :]
        pieces = [[body], list(body), *([body[:at], body[at:]] for at in range(1, len(body)))]
        for parts in pieces:
            reader, out = ToolReader(form, tools), list[Any]()
            for part in parts:
                out += reader.push(part)
            out += reader.finish()
            assert calls_of(out) == wanted


@pytest.mark.parametrize("path", templates())
def test_text_around_calls_of_models_and_calls_cut_off(path: pathlib.Path) -> None:
    found = dialect(path.read_text(encoding="utf-8"))
    form, tools = found.tool_format, Tools(TOOLS)
    if form is None:
        return
    body = written(found, CALLS[1][:1] if form.one_only else CALLS[1])
    body = body[_start(body, form) :]
    for end in range(0, len(body), 3):  # cut by the budget
        out = read_all(form, tools, body[:end])
        assert calls_of(out) or text_of(out) == body[:end]
    if form.is_marked:
        out = read_all(form, tools, f"One <moment> [please] {{now}}: {body} Done.")
        assert calls_of(out) == (CALLS[1][:1] if form.one_only else CALLS[1])
        assert text_of(out).startswith("One <moment> [please] {now}:")
        assert text_of(out).rstrip().endswith("Done.")


def joined(out: list[Any]) -> list[Any]:
    """Return texts that follow each other as one."""
    found: list[Any] = []
    for part in out:
        if found and isinstance(part, str) and isinstance(found[-1], str):
            found[-1] += part
        elif part:
            found.append(part)
    return found


@pytest.mark.parametrize("path", templates())
def test_where_a_stream_is_cut_changes_nothing(path: pathlib.Path) -> None:
    found = dialect(path.read_text(encoding="utf-8"))
    form, tools = found.tool_format, Tools(TOOLS)
    if form is None:
        return
    body = written(found, CALLS[1][:1] if form.one_only else CALLS[1])
    body = body[_start(body, form) :]
    before = "Now \n" if form.is_marked else ""
    for whole in (f"{before}{body}", f"{before}{body}\n", f"{before}{body}\n\n Done. \n"):
        wanted = joined(read_all(form, tools, whole))
        for cut in (1, 2, 5):
            reader, out = ToolReader(form, tools), list[Any]()
            for at in range(0, len(whole), cut):
                out += reader.push(whole[at : at + cut])
            out += reader.finish()
            assert joined(out) == wanted, cut


def _start(body: str, form: Any) -> int:
    """Where the answer begins: behind the marks that begin the turn, which are no answer."""
    if form.is_marked or form.kind == "harmony":
        return 0
    return min(at for word in ("{", "get_weather\n", "add\n") if (at := body.find(word)) >= 0)


@pytest.mark.skipif(FOLDER not in os.environ, reason=f"set {FOLDER} to a folder of .jinja files")
def test_the_page_of_forms_is_up_to_date() -> None:
    script = pathlib.Path(__file__).parents[2] / "tools" / "tool_formats.py"
    command = [sys.executable, str(script), os.environ[FOLDER], "--check"]
    assert subprocess.run(command, check=False).returncode == 0


# -- forms that a template only describes ---------------------------------------------------------

DESCRIBED = {
    "lfm": "{%- if tools %}List: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>"
    "{% endif -%}{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}",
    "granite": "{%- if tools %}Respond only with <|tool_call|> followed by a JSON list of tools."
    "{{ tools | tojson }}{% endif -%}"
    "{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}",
}


@pytest.mark.parametrize("kind", sorted(DESCRIBED))
def test_a_form_that_is_only_described_is_read_and_written(kind: str) -> None:
    found = dialect(DESCRIBED[kind])
    form, tools = found.tool_format, Tools(TOOLS)
    assert form.is_described
    for calls in CALLS:
        body = written(found, calls).removeprefix("<|end|><|assistant|>").removesuffix("<|end|>")
        for at in range(len(body)):
            reader = ToolReader(form, tools)
            out = [*reader.push(body[:at]), *reader.push(body[at:]), *reader.finish()]
            assert calls_of(out) == calls
            assert not text_of(out)


def test_calls_that_a_template_would_drop_are_refused() -> None:
    silent = dialect("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}")
    with pytest.raises(ic.UnsupportedFeatureError, match="tool calls"):
        written(silent, CALLS[0])


def test_tools_go_in_as_text_where_the_template_wants_them_so() -> None:
    text = "{{ 'Tools: ' + functions + datetime }}" + HEAD.partition("-%}")[2]
    found = dialect(text + OWN["list"] + TAIL)
    assert found.renders_tools
    assert found.tool_format.kind == "json"
    user = {"role": "user", "content": "Hi"}
    assert "get_weather" in found.render([user], add_generation_prompt=True, tools=TOOLS_AS_API)
    assert found.render([user], add_generation_prompt=True).startswith("Tools: ")


def test_lists_of_a_template_may_grow() -> None:
    found = dialect(
        "{%- set seen = namespace(ids=[]) %}{% for m in messages %}"
        "{%- set _ = seen.ids.append(m.content) %}{% endfor %}{{ seen.ids.pop(0) }}"
    )
    user = {"role": "user", "content": "Hi"}
    assert found.render([user], add_generation_prompt=True) == "Hi"
    assert user == {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("identifier", [{"a": 1}, ["a"], 5])
def test_an_id_of_a_call_that_no_result_can_name_is_refused(identifier: Any) -> None:
    call = {"id": identifier, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(ic.InvalidInputError) as caught:
        as_row({"role": "assistant", "content": None, "tool_calls": [call]})
    assert caught.value.field == "id"
