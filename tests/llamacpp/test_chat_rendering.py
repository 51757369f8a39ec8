"""Chats are rendered as llama-cpp-python's `create_chat_completion` renders them.

`Llama.create_chat_completion` without a handler of its own renders with `Jinja2ChatFormatter`. What
differs on purpose is listed here, with its reason.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
import pack
from infercore.session.chatting import ChatRequest, ChatTurn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FOLDER = "INFERCORE_CHAT_TEMPLATES"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "How is the weather in Rome? <b>é</b>"}
ANSWER = {"role": "assistant", "content": "Sunny."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdef123",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "name": "weather", "content": "sun"}
FLAT = {"strict": True, **WEATHER["function"]}
"""A tool as it may be given too: the function alone, with a key that a template may write."""
SAID_AND_CALLED = {**CALL, "content": "I look it up."}
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "plain": ([ASKED, ANSWER, ASKED], None),
    "system": ([SYSTEM, ASKED], None),
    "tools": ([SYSTEM, ASKED], [WEATHER]),
    "calls": ([ASKED, CALL, RESULT], [WEATHER]),
    "text and calls": ([ASKED, SAID_AND_CALLED, RESULT], [WEATHER]),
}

LOSES_CALLS = ("LFM2-8B-A1B", "LFM2.5-Instruct", "ibm-granite-granite-3.3-2B-Instruct")
"""Leave out the calls of an earlier answer; here they are written as the model writes them."""
REFUSED_HERE = (
    "google-gemma-2-2b-it",
    "HuggingFaceTB-SmolLM3-3B",  # unless the template is given xml_tools or python_tools
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
)
"""Leave out the tools that they are given: the model would never hear of them."""
LOSES_TEXT = (
    "Cohere2MoE",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "MiniMax-M1",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "muse-glimmer",
    "upstage-Solar-Open-100B",
)
"""Leave out the text beside calls; here it is a message of its own before them."""
MOVES_TEXT = ("openai-gpt-oss-120b",)
"""Shows the text beside calls as a thought, and leaves it out later; here it stays an answer."""
REFUSED_THERE = (
    ("Kimi-K2-Instruct", "calls"),  # the sandbox there lets no list grow
    ("Kimi-K2-Thinking", "calls"),
    ("llama-cpp-deepseek-r1", "tools"),  # a generator as JSON
    ("llama-cpp-deepseek-r1", "calls"),
    ("meetkai-functionary-medium-v3.2", "calls"),  # wants arguments as text; tried here
)
NEEDS_MORE = ("fireworks-ai-llama-3-firefunction-v2",)
"""Fails on `functions=None`, which is given there and left out here."""


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Any]:
    with ic.load_model(pack.model_path("llamacpp")) as model:
        yield model.tokenizer


def theirs(tokenizer: Any, template: str, messages: Any, tools: Any) -> str:
    """Return what llama-cpp-python renders."""
    formats = pytest.importorskip("llama_cpp.llama_chat_format")
    eos, bos = (tokenizer.token_bytes(token).decode() for token in (tokenizer.eos, tokenizer.bos))
    formatter = formats.Jinja2ChatFormatter(template, eos, bos)
    return str(formatter(messages=messages, tools=tools).prompt)


def ours(tokenizer: Any, template: str, messages: Any, tools: Any) -> str:
    """Return what a session puts into its context."""
    request = ChatRequest(messages=messages, tools=tools, chat_template=template)
    return ChatTurn(tokenizer, request, add_bos=False).render().text


def outcome(render: Callable[..., str], *arguments: Any) -> str | None:
    """Return the text, None where the template refuses the messages."""
    try:
        return render(*arguments)
    except Exception:  # noqa: BLE001  (jinja2's own there, ours here)
        return None


def templates() -> list[Any]:
    folder = os.environ.get(FOLDER)
    files = sorted(Path(folder).glob("*.jinja")) if folder else []
    return [pytest.param(file, id=file.stem) for file in files]


@pytest.mark.parametrize("file", templates())
def test_each_template_gives_the_same_text(file: Path, tokenizer: Any) -> None:
    template = file.read_text(encoding="utf-8")
    for name, (messages, tools) in CHATS.items():
        expected = outcome(theirs, tokenizer, template, messages, tools)
        found = outcome(ours, tokenizer, template, messages, tools)
        if tools is not None and file.stem in REFUSED_HERE:
            with pytest.raises(ic.UnsupportedFeatureError):
                ours(tokenizer, template, messages, tools)
        elif (file.stem, name.split()[-1]) in REFUSED_THERE or file.stem in NEEDS_MORE:
            assert expected is None, name
        elif name == "text and calls" and file.stem in LOSES_TEXT:
            text = SAID_AND_CALLED["content"]
            assert (str(found).count(text), str(expected).count(text)) == (1, 0)
            assert str(found).count("Rome") == str(expected).count("Rome")
        elif name == "text and calls" and file.stem in MOVES_TEXT:
            assert str(found).replace(">final<", ">analysis<") == expected
        elif "calls" in name and file.stem in LOSES_CALLS:
            assert str(found).count("Rome") == str(expected).count("Rome") + 1
        else:
            assert found == expected, name


@pytest.mark.parametrize("file", templates())
def test_a_tool_keeps_its_keys_and_their_order(file: Path, tokenizer: Any) -> None:
    template = file.read_text(encoding="utf-8")
    tools = [{"type": "function", "function": FLAT}]
    expected = outcome(theirs, tokenizer, template, [ASKED], tools)
    if expected is not None and file.stem not in (*REFUSED_HERE, *NEEDS_MORE):
        assert outcome(ours, tokenizer, template, [ASKED], [FLAT]) == expected


def test_what_the_engine_is_given_is_the_same() -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    path = pack.model_path("llamacpp")
    given: list[Any] = []
    llm = llama_cpp.Llama(str(path), n_ctx=512, n_threads=1, verbose=False)
    complete = llm.create_completion

    def seen(prompt: Any, **fields: Any) -> Any:
        given.append(prompt)
        return complete(prompt=prompt, **fields)

    llm.create_completion = seen
    llm.create_chat_completion([SYSTEM, ASKED, ANSWER, ASKED], max_tokens=1, temperature=0)
    llm.close()
    with ic.load_model(path) as model, model.new_session(n_ctx=512, n_threads=1) as session:
        list(session.chat([SYSTEM, ASKED, ANSWER, ASKED], max_tokens=1, temperature=0))
        bos, *tokens = session.context.tokens()
        assert bos == model.tokenizer.bos  # which is left out there, though the file asks for it
        assert tokens[: len(given[0])] == list(given[0])
