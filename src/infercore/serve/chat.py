"""``/v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from infercore.errors import InvalidInputError
from infercore.serve.answering import (
    FINISHED,
    Asked,
    answers,
    history_of,
    n_answers,
    overflow_of,
    sampling_fields,
    thought_tokens,
    usage_of,
)
from infercore.serve.responding import DONE, event
from infercore.serve.wire import check_known, check_settled

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from infercore.serve.config import ServeConfig
    from infercore.serve.metrics import Metrics
    from infercore.serve.models import Served
    from infercore.serve.wire import ChatMessage, ChatRequest
    from infercore.session.asynchronous import AsyncDecodeStream, AsyncSession
    from infercore.values.session import StreamChunk, TokenLogprob, ToolCall

MAX_TOP_LOGPROBS = 20
_SCHEMA = ("name", "description", "schema", "strict")
_FORMS = ("text", "json_object", "json_schema")


def asked_of(request: ChatRequest, served: Served, namespace: str, config: ServeConfig) -> Asked:
    """Return what ``request`` asks for. Raises `InvalidInputError` for what it may not."""
    check_settled(request)
    messages = [plain_message(message) for message in request.messages]
    limits = request.max_tokens, request.max_completion_tokens
    n_tokens = min((limit for limit in limits if limit is not None), default=None)
    fields = sampling_fields(request, config, n_tokens)
    fields |= _form_fields(request, fields) | _logprob_fields(request)
    chat: dict[str, Any] = {"reasoning": reasoning_of(request.reasoning_effort)}
    chat |= _tool_fields(request)
    if request.chat_template_kwargs:
        chat["template_variables"] = request.chat_template_kwargs

    def begin(session: AsyncSession, decode: dict[str, Any]) -> AsyncDecodeStream:
        return session.chat(messages, **chat, **decode)

    return Asked(
        served=served,
        namespace=namespace,
        history=history_of(messages),
        begin=begin,
        fields=fields,
        n=n_answers(request),
        timeout=config.request_timeout,
        overflow=overflow_of(request.truncation),
        one_call=request.parallel_tool_calls is False,
    )


def _form_fields(request: ChatRequest, fields: Mapping[str, Any]) -> dict[str, Any]:
    form = response_form(request.response_format)
    if form is None:
        return {}
    if "response_format" in fields:
        raise _refused("response_format", request.response_format, "null beside a grammar")
    return {"response_format": form}


def _logprob_fields(request: ChatRequest) -> dict[str, Any]:
    if not request.logprobs:
        if request.top_logprobs:
            raise _refused("top_logprobs", request.top_logprobs, "null or 0 without logprobs")
        return {}
    n_top = request.top_logprobs or 0
    if not 0 <= n_top <= MAX_TOP_LOGPROBS:
        raise _refused("top_logprobs", n_top, f"0 to {MAX_TOP_LOGPROBS}")
    return {"logprobs": n_top}


def _tool_fields(request: ChatRequest) -> dict[str, Any]:
    choice = request.tool_choice
    if isinstance(choice, dict):
        function = choice.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _refused("tool_choice", choice, "a function with its name")
    if request.tools:
        return {"tools": request.tools, "tool_choice": choice or "auto"}
    if choice not in (None, "none", "auto"):
        raise _refused("tool_choice", choice, "null, 'none' or 'auto' without tools")
    return {}


def plain_message(message: ChatMessage) -> dict[str, Any]:
    """Return a message as sessions take it.

    Raises `InvalidInputError` for what a client may send back empty, but not filled.
    """
    for name in ("refusal", "annotations", "audio", "function_call"):
        if value := getattr(message, name):
            raise _refused(f"messages.{name}", value, "null")
    row: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,  # a newer name
        "content": message.content,
    }
    if message.tool_calls:
        row["tool_calls"] = message.tool_calls
    elif message.content is None:
        if message.role != "assistant":
            raise _refused("messages.content", None, "text")
        row["content"] = ""
    reasoning = message.reasoning_content or message.reasoning
    named = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning": reasoning}
    return row | {name: value for name, value in named.items() if value is not None}


def response_form(
    form: dict[str, Any] | None, field: str = "response_format", *, flat: bool = False
) -> Any:
    """Return the protocol's ``response_format`` as `DecodeConfig` has it; None for free text.

    Where it is ``flat``, as in responses, a schema's fields are beside the type.
    """
    if form is None:
        return None
    kind = form.get("type")
    if kind in ("text", "json_object"):
        check_known(field, form, ("type",))
        return None if kind == "text" else {"type": kind}
    if kind == "json_schema":
        check_known(field, form, ("type", *(_SCHEMA if flat else ("json_schema",))))
        named = form if flat else form.get("json_schema")
        if isinstance(named, dict) and not flat:
            check_known(f"{field}.json_schema", named, _SCHEMA)
        schema = named.get("schema") if isinstance(named, dict) else None
        if isinstance(schema, dict):
            return {"type": "json_schema", "schema": schema}
        raise _refused(field, form, "json_schema with a schema")
    raise _refused(field, form, f"a type of {', '.join(_FORMS)}")


def reasoning_of(effort: str | None) -> str:
    """Return how thoughts are treated: "none" switches them off, "medium" is what models do."""
    if effort in (None, "medium"):
        return "parsed"
    if effort == "none":
        return "off"
    raise _refused("reasoning_effort", effort, "null, 'none' or 'medium'")


def _refused(field: str, value: Any, allowed: str) -> InvalidInputError:
    return InvalidInputError(
        f"{field} is not allowed here; send {allowed}", field=field, value=value, allowed=allowed
    )


def call_row(call: ToolCall, index: int | None = None) -> dict[str, Any]:
    """Return a tool call as the protocol has it: arguments are JSON text."""
    arguments = msgspec.json.encode(dict(call.arguments)).decode()
    function = {"name": call.name, "arguments": arguments}
    row = {"id": call.id, "type": "function", "function": function}
    return row if index is None else {"index": index, **row}


def logprob_rows(
    found: Sequence[TokenLogprob] | None, token_bytes: Mapping[int, bytes]
) -> dict[str, Any] | None:
    """Return the probabilities of an answer's tokens, each with its text and bytes."""
    if found is None:
        return None

    def row(token: int, logprob: float) -> dict[str, Any]:
        data = token_bytes[token]
        text = data.decode("utf-8", errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(data)}

    return {
        "content": [
            {
                **row(each.token, each.logprob),
                "top_logprobs": [row(token, value) for token, value in each.top],
            }
            for each in found
        ],
        "refusal": None,
    }


