"""``/v1/responses``: text and tools, and the events of their stream. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

import msgspec

from infercore.errors import InvalidInputError
from infercore.serve.answering import Asked, answers, history_of, overflow_of, thought_tokens
from infercore.serve.chat import call_row, plain_message, reasoning_of, response_form
from infercore.serve.errors import api_error
from infercore.serve.responding import event, log
from infercore.serve.wire import SETTLED, ChatMessage, check_known, check_settled

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from infercore.serve.config import ServeConfig
    from infercore.serve.metrics import Metrics
    from infercore.serve.models import Served
    from infercore.serve.wire import ResponsesRequest
    from infercore.session.asynchronous import AsyncDecodeStream, AsyncSession
    from infercore.values.session import StreamChunk, ToolCall, Usage

_ITEMS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content", "summary", "encrypted_content"),
}
"""The fields of the items of an input, beside those that all have."""
_TEXT_PARTS = ("input_text", "output_text", "text")


def _refused(field: str, value: Any, allowed: str) -> InvalidInputError:
    return InvalidInputError(
        f"{field} is not supported here; send {allowed}", field=field, value=value, allowed=allowed
    )


def _of_no_kind(field: str, what: str, kind: Any, allowed: str) -> InvalidInputError:
    return InvalidInputError(
        f"{what} of type {kind!r} is not supported here; send {allowed}",
        field=field,
        value=kind,
        allowed=allowed,
    )


def asked_of(
    request: ResponsesRequest, served: Served, namespace: str, config: ServeConfig
) -> Asked:
    """Return what ``request`` asks for. Raises `InvalidInputError` for what it may not."""
    check_settled(msgspec.structs.replace(request, metadata=None))  # the answer repeats those
    messages = _messages(request)
    fields: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p")
        if (value := getattr(request, name)) is not None
    }
    limits = [n for n in (request.max_output_tokens, config.max_tokens) if n is not None]
    if limits:
        fields["max_tokens"] = min(limits)
    form = _form(request)
    if form is not None:
        fields["response_format"] = form
    if other := _beside(request.reasoning, "effort"):
        raise _refused(f"reasoning.{min(other)}", None, "'effort' alone")
    effort = (request.reasoning or {}).get("effort")
    chat = {"reasoning": reasoning_of(effort), **_tool_fields(request)}

    def begin(session: AsyncSession, decode: dict[str, Any]) -> AsyncDecodeStream:
        return session.chat(messages, **chat, **decode)

    return Asked(
        served=served,
        namespace=namespace,
        history=history_of(messages),
        begin=begin,
        fields=fields,
        n=1,
        timeout=config.request_timeout,
        overflow=overflow_of(request.truncation),
        one_call=request.parallel_tool_calls is False,
    )


def _form(request: ResponsesRequest) -> Any:
    text = request.text or {}
    is_usual = text.get("verbosity") in SETTLED["verbosity"]
    if other := _beside(text, "format") - ({"verbosity"} if is_usual else set()):
        raise _refused(f"text.{min(other)}", None, "'format' alone")
    form = text.get("format")
    if not isinstance(form, (dict, type(None))):
        raise _refused("text.format", form, "an object")
    return response_form(form, "text.format", flat=True)


def _tool_fields(request: ResponsesRequest) -> dict[str, Any]:
    choice = request.tool_choice
    if request.tools:
        tools = [_tool(tool) for tool in request.tools]
        return {"tools": tools, "tool_choice": _chosen(choice or "auto")}
    if choice not in (None, "none", "auto"):
        raise _refused("tool_choice", choice, "null, 'none' or 'auto' without tools")
    return {}


def _beside(given: Mapping[str, Any] | None, name: str) -> set[str]:
    return {key for key, value in (given or {}).items() if value is not None} - {name}


def _chosen(choice: str | Mapping[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    name = choice.get("name")
    if choice.get("type") != "function" or not isinstance(name, str):
        raise _refused("tool_choice", choice, "an object of type 'function' with a name")
    return {"type": "function", "function": {"name": name}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise _of_no_kind("tools", "a tool", tool.get("type"), "tools of type 'function'")
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for item in request.input:
        _add_item(messages, item)
    return messages


def _places(request: ResponsesRequest, dropped: Sequence[int]) -> list[int]:
    """Return the places in ``input`` of what the messages at ``dropped`` were made of."""
    messages = _messages(msgspec.structs.replace(request, input=[]))
    places = []
    for place, item in enumerate(request.input):
        _add_item(messages, cast("dict[str, Any]", item))
        if len(messages) - 1 in dropped:
            places.append(place)
    return places


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    item = {key: value for key, value in item.items() if value is not None}  # as clients dump it
    kind = item.get("type", "message")
    if kind in tuple(_ITEMS):  # a list is no key of a dict, which would raise
        check_known("input", item, ("type", "id", "status", *_ITEMS[kind]))
    if kind == "message":
        _add_message(messages, item)
    elif kind == "function_call":
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
        }
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.get("output")
        if isinstance(output, list):
            output = [_part(part) for part in output]
        elif not isinstance(output, str):
            raise _refused("input.output", output, "text, or a list of parts that are text")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind == "reasoning":  # of the item that comes next; the template decides who sees it
        _add_thought(messages, item.get("content"))
    else:
        raise _of_no_kind("input", "an item", kind, ", ".join(_ITEMS))


def _add_message(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    content = item.get("content")
    if isinstance(content, list):
        content = [_part(part) for part in content]
    row = {"role": item.get("role"), "content": content}
    message = plain_message(msgspec.convert(row, ChatMessage))
    last = messages[-1] if messages else {}
    waits = "reasoning" in last and not last["content"] and "tool_calls" not in last
    if waits and message["role"] == "assistant":
        last["content"] = message["content"]
    else:
        messages.append(message)


def _add_thought(messages: list[dict[str, Any]], content: Any) -> None:
    """Begin the answer that a thought is of; one that is only a summary, or encrypted, is none."""
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    if thought := "".join(text for text in texts if isinstance(text, str)):
        messages.append({"role": "assistant", "content": "", "reasoning": thought})


def _part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") in _TEXT_PARTS:
        return {"type": "text", "text": part.get("text")}
    return part


class _Output:
    """The items of a response as they grow, and the events that report it."""

    def __init__(self, request: ResponsesRequest) -> None:
        self._request = request
        self.items: list[dict[str, Any]] = []
        self._n_events = 0
        self._n_thought = 0
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": request.model,
            "output": self.items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **(request.reasoning or {})},
            "store": False,
            "temperature": request.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": request.top_p,
            "truncation": request.truncation or "disabled",
            "usage": None,
            "metadata": request.metadata or {},
        }

    def event(self, kind: str, **fields: Any) -> bytes:
        number, self._n_events = self._n_events, self._n_events + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def leave_out(self, dropped: Sequence[int]) -> None:
        """Say which items of the request's input were left out, an extension of ours."""
        if dropped:
            self._response["dropped_messages"] = _places(self._request, dropped)

    def begun(self) -> list[bytes]:
        return [
            self.event(f"response.{kind}", response=self._response)
            for kind in ("created", "in_progress")
        ]

    def add(self, chunk: StreamChunk) -> list[bytes]:
        events = []
        self._n_thought += thought_tokens(chunk)
        if chunk.reasoning:
            events += self._thought(chunk.reasoning)
        if chunk.text:
            events += self._text(chunk.text)
        for call in chunk.tool_calls:
            events += [*self._end_item(), *self._call(call)]
        return events

    def _open(self, kind: str) -> dict[str, Any] | None:
        last = self.items[-1] if self.items else None
        is_open = last is not None and last["type"] == kind and last["status"] == "in_progress"
        return last if is_open else None

    def _begin_item(self, item: dict[str, Any]) -> list[bytes]:
        events = self._end_item()
        self.items.append(item)
        place = len(self.items) - 1
        return [*events, self.event("response.output_item.added", output_index=place, item=item)]

    def _thought(self, text: str) -> list[bytes]:
        events: list[bytes] = []
        item = self._open("reasoning")
        if item is None:
            item = {
                "id": f"rs_{uuid.uuid4().hex}",
                "type": "reasoning",
                "status": "in_progress",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": ""}],
            }
            events = self._begin_item(item)
        item["content"][0]["text"] += text
        where = self._where(item)
        return [*events, self.event("response.reasoning_text.delta", **where, delta=text)]

    def _text(self, text: str) -> list[bytes]:
        events: list[bytes] = []
        item = self._open("message")
        if item is None:
            part = {"type": "output_text", "text": "", "annotations": []}
            item = {
                "id": f"msg_{uuid.uuid4().hex}",
                "type": "message",
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
            events = self._begin_item(item)
            item["content"].append(part)
            events.append(
                self.event("response.content_part.added", **self._where(item), part=dict(part))
            )
        item["content"][0]["text"] += text
        where = self._where(item)
        return [
            *events,
            self.event("response.output_text.delta", **where, delta=text, logprobs=[]),
        ]

    def _where(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self.items) - 1, "content_index": 0}

    def _call(self, call: ToolCall) -> list[bytes]:
        row = call_row(call)["function"]
        item = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.id,
            "name": row["name"],
            "arguments": "",
        }
        events = self._begin_item(item)
        where = {"item_id": item["id"], "output_index": len(self.items) - 1}
        item["arguments"] = row["arguments"]
        kind = "response.function_call_arguments"
        return [
            *events,
            self.event(f"{kind}.delta", **where, delta=row["arguments"]),
            self.event(f"{kind}.done", **where, arguments=row["arguments"], name=row["name"]),
            *self._end_item(),
        ]

    def _end_item(self, status: str = "completed") -> list[bytes]:
        if not self.items or self.items[-1]["status"] != "in_progress":
            return []
        item = self.items[-1]
        item["status"] = status
        events = []
        if item["type"] == "message":
            where, part = self._where(item), item["content"][0]
            text = part["text"]
            events += [
                self.event("response.output_text.done", **where, text=text, logprobs=[]),
                self.event("response.content_part.done", **where, part=part),
            ]
        elif item["type"] == "reasoning":
            text = item["content"][0]["text"]
            events.append(
                self.event("response.reasoning_text.done", **self._where(item), text=text)
            )
        place = len(self.items) - 1
        return [*events, self.event("response.output_item.done", output_index=place, item=item)]

    def end(self, reason: str, usage: Usage) -> list[bytes]:
        is_whole = reason in ("eos", "stop", "tool_calls")
        kind = "completed" if is_whole else "incomplete"
        events = self._end_item(kind)
        self._response["status"] = kind
        if not is_whole:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        n_prompt, n_cached = usage.prompt_tokens, usage.cached_tokens
        self._response["usage"] = {
            "input_tokens": n_prompt,
            "input_tokens_details": {
                "cached_tokens": n_cached,
                "cache_write_tokens": n_prompt - n_cached,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._n_thought},
            "total_tokens": n_prompt + usage.completion_tokens,
        }
        return [*events, self.event(f"response.{kind}", response=self._response)]

    def fail(self, error: Exception) -> bytes:
        told = api_error(error)
        self._response["status"] = "failed"
        self._response["error"] = {"code": told.code or told.kind, "message": told.message}
        return self.event("response.failed", response=self._response)

    @property
    def response(self) -> dict[str, Any]:
        return self._response


async def streamed(
    request: ResponsesRequest, asked: Asked, metrics: Metrics
) -> AsyncGenerator[bytes, None]:
    """Give the response as events."""
    output = _Output(request)
    begun = False
    try:
        async with aclosing(answers([asked], metrics)) as chunks:
            async for _, chunk in chunks:
                if not begun:
                    begun = True
                    output.leave_out(chunk.dropped_messages)
                    for told in output.begun():
                        yield told
                for told in output.add(chunk):
                    yield told
                if chunk.finish_reason is not None and chunk.usage is not None:
                    for told in output.end(chunk.finish_reason, chunk.usage):
                        yield told
    except Exception as error:
        if not begun:
            raise
        log.exception("stream failed")
        yield output.fail(error)


async def whole(request: ResponsesRequest, asked: Asked, metrics: Metrics) -> dict[str, Any]:
    """Return the response as one document."""
    output = _Output(request)
    async with aclosing(answers([asked], metrics)) as chunks:
        async for _, chunk in chunks:
            output.leave_out(chunk.dropped_messages)
            output.add(chunk)
            if chunk.finish_reason is not None and chunk.usage is not None:
                output.end(chunk.finish_reason, chunk.usage)
    return output.response
