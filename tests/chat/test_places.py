"""On every template: what a message holds shows where the template has a place for it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import infercore as ic
from infercore.chat.dialect import Dialect, dialect_of
from infercore.chat.tool_choice import call_grammar
from infercore.chat.tools import Tools
from infercore.errors import InvalidInputError, UnsupportedFeatureError

FOLDER = os.environ.get("INFERCORE_CHAT_TEMPLATES")
FILES = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []
TOOLS = Tools(
    [
        {
            "name": "weather",
            "description": "The weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "where"}},
                "required": ["city"],
            },
        }
    ]
)
ASKED = {"role": "user", "content": "What is it?"}
CALL = ic.ToolCall(id="abcdef123", name="weather", arguments={"city": "Rome"})
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "name": "weather", "content": "sun"}
TEXT, THOUGHT = "visible words", "inner words"
PARTS = [{"type": "text", "text": "first part"}, {"type": "text", "text": "second part"}]

NO_CALLS = (
    "HuggingFaceTB-SmolLM3-3B",
    "google-gemma-2-2b-it",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
)
"""Write no calls at all: they are refused."""
NEEDS_TOOLS = (
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
)
"""Refuse every chat without tools."""
NO_SYSTEM = ("google-gemma-2-2b-it",)
NO_SYSTEM_ALONE = (
    *NO_SYSTEM,
    "NVIDIA-Nemotron-Nano-v2",
    "Qwen3.5-4B",
    "mistralai-Mistral-Nemo-Instruct-2407",
)
ONLY_BESIDE_CALLS = (
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "Kimi-K2-Thinking",
    "google-gemma-4-31B-it",
    "google-gemma-4-31B-it-interleaved",
)
"""Show a thought where calls follow it, and nowhere else."""
NOT_BESIDE_CALLS = (
    "Apriel-1.6-15b-Thinker-fixed",
    "NVIDIA-Nemotron-Nano-v2",
    "Qwen-QwQ-32B",
)
"""Show a thought where no calls follow it."""
SWITCHED = {  # those that show thoughts only with a variable that turns thinking on
    "Reka-Edge": "enable_thinking",
    "deepseek-ai-DeepSeek-V3.2": "thinking",
    "deepseek-ai-DeepSeek-V4": "thinking",
    "deepseek-ai-DeepSeek-V4-Flash-0731": "thinking",
}
NO_PLACE = (  # the rest: no field, no kind of content, no marks that they read
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "GigaChat3-10B-A1.8B",
    "GigaChat3.1-10B-A1.8B",
    "HuggingFaceTB-SmolLM3-3B",
    "Kimi-K2-Instruct",
    "LFM2-8B-A1B",
    "LFM2.5-Instruct",
    "MiMo-VL",
    "MiniMax-M1",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen3-Coder",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "fireworks-ai-llama-3-firefunction-v2",
    "google-gemma-2-2b-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "ibm-granite-granite-4.0",
    "ibm-granite-granite-4.1",
    "llama-cpp-deepseek-r1",
    "llama-cpp-rwkv-world",
    "meetkai-functionary-medium-v3.1",
    "meetkai-functionary-medium-v3.2",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
    "microsoft-Phi-3.5-mini-instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "moonshotai-Kimi-K2",
    "unsloth-Apriel-1.5",
    "unsloth-mistral-Devstral-Small-2507",
)


class Letters:
    """A tokenizer whose tokens are bytes."""

    n_vocab = 256

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def is_control(self, _token: int) -> bool:
        return False


def dialect(file: Path) -> Dialect:
    return dialect_of(file.read_text(encoding="utf-8"), "<s>", "</s>")


def rendered(file: Path, messages: list[Any], *, tools: bool = False, **variables: Any) -> str:
    found = dialect(file)
    tools = tools or file.stem in NEEDS_TOOLS
    rows = TOOLS.rows if tools and found.renders_tools else None
    return found.render(messages, add_generation_prompt=False, tools=rows, **variables)


def answer(*, thought: bool, calls: bool, text: str = TEXT) -> ic.Message:
    return ic.Message(
        role="assistant",
        content=text,
        reasoning=THOUGHT if thought else None,
        tool_calls=(CALL,) if calls else (),
    )


def each_template() -> list[Any]:
    return [pytest.param(file, id=file.stem) for file in FILES]


@pytest.mark.parametrize("file", each_template())
def test_nothing_of_a_probe_is_left_anywhere(file: Path) -> None:
    found = dialect(file)
    told = [repr(found.tool_format), repr(found.reasoning)]
    if file.stem not in NO_CALLS:
        asked = [ASKED, answer(thought=True, calls=True), RESULT]
        told.append(rendered(file, asked, tools=True))
        tokenizer: Any = Letters()
        told.append(
            str(call_grammar(found.tool_format, TOOLS, TOOLS.names, tokenizer, "")["grammar"])
        )
    parts = {"role": "assistant", "content": PARTS, "reasoning": THOUGHT}
    told.append(rendered(file, [ASKED, parts]))
    for text in told:
        assert not re.search(r"zq\w+", text)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("file", each_template())
def test_all_parts_show_as_text_in_every_role(file: Path, role: str) -> None:
    row: dict[str, Any] = {"role": role, "content": PARTS}
    before: list[Any] = [] if role in ("system", "user") else [ASKED]
    after: list[Any] = [ASKED] if role == "system" else []
    if role == "tool":
        before, row = [*before, answer(thought=False, calls=True, text="")], {**RESULT, **row}
    if (role == "tool" and file.stem in NO_CALLS) or (role == "system" and file.stem in NO_SYSTEM):
        with pytest.raises((UnsupportedFeatureError, InvalidInputError)):
            rendered(file, [*before, row, *after], tools=role == "tool")
        return
    text = rendered(file, [*before, row, *after], tools=role == "tool")
    _, first, behind = text.partition("first part")
    between, second, _ = behind.partition("second part")
    assert first
    assert second
    assert between.strip() in ("", "\\n")  # a template may write a result as JSON text


@pytest.mark.parametrize("calls", [False, True], ids=["alone", "with calls"])
@pytest.mark.parametrize("file", each_template())
def test_a_thought_shows_where_the_template_has_a_place(file: Path, calls: bool) -> None:
    if calls and file.stem in NO_CALLS:
        return
    variables = {SWITCHED[file.stem]: True} if file.stem in SWITCHED else {}
    messages = [ASKED, answer(thought=True, calls=calls), *([RESULT] if calls else [])]
    text = rendered(file, messages, tools=calls, **variables)
    hidden = (
        file.stem in NO_PLACE
        or (calls and file.stem in NOT_BESIDE_CALLS)
        or (not calls and file.stem in ONLY_BESIDE_CALLS)
    )
    assert text.count(THOUGHT) == (0 if hidden else 1)
    assert text.count(TEXT) == 1
    assert not calls or text.count("Rome") == 1


@pytest.mark.parametrize("file", each_template())
def test_text_beside_calls_shows(file: Path) -> None:
    if file.stem in NO_CALLS:
        return
    messages = [ASKED, answer(thought=False, calls=True), RESULT]
    text = rendered(file, messages, tools=True)
    assert text.count(TEXT) == 1
    assert text.count("Rome") == 1


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "thinking"])
def test_a_thought_may_go_by_any_name(key: str) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}{% if m.thinking %}({{ m.thinking }}){% endif %}"
        ":{{ m.content }};{% endfor %}"
    )
    row = {"role": "assistant", "content": "a", key: "b"}
    assert (
        dialect_of(template, "", "").render([row], add_generation_prompt=False).endswith("(b):a;")
    )


def test_another_role_takes_its_parts_too() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    rows = [{"role": "developer", "content": PARTS}]
    text = dialect_of(template, "", "").render(rows, add_generation_prompt=False)
    assert text == "developer:first part\nsecond part;"


def test_a_message_is_not_changed_by_being_rendered() -> None:
    message = {"role": "assistant", "content": "a", "tool_calls": [CALL.as_dict()]}
    before = repr(message)
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    dialect_of(template, "", "").rows([message])
    assert repr(message) == before


def spoken(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def called(*cities: str) -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": {"city": ""}}
    calls = [
        {"id": f"abcdef12{i}", "function": {**function, "arguments": {"city": city}}}
        for i, city in enumerate(cities)
    ]
    return [
        spoken("assistant", "", tool_calls=calls),
        *(
            {**RESULT, "tool_call_id": f"abcdef12{i}", "content": f"of {city}"}
            for i, city in enumerate(cities)
        ),
    ]


WHOLE = {
    "developer": [spoken("developer", "say one"), spoken("user", "say two")],
    "a system alone": [spoken("system", "say one")],
    "two systems": [spoken("system", "say one"), spoken("system", "say two"), ASKED],
    "a later system": [
        spoken("system", "say one"),
        ASKED,
        spoken("assistant", "say two"),
        spoken("system", "say three"),
        ASKED,
    ],
    "two calls": [ASKED, *called("Rome", "Oslo")],
    "text beside an earlier call": [
        ASKED,
        answer(thought=False, calls=True),
        RESULT,
        spoken("assistant", "say one"),
        ASKED,
    ],
}
REFUSES = {
    "a system alone": NO_SYSTEM_ALONE,
    "a later system": NO_SYSTEM,
    "two systems": NO_SYSTEM,
    "developer": NO_SYSTEM,
}


@pytest.mark.parametrize("file", each_template())
def test_every_message_shows_or_the_chat_is_refused(file: Path) -> None:
    for name, messages in WHOLE.items():
        tools = "call" in name
        try:
            text = rendered(file, messages, tools=tools)
        except (UnsupportedFeatureError, InvalidInputError):
            alternates = name == "text beside an earlier call" and "istral" in file.stem
            assert file.stem in (NO_CALLS if tools else REFUSES[name]) or alternates
            continue
        for word in re.findall(r"say \w+|Rome|Oslo|visible words", str(messages)):
            assert word in text, name
