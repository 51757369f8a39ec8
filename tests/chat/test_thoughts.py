"""A mark opens a thought where one can begin, and is text anywhere else; text stays text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infercore.chat.answer import AnswerReader
from infercore.chat.budget import ThoughtBudget
from infercore.chat.dialect import dialect_of
from infercore.chat.raw import RawText
from infercore.chat.reasoning import ReasoningFormat, find_reasoning_format
from infercore.chat.tools import Tools
from infercore.session.chat_stream import ChatStream
from infercore.session.pieces import Piece
from infercore.values.session import StreamChunk

FOLDER = os.environ.get("INFERCORE_CHAT_TEMPLATES")
FILES = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []
THINK = ReasoningFormat("<think>", "</think>")
HARMONY = find_reasoning_format(lambda *_, **__: "", "<|channel|>")
PLAIN = (
    "Use <think> and </think> as marks.",
    "a\n<think>b</think>\n",
    "</think> comes first",
    "<thinker> is no mark",
    "<think",
    " \n",
    "Say <think>",
)


def read(text: str, form: ReasoningFormat | None = THINK, **fields: Any) -> list[tuple[str, str]]:
    """Text and thought, whole and character by character."""
    found = []
    for cuts in ([text], list(text)):
        reader = AnswerReader(fields.get("prompt", ""), reasoning=form)
        pieces = [*map(reader.push, cuts), reader.finish()]
        found.append(("".join(p.text for p in pieces), "".join(p.reasoning for p in pieces)))
    return found


@pytest.mark.parametrize("text", PLAIN)
def test_a_mark_in_the_midst_of_text_is_text(text: str) -> None:
    assert read(text) == [(text, "")] * 2


def test_a_thought_begins_with_the_answer_or_behind_another_one() -> None:
    assert read("\n<think>a</think>\n<think>b</think>\nc <think>") == [("c <think>", "ab")] * 2
    assert read("a</think>b<think>c", prompt="...<think>\n") == [("b<think>c", "a")] * 2


def test_a_channel_in_the_midst_of_text_is_text() -> None:
    text = "<|channel|>final<|message|>A <|channel|>analysis<|message|> is a channel."
    shown = "A <|channel|>analysis<|message|> is a channel."
    assert read(text, HARMONY) == [(shown, "")] * 2


def test_what_is_only_spelled_like_a_control_token_is_no_mark() -> None:
    again = "<|start|>assistant<|channel|>analysis<|message|>"
    text = f"<|channel|>final<|message|>a{again}b"
    flags = "1" * 11 + "0" * 5 + "1" * 11 + "0" * (1 + len(again) + 1)
    reader = AnswerReader("", reasoning=HARMONY, is_control=lambda _: True)
    pieces = [reader.push(RawText(text, flags)), reader.finish()]
    assert "".join(p.text for p in pieces) == f"a{again}b"


def test_the_budget_of_thoughts_counts_no_text() -> None:
    class Letters:
        def encode(self, text: str, **_: Any) -> list[int]:
            return list(text.encode())

        def token_bytes(self, token: int) -> bytes:
            return bytes([token])

        def is_control(self, _token: int) -> bool:
            return False

    budget: Any = ThoughtBudget(Letters(), THINK, 1, inside=False, n_prompt=1)  # type: ignore[arg-type]
    ids = np.array([65], dtype=np.int32)
    for token in b"A <think>bcd":
        logits = np.zeros(256, dtype=np.float32)
        logits[token] = 9.0
        assert int(np.argmax(budget(ids, logits))) == token
        ids = np.append(ids, np.int32(token))


class Source:
    """A decode that yields these chunks."""

    finished = False

    def __init__(self, chunks: list[StreamChunk]) -> None:
        self._chunks = iter(chunks)

    def __next__(self) -> StreamChunk:
        return next(self._chunks)

    def cancel(self) -> None: ...

    def close(self) -> None: ...


def streamed(tokens: list[tuple[str, bool]], sizes: list[int]) -> str:
    """The text of a chat whose chunks hold so many characters, and tokens as they came."""
    pieces: Any = {i: Piece(text.encode(), c, False) for i, (text, c) in enumerate(tokens)}
    text, chunks, at = "".join(t for t, _ in tokens), list[StreamChunk](), 0
    for i, size in enumerate(sizes):
        last = i == len(sizes) - 1
        given = tuple(range(i, len(tokens) if last else i + 1))
        cut = text[at:] if last else text[at : at + size]
        chunks.append(StreamChunk(text=cut, tokens=given, finish_reason="eos" if last else None))
        at += size
    stream = ChatStream(Source(chunks), AnswerReader(""), pieces=pieces)
    return "".join(chunk.text for chunk in stream)


def test_only_control_tokens_are_hidden_not_text_that_equals_one() -> None:
    tokens = [("a ", False), ("<|end|>", True), ("b ", False), ("<|end|>", False), ("é", False)]
    for sizes in ([2, 7, 2, 7, 1], [0, 2, 3, 4, 9], [2, 3, 1, 2, 11]):
        assert streamed(tokens, sizes) == "a b <|end|>é"


@pytest.mark.parametrize("file", [pytest.param(f, id=f.stem) for f in FILES])
def test_text_with_marks_in_it_stays_whole_on_every_template(file: Path) -> None:
    found = dialect_of(file.read_text(encoding="utf-8"), "<s>", "</s>").reasoning
    if found is None:
        return
    for mark in (found.open, found.close, *found.headers):
        text = f"The mark {mark} stands here, {mark} and there."
        assert read(text, found) == [(text, "")] * 2
    thought = f"{found.open}\nmulled\n{found.close}\n\nsaid {found.open} aloud"
    assert read(thought, found) == [(f"said {found.open} aloud", "mulled")] * 2


MUSE = ReasoningFormat("to=self<|m|>", "<|e|>", None, ("to=user<|m|>",), "<|s|>assistant")


def test_messages_of_a_models_own_to_itself_and_to_the_user() -> None:
    text = " to=self<|m|>one<|e|><|s|>assistant to=self<|m|>two<|e|><|s|>assistant to=user<|m|>Hi"
    spaced = text.replace("assistant to", "assistantto")
    assert read(spaced, MUSE) == [("Hi", "onetwo")] * 2
    assert read(text, MUSE) == [("Hi", "onetwo")] * 2


TOOLS = Tools([{"name": "f"}, {"name": "g"}])
ANSWERS = {
    "meetkai-functionary-medium-v3.2": [
        ("all\nHello there", "Hello there", "", ""),
        ('all\nNow>>>f\n{"q":"a"}>>>g\n{}', "Now", "", "fg"),
        ('f\n{"q":"a"}>>>g\n{}', "", "", "fg"),
        ("all the best", "all the best", "", ""),
    ],
    "meta-llama-Llama-3.1-8B-Instruct": [
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", "", "f"),
        ('{"name": "f", "parameters": {"a": 1}}', "", "", "f"),
        ("A <|python_tag|> is a token.", "A <|python_tag|> is a token.", "", ""),
    ],
    "upstage-Solar-Open-100B": [
        (
            (
                "<|think|>a<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>abc123defg"
                '<|tool_call:name|>f<|tool_call:args|>{"a": 1}<|tool_call:end|><|calls|>'
            ),
            "",
            "a",
            "f",
        ),
        ("<|think|>a<|end|><|begin|>assistant<|content|>Hi", "Hi", "a", ""),
    ],
    "muse-glimmer": [
        (
            (
                " to=self<|message|>a<|eom|><|start|>assistant to=f<|message|>"
                '<atem:function_calls>\n<atem:invoke name="f">\n</atem:invoke>\n'
                "</atem:function_calls>"
            ),
            "",
            "a",
            "f",
        ),
        (" to=user<|message|>Hi", "Hi", "", ""),
    ],
    "Kimi-K3": [
        (
            (
                "<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response"
                "<|sep|><|close|>message<|sep|>"
            ),
            "Hi",
            "a",
            "",
        ),
    ],
    "tencent-Hy3": [("<think:opensource>a</think:opensource>Hi", "Hi", "a", "")],
}


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_answers_as_their_models_write_them(name: str) -> None:
    file = next((f for f in FILES if f.stem == name), None)
    if file is None:
        pytest.skip("the templates are not here")
    found = dialect_of(file.read_text(encoding="utf-8"), "<s>", "</s>")
    for written, text, thought, names in ANSWERS[name]:
        for cuts in ([written], list(written)):
            reader = AnswerReader(
                "",
                reasoning=found.reasoning or found.headers,
                form=found.tool_format,
                tools=TOOLS,
                lead=found.call_lead,
            )
            pieces = [*map(reader.push, cuts), reader.finish()]
            assert "".join(p.text for p in pieces) == text
            assert "".join(p.reasoning for p in pieces) == thought
            assert "".join(call.name for p in pieces for call in p.calls) == names