class _Choice:
    """One answer as it grows."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.logprobs: dict[str, Any] | None = None
        self.finish_reason: str | None = None
        self.dropped: tuple[int, ...] = ()

    def add(self, chunk: StreamChunk, token_bytes: Mapping[int, bytes]) -> None:
        self.text.append(chunk.text)
        self.reasoning.append(chunk.reasoning)
        self.dropped += chunk.dropped_messages
        self.calls += [call_row(call) for call in chunk.tool_calls]
        rows = logprob_rows(chunk.logprobs, token_bytes)
        if self.logprobs is None:
            self.logprobs = rows
        elif rows is not None:
            self.logprobs["content"] += rows["content"]
        if chunk.finish_reason is not None:
            self.finish_reason = FINISHED[chunk.finish_reason]

    @property
    def message(self) -> dict[str, Any]:
        text = "".join(self.text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not self.calls else None,
            "refusal": None,
        }
        if reasoning := "".join(self.reasoning):
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def _head(model: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


async def whole(request: ChatRequest, asked: Asked, metrics: Metrics) -> dict[str, Any]:
    """Return the answers as one document."""
    choices = [_Choice() for _ in range(asked.n)]
    usages: list[Any] = []
    n_thought = 0
    async with aclosing(answers([asked], metrics)) as chunks:
        async for number, chunk in chunks:
            choices[number].add(chunk, asked.served.token_bytes)
            n_thought += thought_tokens(chunk)
            if chunk.usage is not None:
                usages.append(chunk.usage)
    return {
        **_head(request.model, "chat.completion"),
        "choices": [
            {
                "index": number,
                "message": choice.message,
                "logprobs": choice.logprobs,
                "finish_reason": choice.finish_reason,
            }
            for number, choice in enumerate(choices)
        ],
        "usage": usage_of(usages, n_thought),
        **_dropped(choices[0].dropped),
    }


async def streamed(
    request: ChatRequest, asked: Asked, metrics: Metrics
) -> AsyncGenerator[bytes, None]:
    """Give the answers as events, piece by piece."""
    head = _head(request.model, "chat.completion.chunk")
    wants_usage = request.stream_options is not None and request.stream_options.include_usage
    if wants_usage:
        head["usage"] = None
    usages: list[Any] = []
    n_thought = 0
    n_calls = [0] * asked.n
    begun = False
    async with aclosing(answers([asked], metrics)) as chunks:
        async for number, chunk in chunks:
            if not begun:  # all of them: clients put an answer where its first piece comes
                begun = True
                dropped = _dropped(chunk.dropped_messages)
                for each in range(asked.n):
                    first = _delta(each, {"role": "assistant", "content": ""})
                    yield event({**head, "choices": [first], **dropped})
            if chunk.usage is not None:
                usages.append(chunk.usage)
            n_thought += thought_tokens(chunk)
            delta = _piece(chunk, n_calls[number])
            n_calls[number] += len(chunk.tool_calls)
            if delta or chunk.logprobs:
                rows = logprob_rows(chunk.logprobs, asked.served.token_bytes)
                yield event({**head, "choices": [_delta(number, delta, rows)]})
            if chunk.finish_reason is not None:
                reason = FINISHED[chunk.finish_reason]
                yield event({**head, "choices": [_delta(number, {}, reason=reason)]})
    if wants_usage:
        yield event({**head, "choices": [], "usage": usage_of(usages, n_thought)})
    yield DONE


def _dropped(places: Sequence[int]) -> dict[str, Any]:
    """Return which messages were left out, an extension of ours; nothing where none was."""
    return {"dropped_messages": list(places)} if places else {}


def _piece(chunk: StreamChunk, n_calls: int) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if chunk.text:
        delta["content"] = chunk.text
    if chunk.reasoning:
        delta["reasoning_content"] = chunk.reasoning
    if chunk.tool_calls:
        delta["tool_calls"] = [
            call_row(call, n_calls + i) for i, call in enumerate(chunk.tool_calls)
        ]
    return delta


def _delta(
    number: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
