"""What a fresh reader found: each of these got through once."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from infercore.chat.budget import ThoughtBudget
from infercore.chat.history import droppable
from infercore.chat.reasoning import ReasoningFormat, ReasoningReader, find_reasoning_format
from infercore.chat.tools import Tools
from infercore.errors import InvalidInputError


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
    budget: Any = ThoughtBudget(Letters(), ReasoningFormat("<t>", "</t>"), 2, inside=False)  # type: ignore[arg-type]
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
    assert droppable([USER, CALL, RESULT, {"role": "assistant"}, USER]) == [(0, 1, 2, 3)]


def test_what_has_no_name_is_no_function() -> None:
    from infercore.session import tool_loop

    with pytest.raises(InvalidInputError):
        tool_loop._by_name([functools.partial(print)])
