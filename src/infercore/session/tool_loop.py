"""Chats until the model answers, running the functions that it calls in between."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any

from infercore.sampling.class_schema import schema_of_arguments
from infercore.values import checks
from infercore.values.session import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from infercore.values.session import StreamChunk, ToolCall


def run(
    chat: Callable[..., Iterable[StreamChunk]],
    messages: Sequence[Message | Mapping[str, Any]],
    functions: Sequence[Callable[..., Any]],
    *,
    max_rounds: int,
    **decode: Any,
) -> list[Message]:
    """Return the messages that came on top of ``messages``; see `Session.run_tools`."""
    by_name = _by_name(functions)
    if not checks.is_integer(max_rounds) or max_rounds < 0:
        raise checks.refuse("max_rounds", max_rounds, "an integer of at least 0")
    tools = [_tool(name, function) for name, function in by_name.items()]
    choice = decode.pop("tool_choice", "auto")
    came: list[Message] = []
    for n_round in range(max_rounds + 1):
        last = n_round == max_rounds
        asked = "none" if last else choice if n_round == 0 else "auto"
        answer, called = _message(
            chat([*messages, *came], tools=tools, tool_choice=asked, **decode)
        )
        came.append(answer)
        if not called:
            break
        came += [_result(call, by_name[call.name]) for call in called]
    return came


def _by_name(functions: Sequence[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    given = checks.items("functions", functions, "a sequence of functions")
    if not given or not all(callable(function) for function in given):
        raise checks.refuse("functions", functions, "functions, at least one")
    by_name = {function.__name__: function for function in given}
    if len(by_name) < len(given):
        raise checks.refuse("functions", functions, "functions of different names")
    return by_name


def _tool(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    parameters = schema_of_arguments(function)
    text = inspect.getdoc(function) or ""
    return {
        "type": "function",
        "function": {"name": name, "description": text, "parameters": parameters},
    }


def _message(chunks: Iterable[StreamChunk]) -> tuple[Message, list[ToolCall]]:
    text, thought, calls = "", "", list["ToolCall"]()
    for chunk in chunks:
        text += chunk.text
        thought += chunk.reasoning
        calls += chunk.tool_calls
    message = Message(
        role="assistant", content=text, tool_calls=tuple(calls), reasoning=thought or None
    )
    return message, calls


def _result(call: ToolCall, function: Callable[..., Any]) -> Message:
    try:
        value = function(**call.arguments)
        content = value if isinstance(value, str) else json.dumps(value, default=str)
    except Exception as error:  # noqa: BLE001  (the model is told, and may do better)
        content = json.dumps({"error": f"{type(error).__name__}: {error}"})
    return Message(role="tool", content=content, tool_call_id=call.id, name=call.name)
