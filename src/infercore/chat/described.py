"""Forms of calls that a template only describes: it offers tools, and writes no calls itself.

Found by what such templates say to the model. Their earlier calls go in as text, written here in
the same form.

Sources: the model cards of LFM 2 and Granite 3.3, and llama.cpp's ``common/chat.cpp``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from infercore.chat.literal import Literal
from infercore.chat.tool_format import JSON, PYTHON, ToolFormat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LFM = ToolFormat(
    kind=PYTHON,
    section_open=Literal.of("<|tool_call_start|>["),
    between=Literal.of(", "),
    section_close=Literal.of("]<|tool_call_end|>"),
    is_described=True,
)
_GRANITE = ToolFormat(
    kind=JSON,
    section_open=Literal.of("<|tool_call|>["),
    between=Literal.of(", "),
    section_close=Literal.of("]"),
    name_key="name",
    arguments_key="arguments",
    is_described=True,
)
_FORMS = (
    (("<|tool_list_start|>",), _LFM),
    (("List of tools: [", "keep_past_thinking"), _LFM),
    (("<|tool_call|> followed by a JSON list",), _GRANITE),
)


def described_format(template: str) -> ToolFormat | None:
    """Return the form that ``template`` describes, None where it describes none that is known."""
    return next((form for words, form in _FORMS if all(w in template for w in words)), None)


def written(form: ToolFormat, calls: Sequence[Mapping[str, Any]]) -> str:
    """Return ``calls``, in the API's form with their arguments parsed, as text in this form."""
    write = _python if form.kind == PYTHON else _json
    parts = [write(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return form.section_open.text + form.between.text.join(parts) + form.section_close.text


def _json(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _python(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={_value(value)}' for key, value in arguments.items())})"


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
