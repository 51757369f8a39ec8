"""Rows of what peers test of sessions, caches, many at once, chats and tools."""

from __future__ import annotations

import asyncio
import pickle
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import infercore as ic
from rows.bench import SCHEMA, STORY, greedy, ids_of, raises, says, text_of
from rows.sections import (
    CACHE,
    CHAT,
)

if TYPE_CHECKING:
    from rows.bench import Bench

TEMPLATE = (
    "{%- for t in tools or [] %}{{ t.function | tojson }}\n{% endfor -%}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor -%}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"days": 3}}\n</tool_call>'
USER = [{"role": "user", "content": "Weather?"}]


# -- sessions, caches, many at once ---------------------------------------------------------------


@CACHE.row("sessions decoded in one engine call (vLLM)", "`open_pool`, `SessionPool`")
def _(b: Bench) -> None:
    alone = text_of(greedy(b.session()))
    pool = b.pool(n_parallel=3)
    sessions = [b.open(pool.open_session()) for _ in range(3)]
    for session in sessions:
        session.ensure_prefix(STORY)
    streams = [session.decode(temperature=0, max_tokens=8) for session in sessions]
    texts = ["", "", ""]
    for _ in range(20):
        for i, stream in enumerate(streams):
            chunk = next(stream, None)
            texts[i] += chunk.text if chunk else ""
    assert texts == [alone] * 3
    assert pool.stats().n_open == 3


@CACHE.row("a prefix is evaluated once for all (vLLM, SGLang)", "`PrefixStatus.shared_tokens`")
def _(b: Bench) -> None:
    pool = b.pool(n_parallel=2)
    first, second = b.open(pool.open_session()), b.open(pool.open_session())
    n = first.ensure_prefix(STORY).prefilled_tokens
    assert second.ensure_prefix(STORY).shared_tokens >= n - 1


@CACHE.row("namespaces share nothing (vLLM's cache salt)", "`SessionPool.open_session`")
def _(b: Bench) -> None:
    pool = b.pool(n_parallel=2)
    b.open(pool.open_session(namespace="a")).ensure_prefix(STORY)
    status = b.open(pool.open_session(namespace="b")).ensure_prefix(STORY)
    assert (status.shared_tokens, status.reused_tokens) == (0, 0)


def _moved_out(b: Bench, **cache: Any) -> None:
    fields = {**b.exact, "n_parallel": 1, "n_cells": 64, "n_ctx": 64, **cache}
    text = "the little dog and the baker " * 3
    with b.model.new_pool(**fields) as pool:
        one, two = pool.open_session(), pool.open_session()
        n = one.ensure_prefix(text).prefix_tokens
        two.ensure_prefix("tick tock " * 12)
        assert one.explain_context().held_tokens == 0
        assert one.ensure_prefix(text).restored_tokens >= n - 1


@CACHE.row("a cache in RAM keyed by prompt (llama-cpp-python)", "`PoolConfig.cache_bytes`")
def _(b: Bench) -> None:
    _moved_out(b, cache_bytes=2**26)


@CACHE.row("a cache on disk keyed by prompt (llama-cpp-python)", "`PoolConfig.cache_dir`")
def _(b: Bench) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _moved_out(b, cache_dir=folder)


@CACHE.row("batch of prompts equals one by one (openvino-genai)", "`SessionPool.open_session`")
def _(b: Bench) -> None:
    prompts = [STORY, "A short tale about", "The miller"]
    pool = b.pool(n_parallel=3)
    found = [""] * 3

    def run(i: int) -> None:
        with pool.open_session() as session:
            found[i] = session.generate(prompts[i], max_tokens=8, temperature=0)

    workers = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    alone = [b.session("").generate(one, max_tokens=8, temperature=0) for one in prompts]
    assert found == alone


@CACHE.row("a timeout of a call (contenox)", "`CallTimeoutError`")
def _(b: Bench) -> None:
    session = b.session("", n_ctx=4096, n_batch=16, n_ubatch=16)
    long = (b.tokens * 43)[:4000]
    error = raises(ic.CallTimeoutError, lambda: session.ensure_prefix(long, timeout=0.01))
    assert 0 <= error.resident_tokens < len(long)
    assert session.ensure_prefix(b.tokens).prefix_tokens == len(b.tokens)


@CACHE.row("tokens taken out of the middle (contenox)", "`Session.evict`, `ContextReport.cuts`")
def _(b: Bench) -> None:
    session = b.session()
    before = session.context.tokens()
    assert session.evict(4, 8).dropped_tokens == 4
    assert session.context.tokens() == [*before[:4], *before[8:]]
    assert ids_of(greedy(session))


@CACHE.row("fork (contenox, SGLang)", "`Session.fork`")
def _(b: Bench) -> None:
    session = b.session(n_seq_max=2, kv_unified=True)
    twin = b.open(session.fork())
    assert twin.prefill_suffix(" and a fox").prefilled_tokens > 0
    assert text_of(greedy(session)) == text_of(greedy(b.session()))
    assert ids_of(greedy(twin))


@CACHE.row("snapshot as a value, from bytes (contenox)", "`Snapshot.from_bytes`")
def _(b: Bench) -> None:
    session = b.session()
    data = session.snapshot().to_bytes()
    wanted = text_of(greedy(session))
    other = b.session("")
    other.restore(ic.Snapshot.from_bytes(data))
    assert text_of(greedy(other)) == wanted
    assert pickle.loads(pickle.dumps(session.snapshot())).resident_tokens > 0  # noqa: S301
    raises(ic.SnapshotError, lambda: ic.Snapshot.from_bytes(data[:-3]))


@CACHE.row("save and load a file (llama-cpp-python)", "`Session.save`, `Session.load`")
def _(b: Bench) -> None:
    session = b.session()
    with tempfile.TemporaryDirectory() as folder:
        session.save(Path(folder) / "state")
        other = b.session("")
        assert other.load(Path(folder) / "state").resident_tokens > 0
    assert text_of(greedy(other)) == text_of(greedy(session))


@CACHE.row("async sessions (mullama, vLLM)", "`aopen_session`, `AsyncSession`")
def _(b: Bench) -> None:
    async def main() -> str:
        async with ic.aopen_session(b.model, **b.exact, n_ctx=256) as session:
            await session.ensure_prefix(STORY)
            chunks = session.decode(temperature=0, max_tokens=8)
            return "".join([chunk.text async for chunk in chunks])

    assert asyncio.run(main()) == text_of(greedy(b.session()))


# -- chats ----------------------------------------------------------------------------------------


def chat(b: Bench, **fields: Any) -> list[Any]:
    """Return the chunks of an answer."""
    return list(b.session("", n_ctx=512).chat(USER, **{"chat_template": TEMPLATE, **fields}))


@CHAT.row("tool calls apart from the text (llama-cpp-python)", "`Session.chat`, `ToolCall`")
def _(b: Bench) -> None:
    chunks = chat(b, tools=TOOLS, **says(f"So.\n{CALL}"))
    (call,) = [call for chunk in chunks for call in chunk.tool_calls]
    assert (call.name, dict(call.arguments)) == ("weather", {"days": 3})
    assert (text_of(chunks).strip(), chunks[-1].finish_reason) == ("So.", "tool_calls")


@CHAT.row("`tool_choice` (llama-cpp-python, vLLM)", "`Session.chat`")
def _(b: Bench) -> None:
    for choice in ("required", "weather"):
        chunks = chat(b, tools=TOOLS, tool_choice=choice, max_tokens=100, seed=1)
        (call,) = [call for chunk in chunks for call in chunk.tool_calls]
        assert 1 <= call.arguments["days"] <= 9
    chunks = chat(b, tools=TOOLS, tool_choice="none", **says(CALL))
    assert text_of(chunks) == CALL


@CHAT.row("a call that is none stays text (contenox)", "`Session.chat`")
def _(b: Bench) -> None:
    wrong = CALL.replace("3", '"x"')
    chunks = chat(b, tools=TOOLS, **says(wrong))
    assert (text_of(chunks), chunks[-1].finish_reason) == (wrong, "eos")


@CHAT.row("thinking apart from text (ion7-core, contenox)", "`StreamChunk.reasoning`")
def _(b: Bench) -> None:
    thought = "{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}"
    template = TEMPLATE.replace("{%- for c in", thought + "{%- for c in")
    chunks = chat(b, chat_template=template, **says("<think>\nHm.\n</think>\n\nYes."))
    assert "".join(chunk.reasoning for chunk in chunks) == "Hm."
    assert text_of(chunks) == "Yes."


@CHAT.row("tools run in a chain (llm)", "`Session.run_tools`")
def _(b: Bench) -> None:
    def weather(days: Literal[1, 2]) -> str:
        """Say the weather."""
        return f"rain for {days} days"

    session = b.session("", n_ctx=512)
    messages = session.run_tools(
        USER, [weather], max_rounds=2, chat_template=TEMPLATE, tool_choice="required",
        max_tokens=100, temperature=0,
    )  # fmt: skip
    assert [one.role for one in messages][:2] == ["assistant", "tool"]
    assert "rain for" in str(messages[1].content)


@CHAT.row("a message with calls and results (contenox)", "`Message.tool_calls`")
def _(b: Bench) -> None:
    call = ic.ToolCall(id="1", name="weather", arguments={"days": 3})
    messages = [
        ic.Message(role="user", content="Weather?"),
        ic.Message(role="assistant", tool_calls=[call]),
        ic.Message(role="tool", content="rain", tool_call_id="1"),
    ]
    session = b.session("", n_ctx=512)
    list(session.chat(messages, chat_template=TEMPLATE, tools=TOOLS, max_tokens=2))
    text = b.model.tokenizer.decode(session.context.tokens())
    assert '"days": 3' in text
    assert "rain" in text


@CHAT.row("whole turns are left out (contenox)", "`StreamChunk.dropped_messages`")
def _(b: Bench) -> None:
    turns = [{"role": r, "content": "la " * 30} for r in ("user", "assistant") * 4] + USER
    session = b.session("", n_ctx=192, overflow="truncate")
    chunks = list(session.chat(turns, chat_template=TEMPLATE, max_tokens=4))
    assert chunks[0].dropped_messages[:2] == (0, 1)


@CHAT.row("parts of text; images are refused (llm)", "`UnsupportedFeatureError`")
def _(b: Bench) -> None:
    session = b.session("", n_ctx=512)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    list(session.chat([{"role": "user", "content": parts}], chat_template=TEMPLATE, max_tokens=1))
    assert "one" in b.model.tokenizer.decode(session.context.tokens())
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    raises(ic.UnsupportedFeatureError, lambda: list(session.chat(image, chat_template=TEMPLATE)))
