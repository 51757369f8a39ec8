"""What comes out of a chat: tool calls, thoughts, whole turns left out. On every engine."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import pytest

import infercore as ic

TEMPLATE = (
    "{%- for t in tools or [] %}{{ t.function | tojson }}\n{% endfor -%}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{%- if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif -%}"
    "{%- for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor -%}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{%- endif %}{% endif -%}"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 10},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
USER = {"role": "user", "content": "Weather?"}


def says(text: str) -> dict[str, Any]:
    """Options by which the model writes exactly ``text``."""
    return {"response_format": {"type": "choice", "choices": [text]}, "max_tokens": 400}


def called(city: str) -> str:
    call = {"name": "weather", "arguments": {"city": city, "days": 2}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def joined(chunks: Any) -> tuple[str, str, list[Any], ic.StreamChunk]:
    text, thought, calls, last = "", "", [], None
    for chunk in chunks:
        text, thought = text + chunk.text, thought + chunk.reasoning
        calls += chunk.tool_calls
        last = chunk
    assert last is not None
    return text, thought, calls, last


def chat(session: Any, messages: Any = (USER,), **fields: Any) -> Any:
    return joined(session.chat(list(messages), chat_template=TEMPLATE, **fields))


def test_calls_come_apart_from_the_text(session: Any) -> None:
    wanted = f"Let me see.\n{called('Rome')}\n{called('Oslo')}"
    text, _, calls, last = chat(session, tools=TOOLS, **says(wanted))
    assert text == "Let me see."
    assert [(call.name, call.arguments["city"]) for call in calls] == [
        ("weather", "Rome"),
        ("weather", "Oslo"),
    ]
    assert len({call.id for call in calls}) == 2
    assert last.finish_reason == "tool_calls"


def test_what_is_no_valid_call_stays_text(session: Any) -> None:
    wanted = '<tool_call>\n{"name": "weather", "arguments": {"city": 3}}\n</tool_call>'
    text, _, calls, last = chat(session, tools=TOOLS, **says(wanted))
    assert (text, calls, last.finish_reason) == (wanted, [], "eos")


def test_without_tools_calls_are_text(session: Any) -> None:
    assert chat(session, **says(called("Rome")))[0] == called("Rome")
    given = {"tools": TOOLS, "tool_choice": "none"}
    assert chat(session, **given, **says(called("Rome")))[0] == called("Rome")


def test_a_thought_comes_apart(session: Any) -> None:
    said = says("<think>\nI wonder.\n</think>\n\nIt is so.")
    assert chat(session, **said)[:2] == ("It is so.", "I wonder.")
    kept = chat(session, reasoning="text", **said)
    assert kept[:2] == ("<think>\nI wonder.\n</think>\n\nIt is so.", "")


def test_thoughts_are_turned_off_where_the_template_can(session: Any) -> None:
    chat(session, reasoning="off", max_tokens=1)
    held = session.explain_context().resident_tokens
    chat(session, max_tokens=1)
    assert session.explain_context().resident_tokens < held
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ic.UnsupportedFeatureError):
        session.chat([USER], chat_template=plain, reasoning="off")


def test_a_thought_has_a_budget(session: Any) -> None:
    template = TEMPLATE.removesuffix("{% endif -%}") + "<think>\n{% endif -%}"
    fields = {"chat_template": template, "max_tokens": 40, "temperature": 0}
    chunks = session.chat([USER], reasoning_budget=5, **fields)
    text, thought, _, _ = joined(chunks)
    assert len(session.context.tokens()) > 0
    assert text
    assert thought
    assert "</think>" not in text + thought


def test_the_form_of_an_answer_is_that_of_its_text_where_the_template_opens_a_thought(
    session: Any,
) -> None:
    template = TEMPLATE.removesuffix("{% endif -%}") + "<think>\n{% endif -%}"
    said = {"chat_template": template, **says('{"city": "Rome"}')}
    for fields in ({}, {"reasoning_budget": 5}, {"tools": TOOLS}):
        assert joined(session.chat([USER], **said, **fields))[:2] == ('{"city": "Rome"}', "")
    text, thought, *_ = joined(session.chat([USER], reasoning="text", **said))
    assert (text, thought) == ('{"city": "Rome"}', "")
    assert b"</think>" not in session.model.tokenizer.decode(session.context.tokens()).encode()


@pytest.mark.parametrize("choice", ["required", "weather"])
def test_a_call_that_must_be_made_is_valid(session: Any, choice: str) -> None:
    for seed in range(8):
        text, _, calls, last = chat(
            session, tools=TOOLS, tool_choice=choice, max_tokens=200, seed=seed, temperature=1.5
        )
        assert last.finish_reason == "tool_calls"
        assert not text.strip()
        (call,) = calls
        jsonschema.validate(dict(call.arguments), SCHEMA)


def test_a_tool_may_be_named_as_another_choice_is(session: Any) -> None:
    named = {"type": "function", "function": {"name": "required", "parameters": SCHEMA}}
    for choice in (named, {"function": {"name": "weather"}}):
        asked = {"tools": [*TOOLS, named], "tool_choice": choice, "max_tokens": 200}
        _, _, calls, _ = chat(session, **asked, temperature=0)
        assert [call.name for call in calls] == [choice["function"]["name"]]


@pytest.mark.parametrize("choice", ["maybe", "other", 3, {"function": {"name": "auto"}}])
def test_a_choice_that_is_none_is_refused(session: Any, choice: Any) -> None:
    with pytest.raises(ic.InvalidInputError):
        session.chat([USER], chat_template=TEMPLATE, tools=TOOLS, tool_choice=choice)


def test_tools_that_a_template_leaves_out_are_refused(session: Any) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ic.UnsupportedFeatureError) as caught:
        session.chat([USER], chat_template=template, tools=TOOLS)
    assert caught.value.feature == "tools"


def test_parts_are_texts_or_refused(session: Any) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    template = "{% for m in messages %}{{ m.content + '' }}{% endfor %}"
    asked = [{"role": "user", "content": parts}]
    chunk = next(iter(session.chat(asked, chat_template=template, min_tokens=1)))
    assert chunk.tokens
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(ic.UnsupportedFeatureError) as caught:
        session.chat([{"role": "user", "content": image}], chat_template=template)
    assert caught.value.feature == "image input"


def test_calls_and_results_go_back(model: Any) -> None:
    def render(arguments: Any) -> str:
        function = {"name": "weather", "arguments": arguments}
        answer = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": function}],
        }
        result = {"role": "tool", "content": "sun", "tool_call_id": "1"}
        messages = [USER, answer, result]
        return str(model.tokenizer.apply_chat_template(messages, chat_template=TEMPLATE))

    assert render({"city": "Rome"}) == render('{"city": "Rome"}')
    assert '"arguments": {"city": "Rome"}' in render('{"city": "Rome"}')
    with pytest.raises(ic.InvalidInputError):
        render("{not json")


def test_functions_are_run_until_there_is_an_answer(session: Any) -> None:
    seen: list[Any] = []

    def weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2]) -> str:
        """The weather of the next days."""
        seen.append((city, days))
        return "sun"

    came = session.run_tools(
        [USER], [weather], max_rounds=2, chat_template=TEMPLATE, tool_choice="required",
        max_tokens=150, temperature=0,
    )  # fmt: skip
    assert len(seen) >= 1
    assert [came[0].role, came[1].role, came[-1].role] == ["assistant", "tool", "assistant"]
    assert came[1].content == "sun"
    assert came[1].tool_call_id == came[0].tool_calls[0].id
    assert not came[-1].tool_calls


@pytest.mark.parametrize("overflow", ["truncate", "shift"])
def test_a_chat_goes_on_behind_a_full_window(model: Any, overflow: str) -> None:
    try:
        session = model.new_session(n_ctx=160, overflow=overflow)
    except ic.UnsupportedFeatureError:
        assert overflow == "shift"
        return
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    n_dropped = []
    with session:
        for i in range(40):
            messages.append({"role": "user", "content": f"Number {i}?"})
            text, _, _, _ = joined(chunks := list(session.chat(messages, max_tokens=6)))
            dropped = chunks[0].dropped_messages
            assert 0 not in dropped
            assert len(messages) - 1 not in dropped
            n_dropped.append(len(dropped))
            messages.append({"role": "assistant", "content": text})
    assert n_dropped[0] == 0
    assert n_dropped[-1] > 40


def test_error_stays_an_error_with_what_is_held(model: Any) -> None:
    with model.new_session(n_ctx=64) as session:
        with pytest.raises(ic.ContextOverflowError) as caught:
            session.chat([{"role": "user", "content": "word " * 200}])
        assert caught.value.resident_tokens <= 64
