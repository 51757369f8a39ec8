"""Messages as callers give them, in the form that templates read. Nothing of them is dropped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from infercore.errors import UnsupportedFeatureError
from infercore.values import checks
from infercore.values.session import Message, ToolCall, call_arguments

_KINDS = {
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "video_url": "video",
}
_BESIDE_CONTENT = ("image", "images", "audio", "video", "videos", "refusal")
_TEXT_KINDS = ("text", "input_text", "output_text")
THOUGHT_KEYS: Final = ("reasoning", "reasoning_content", "thinking")
"""What callers and templates call the thought of a message."""


def as_row(message: Message | Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as a mapping, with calls in the API's form and their arguments parsed.

    Raises `InvalidInputError` for what is no message, and `UnsupportedFeatureError` for parts
    other than text.
    """
    row = _fields(message)
    content = row.get("content")
    if isinstance(content, str):
        checks.check_text("content", content)
    elif content is None:
        if not _says(row, "tool_calls"):
            raise checks.refuse("content", content, "text; None only beside tool calls")
        row["content"] = None
    elif isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
        row["content"] = [_text_part(part) for part in content]
    else:
        raise checks.refuse("content", content, "a str, None beside tool calls, or parts")
    if _says(row, "tool_calls"):
        if row["role"] != "assistant":
            raise checks.refuse("role", row["role"], "'assistant' for a message with tool calls")
        calls = checks.items("tool_calls", row["tool_calls"], "a sequence of tool calls")
        row["tool_calls"] = [_call(call) for call in calls]
    else:
        row.pop("tool_calls", None)
    return row


def _fields(message: Message | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(message, Message):
        row = attrs.asdict(message, recurse=False)
        row = {key: value for key, value in row.items() if value not in (None, ())}
        if "content" not in row:
            row["content"] = None
        if "reasoning" in row:
            row["reasoning_content"] = row["reasoning"]
        return row
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise checks.refuse("messages", message, "Message objects, or mappings with a role")
    row = dict(message)
    _check_keys(row)
    thought = thought_of(row)
    if thought:
        row.setdefault("reasoning", thought)  # templates know either name
        row.setdefault("reasoning_content", thought)
    return row


def _check_keys(row: Mapping[str, Any]) -> None:
    """Refuse what would not reach the model: no template shows it, or not as what it is."""
    for key in (*THOUGHT_KEYS, "name", "tool_call_id"):
        if not isinstance(row.get(key), (str, type(None))):
            raise checks.refuse(key, row[key], "a str, or None")
    if _says(row, "function_call"):
        raise checks.refuse("function_call", row["function_call"], "it as one of tool_calls")
    for key in _BESIDE_CONTENT:
        if _says(row, key):
            raise UnsupportedFeatureError(
                feature=f"{key.removesuffix('s')} input", hint="this model reads text alone"
            )


def _says(row: Mapping[str, Any], key: str) -> bool:
    """Whether there is anything under ``key``; an array, whose truth is none, is something."""
    try:
        return bool(row.get(key))
    except ValueError:
        return True


def thought_of(row: Mapping[str, Any]) -> str:
    """Return the thought of a message, whichever name it goes by; "" where there is none."""
    return next((row[key] for key in THOUGHT_KEYS if isinstance(row.get(key), str)), "")


def _text_part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": checks.check_text("content", part)}
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise checks.refuse("content", part, "parts: mappings with a type")
    kind = part["type"]
    if kind not in _TEXT_KINDS:
        name = _KINDS.get(kind, kind)
        raise UnsupportedFeatureError(
            feature=f"{name} input", hint="this model reads text alone; leave the part out"
        )
    return {"type": "text", "text": checks.check_text("content", part.get("text"))}


def _call(call: Any) -> dict[str, Any]:
    if isinstance(call, ToolCall):
        call = call.as_dict()
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise checks.refuse("tool_calls", call, "ToolCall objects, or mappings with a function")
    if not isinstance(call.get("id"), (str, type(None))):
        raise checks.refuse("id", call["id"], "a str, or None")
    arguments = call_arguments(function.get("arguments"))
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise checks.refuse("arguments", arguments, "values that JSON has") from error
    row = {**call, "type": "function", "function": {**function, "arguments": dict(arguments)}}
    for key in ("name", "arguments") if "function" not in call else ():
        row.pop(key, None)
    return row


def systems_first(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with one system message, the first, that holds what all of them say."""
    texts = [_text_of(row) for row in rows if row["role"] == "system"]
    others = [dict(row) for row in rows if row["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _text_of(row: Mapping[str, Any]) -> str:
    content = row["content"] or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def one_call_each(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows in which a message holds one call, and its result follows it."""
    out: list[dict[str, Any]] = []
    at = 0
    while at < len(rows):
        row, end = rows[at], at + 1
        calls = row.get("tool_calls", ())
        several = len(calls) > 1
        while several and end < len(rows) and rows[end]["role"] == "tool":
            end += 1
        results = list(rows[at + 1 : end])
        for n, call in enumerate(calls if several else ()):
            part = dict(row) if n == 0 else {"role": row["role"], "content": ""}
            of_call = [r for r in results if r.get("tool_call_id") == call.get("id")][:1]
            of_call = of_call or results[:1]
            results = [r for r in results if r not in of_call]
            out += [{**part, "tool_calls": [call]}, *map(dict, of_call)]
        out += map(dict, results) if several else [dict(row)]
        at = end
    return out


def with_text_arguments(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows in which the arguments of calls are JSON text, as some templates want them."""
    return [
        {**row, "tool_calls": [_with_text(call) for call in row["tool_calls"]]}
        if row.get("tool_calls")
        else dict(row)
        for row in rows
    ]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
