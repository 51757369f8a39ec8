"""Chats until the model answers, running the functions that it calls in between."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import inspect
import itertools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs

from infercore.sampling.class_schema import schema_of_arguments
from infercore.sampling.class_values import arguments_of
from infercore.values import checks
from infercore.values.session import Message

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence

    from infercore.values.session import StreamChunk, ToolCall

_MAX_ITEMS = 100_000  # of an iterator that a function gives; no model reads so many


def run(
    chat: Callable[..., Iterable[StreamChunk]],
    messages: Sequence[Message | Mapping[str, Any]],
    functions: Sequence[Callable[..., Any]],
    *,
    max_rounds: int,
    **decode: Any,
) -> list[Message]:
    """Return the messages that came on top of ``messages``; see `Session.run_tools`."""
    messages = checks.items("messages", messages, "a sequence of messages")
    loop = _Loop(functions, max_rounds, decode)
    for function in loop.by_name.values():
        if inspect.iscoroutinefunction(function):
            raise checks.refuse(
                "functions", function, "plain functions; AsyncSession.run_tools awaits others"
            )
    for fields in loop.rounds():
        for call in loop.answered(chat([*messages, *loop.came], **fields)):
            function = loop.by_name[call.name]
            value: Any = None
            try:
                value = function(**arguments_of(function, call.arguments))
                result = _result(call, value)
            except _EndlessError:
                raise _endless(function) from None
            except Exception as error:  # noqa: BLE001  (the model is told, and may do better)
                result = _failure(call, error)
            _check_came(function, value)
            loop.came.append(result)
    return loop.came


def _check_came(function: Callable[..., Any], value: Any) -> None:
    """Raise `InvalidInputError` where a function gave something that has to be awaited."""
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise checks.refuse(
            "functions", function, "plain functions; AsyncSession.run_tools awaits others"
        )


async def arun(
    chat: Callable[..., AsyncIterable[StreamChunk]],
    messages: Sequence[Message | Mapping[str, Any]],
    functions: Sequence[Callable[..., Any]],
    *,
    max_rounds: int,
    **decode: Any,
) -> list[Message]:
    """Return the messages that came on top of ``messages``; see `AsyncSession.run_tools`."""
    messages = checks.items("messages", messages, "a sequence of messages")
    loop = _Loop(functions, max_rounds, decode)
    for fields in loop.rounds():
        chunks = [chunk async for chunk in chat([*messages, *loop.came], **fields)]
        for call in loop.answered(chunks):
            try:
                result = _result(call, await _called(call, loop.by_name[call.name]))
            except _EndlessError:
                raise _endless(loop.by_name[call.name]) from None
            except Exception as error:  # noqa: BLE001  (the model is told, and may do better)
                result = _failure(call, error)
            loop.came.append(result)
    return loop.came


async def _called(call: ToolCall, function: Callable[..., Any]) -> Any:
    """Await a coroutine function; run any other in a thread, so that it holds up no other task."""
    arguments = arguments_of(function, call.arguments)
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    value = await asyncio.to_thread(function, **arguments)
    return await value if inspect.isawaitable(value) else value


class _Loop:
    """Which chats are asked one after the other, and the messages that came."""

    def __init__(
        self, functions: Sequence[Callable[..., Any]], max_rounds: int, decode: dict[str, Any]
    ) -> None:
        self.by_name = _by_name(functions)
        if not checks.is_integer(max_rounds) or max_rounds < 0:
            raise checks.refuse("max_rounds", max_rounds, "an integer of at least 0")
        if "tools" in decode:
            raise checks.refuse("tools", decode["tools"], "functions: the tools are made of them")
        self.came: list[Message] = []
        self._max_rounds = max_rounds
        self._choice = decode.pop("tool_choice", "auto")
        self._decode = decode
        self._is_done = False

    def rounds(self) -> Iterator[dict[str, Any]]:
        """Yield the fields of each chat, until one is answered without a call.

        In the last one no tool may be called, so that the model answers.
        """
        tools = [_tool(name, function) for name, function in self.by_name.items()]
        for n_round in range(self._max_rounds + 1):
            last = n_round == self._max_rounds
            choice = "none" if last else self._choice if n_round == 0 else "auto"
            yield {"tools": tools, "tool_choice": choice, **self._decode}
            if self._is_done:
                return

    def answered(self, chunks: Iterable[StreamChunk]) -> list[ToolCall]:
        """Take an answer; return the calls in it, whose results are to be added to ``came``."""
        message, calls, reason = _message(chunks)
        self.came.append(message)
        self._is_done = not calls or reason in ("cancelled", "timeout")
        return [] if self._is_done else calls


def _by_name(functions: Sequence[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    given = checks.items("functions", functions, "a sequence of functions")
    if not given or not all(_has_name(function) for function in given):
        raise checks.refuse("functions", functions, "functions with names, at least one")
    by_name = {function.__name__: function for function in given}
    if len(by_name) < len(given):
        raise checks.refuse("functions", functions, "functions of different names")
    return by_name


def _has_name(function: object) -> bool:
    name = getattr(function, "__name__", None)
    return callable(function) and isinstance(name, str) and name.isidentifier()


def _tool(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    parameters = schema_of_arguments(function)
    text = inspect.getdoc(function) or ""
    return {
        "type": "function",
        "function": {"name": name, "description": text, "parameters": parameters},
    }


def _message(chunks: Iterable[StreamChunk]) -> tuple[Message, list[ToolCall], str | None]:
    text, thought, calls, reason = "", "", list["ToolCall"](), None
    for chunk in chunks:
        reason = chunk.finish_reason
        text += chunk.text
        thought += chunk.reasoning
        calls += chunk.tool_calls
    message = Message(
        role="assistant", content=text, tool_calls=tuple(calls), reasoning=thought or None
    )
    return message, calls, reason


def _result(call: ToolCall, value: Any) -> Message:
    content = value if type(value) is str else _json(value)
    return Message(role="tool", content=content, tool_call_id=call.id, name=call.name)


def _json(value: Any) -> str:
    """The value as JSON: classes of fields as objects, enums as their values."""
    return json.dumps(_of_json(value), default=_of_json, ensure_ascii=False, allow_nan=False)


def _of_json(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if attrs.has(type(value)):
        return attrs.asdict(value, recurse=False)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (dict, list, tuple, str, int, float, bool, type(None))):
        return value
    if isinstance(value, (bytes, bytearray)):
        return value.decode("utf-8", errors="replace")
    return _drawn(value) if isinstance(value, (set, frozenset, Iterator)) else str(value)


class _EndlessError(Exception):
    """An iterator went on and on."""


def _drawn(items: Iterable[Any]) -> list[Any]:
    found = list(itertools.islice(items, _MAX_ITEMS + 1))
    if len(found) > _MAX_ITEMS:
        raise _EndlessError
    return found


def _endless(function: Callable[..., Any]) -> Exception:
    allowed = f"functions whose iterators end, after {_MAX_ITEMS:,} items at most"
    return checks.refuse("functions", function, allowed)


def _failure(call: ToolCall, error: Exception) -> Message:
    return _result(call, {"error": f"{type(error).__name__}: {error}"})
