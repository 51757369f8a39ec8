"""Chat over the model's own template: warm history, and text that stays text."""

from __future__ import annotations

import time
from typing import Any

import pytest

import infercore as ic


def answer(session: Any, messages: list[Any], n: int = 12) -> str:
    chunks = session.chat(messages, max_tokens=n, temperature=0)
    return "".join(chunk.text for chunk in chunks)


def test_an_agent_loop_evaluates_only_what_is_new(model: Any, session: Any) -> None:
    """Twenty turns over a growing history: each evaluates its new text and at most 8 tokens."""
    messages: list[dict[str, str]] = [{"role": "system", "content": "You are a storyteller."}]
    held = 0
    for turn in range(20):
        messages.append({"role": "user", "content": f"Who is number {turn}?"})
        rendered = model.tokenizer.apply_chat_template(messages)
        n_new = len(model.tokenizer.encode(rendered)) - held
        before = session.context.perf().prefill_tokens
        text = answer(session, messages)
        assert session.context.perf().prefill_tokens - before <= n_new + 8
        messages.append({"role": "assistant", "content": text})
        held = session.explain_context().resident_tokens


def test_a_control_token_typed_by_a_user_is_text(model: Any, session: Any) -> None:
    eot = model.tokenizer.token_bytes(model.tokenizer.eot).decode()
    content = f"hello {eot} world"
    answer(session, [{"role": "user", "content": content}], n=1)
    held = session.context.tokens()
    plain = answer_tokens(model, session, "hello world")
    assert held.count(model.tokenizer.eot) == plain.count(model.tokenizer.eot)
    answer_special = session.chat(
        [{"role": "user", "content": content}], parse_special=True, max_tokens=1
    )
    list(answer_special)
    asked = session.context.tokens()
    assert asked.count(model.tokenizer.eot) == plain.count(model.tokenizer.eot) + 1


def answer_tokens(model: Any, session: Any, content: str) -> list[int]:
    del model
    answer(session, [{"role": "user", "content": content}], n=1)
    tokens: list[int] = session.context.tokens()
    return tokens


@pytest.mark.parametrize(
    "messages", [[], "text", [5], [{"content": "x"}], [{"role": "user", "content": "\ud800"}]]
)
def test_malformed_messages(session: Any, messages: Any) -> None:
    with pytest.raises(ic.InvalidInputError):
        session.chat(messages)
    assert session.state == "EMPTY"


def test_messages_as_values_and_as_mappings_are_the_same(session: Any) -> None:
    text = answer(session, [ic.Message(role="user", content="Who is Mira?")])
    assert answer(session, [{"role": "user", "content": "Who is Mira?"}]) == text


def test_one_bos(model: Any, session: Any) -> None:
    answer(session, [{"role": "user", "content": "hi"}], n=1)
    assert session.context.tokens().count(model.tokenizer.bos) == 1


def test_the_time_to_the_first_token_of_a_chat_has_its_prefill_in_it(session: Any) -> None:
    begun = time.perf_counter()
    stream = session.chat([{"role": "user", "content": "Tell me of Mira. " * 20}], max_tokens=2)
    prefill_ms = (time.perf_counter() - begun) * 1e3
    usage = list(stream)[-1].usage
    assert usage.time_to_first_token_ms > prefill_ms / 2


def test_the_name_of_a_template_is_no_template(model: Any) -> None:
    messages = [{"role": "user", "content": "Tell me of Mira."}]
    with pytest.raises(ic.InvalidInputError, match="not its name"):
        model.tokenizer.apply_chat_template(messages, chat_template="chatml")
    with model.new_session(n_ctx=128) as session:
        with pytest.raises(ic.InvalidInputError, match="not its name"):
            session.chat(messages, chat_template="chatml", max_tokens=4)
        assert session.explain_context().resident_tokens == 0
