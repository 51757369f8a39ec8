"""A tool loop as the frameworks that people use write it, unchanged but for the address."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import pack
from served import Served, serving

langchain = pytest.importorskip("langchain_openai", reason="a framework under test")
pydantic_ai = pytest.importorskip("pydantic_ai", reason="a framework under test")

if TYPE_CHECKING:
    from collections.abc import Iterator

QUESTION = "What is 17 plus 25?"


@pytest.fixture(scope="module")
def agents(backend_name: str) -> Iterator[Served]:
    """Return a server of the model that calls tools."""
    import infercore as ic
    import infercore_models

    path = infercore_models.path("agent", pack.FORMATS[backend_name])
    with (
        ic.open_pool(path, backend=backend_name, n_ctx=1024, n_parallel=2, n_threads=1) as pool,
        serving({"agent": pool}) as running,
    ):
        yield running


def add(a: int, b: int) -> dict[str, int]:
    """The sum of two numbers."""
    return {"sum": a + b}


def test_langchain(agents: Served) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    model = langchain.ChatOpenAI(
        base_url=f"{agents.url}/v1", api_key="none", model="agent", temperature=0, max_tokens=120,
        max_retries=0,
    )  # fmt: skip
    adds = tool(add)
    with_tools = model.bind_tools([adds])
    messages: list[Any] = [HumanMessage(QUESTION)]
    for _ in range(4):
        answer = with_tools.invoke(messages)
        messages.append(answer)
        if not answer.tool_calls:
            break
        messages += [
            ToolMessage(str(adds.invoke(call["args"])), tool_call_id=call["id"])
            for call in answer.tool_calls
        ]
    assert [type(message) for message in messages].count(ToolMessage) >= 1
    assert answer.text
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
    pieces = list(model.stream([HumanMessage(QUESTION)]))
    assert len(pieces) > 1
    whole = model.invoke([HumanMessage(QUESTION)])
    assert "".join(piece.text for piece in pieces) == whole.text


def test_pydantic_ai(agents: Served) -> None:
    import openai
    from pydantic_ai.messages import ToolReturnPart
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def story() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{agents.url}/v1", api_key="none") as client:
            agent = pydantic_ai.Agent(
                OpenAIChatModel("agent", provider=OpenAIProvider(openai_client=client)),
                tools=[add],
                model_settings={"temperature": 0, "max_tokens": 120},
            )
            limits = pydantic_ai.UsageLimits(request_limit=6)
            return await agent.run(QUESTION, usage_limits=limits)

    done = asyncio.run(story())
    parts = [part for message in done.all_messages() for part in message.parts]
    returned = [part for part in parts if isinstance(part, ToolReturnPart)]
    assert returned
    assert returned[0].tool_name == "add"
    assert done.output
