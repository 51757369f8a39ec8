"""A tool loop through the server, as programs of the protocol write it."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
import pack
from infercore.serve import answering, responses
from served import Served, serving

openai = pytest.importorskip("openai", reason="the client that the tests use is not installed")

if TYPE_CHECKING:
    from collections.abc import Iterator

ADD = {
    "name": "add",
    "description": "The sum of two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
ROAD = {
    "name": "road",
    "description": "Where the road from a place leads, and how many miles it is.",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string"}},
        "required": ["place"],
    },
}
TOOLS = [{"type": "function", "function": function} for function in (ROAD, ADD)]
ASK = {"role": "user", "content": "What is 17 plus 25?"}
FIELDS = {"model": "agent", "temperature": 0, "max_tokens": 120, "tools": TOOLS}


@pytest.fixture(scope="module")
def served(backend_name: str) -> Iterator[Served]:
    """Return a server of the model that calls tools."""
    import infercore as ic
    import infercore_models

    path = infercore_models.path("agent", pack.FORMATS[backend_name])
    with (
        ic.open_pool(path, backend=backend_name, n_ctx=1024, n_parallel=2, n_threads=1) as pool,
        serving({"agent": pool}) as running,
    ):
        yield running


def called(call: Any) -> dict[str, Any]:
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"a", "b"}
    return {"sum": arguments["a"] + arguments["b"]}


def test_a_loop_until_the_answer(served: Served) -> None:
    client = served.client()
    messages: list[Any] = [ASK]
    for _ in range(4):
        answer = client.chat.completions.create(**FIELDS, messages=messages)
        choice = answer.choices[0]
        messages.append(choice.message.model_dump(exclude_none=True))
        if choice.finish_reason != "tool_calls":
            break
        for call in choice.message.tool_calls:
            content = json.dumps(called(call))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    assert choice.finish_reason == "stop"
    assert choice.message.content, "the tiny model adds badly, but it ends with an answer"
    assert any(message["role"] == "tool" for message in messages)
    assert answer.usage.prompt_tokens_details.cached_tokens > 0


def test_a_loop_of_responses_goes_on_from_its_thought(served: Served) -> None:
    tools = [{"type": "function", **function} for function in (ROAD, ADD)]
    fields = {"model": "agent", "temperature": 0, "max_output_tokens": 120, "tools": tools}
    client = served.client()
    first = client.responses.create(**fields, input=[ASK])
    assert first.output[0].type == "reasoning"
    items = [ASK, *(item.model_dump() for item in first.output)]  # with fields that are null
    for item in first.output:
        if item.type == "function_call":
            output = {"type": "function_call_output", "call_id": item.call_id, "output": "42"}
            items.append(output)
    second = client.responses.create(**fields, input=items)
    assert len(items) > len(first.output) + 1, "it called a tool"
    resident = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens >= resident - 1


def test_a_schema_that_cannot_be_kept_is_named_as_the_tools(served: Served) -> None:
    looks_ahead = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}
    function = {"name": "f", "parameters": looks_ahead}
    client = served.client()
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="agent",
            messages=[ASK],
            tools=[{"type": "function", "function": function}],
            tool_choice="required",
        )
    assert caught.value.param == "tools"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(
            model="agent",
            input=[ASK],
            tools=[{"type": "function", **function}],
            tool_choice="required",
        )
    assert caught.value.param == "tools"


def test_calls_in_a_stream_are_those_of_the_whole(served: Served) -> None:
    client = served.client()
    asked = {**FIELDS, "messages": [ASK], "tool_choice": "required"}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.name == "add"
    assert [c.function.arguments for c in final.message.tool_calls] == [
        c.function.arguments for c in whole.message.tool_calls
    ]


def test_one_call_where_no_more_are_wanted(served: Served) -> None:
    client = served.client()
    asked = {**FIELDS, "messages": [ASK], "parallel_tool_calls": False}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert len(choice.message.tool_calls) == 1
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert (final.finish_reason, final.message.content or None) == (
        "tool_calls",
        choice.message.content,
    )
    assert len(final.message.tool_calls) == 1


CALL = ic.ToolCall(name="add", arguments={"a": 1}, id="1")


def to_the_only_call(*made: ic.StreamChunk) -> tuple[list[ic.StreamChunk], int]:
    """Return what is sent of ``made``, and how often its session was cancelled."""

    class Session:
        n_cancelled = 0

        def cancel(self) -> None:
            self.n_cancelled += 1

    async def stream() -> Any:
        for chunk in made:
            yield chunk

    async def story() -> list[Any]:
        return [chunk async for chunk in answering._one_call(session, stream())]

    session: Any = Session()
    return asyncio.run(story()), session.n_cancelled


def test_what_comes_behind_the_only_call_is_left_out() -> None:
    sent, n_cancelled = to_the_only_call(
        ic.StreamChunk(text="Let me see. "),
        ic.StreamChunk(text="", tokens=(1,), tool_calls=(CALL, CALL)),
        ic.StreamChunk(text=" and", tokens=(2,), tool_calls=(CALL,)),
        ic.StreamChunk(text="", finish_reason="cancelled"),
    )
    told = [(chunk.text, chunk.tool_calls, chunk.finish_reason) for chunk in sent]
    assert told == [
        ("Let me see. ", (), None), ("", (CALL,), None), ("", (), None), ("", (), "tool_calls"),
    ]  # fmt: skip
    assert n_cancelled == 1


def test_no_probabilities_are_sent_behind_the_only_call() -> None:
    def likely(token: int) -> tuple[ic.TokenLogprob]:
        return (ic.TokenLogprob(token=token, logprob=-0.5),)

    sent, _ = to_the_only_call(
        ic.StreamChunk(text="So", tokens=(1,), logprobs=likely(1)),
        ic.StreamChunk(text="", tokens=(2,), logprobs=likely(2), tool_calls=(CALL,)),
        ic.StreamChunk(text=" and", tokens=(3,), logprobs=likely(3)),
        ic.StreamChunk(text="", tokens=(4,), logprobs=likely(4), finish_reason="cancelled"),
    )
    assert [chunk.logprobs for chunk in sent] == [likely(1), likely(2), None, None]


def test_calls_of_a_response(served: Served) -> None:
    client = served.client()
    asked = {
        "model": "agent",
        "temperature": 0,
        "max_output_tokens": 120,
        "tools": [{"type": "function", **function} for function in (ROAD, ADD)],
        "tool_choice": "required",
    }
    answer = client.responses.create(input=[ASK], **asked)
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["add"]
    kinds = [event.type for event in client.responses.create(input=[ASK], **asked, stream=True)]
    assert "response.function_call_arguments.done" in kinds
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": '{"sum": 42}'}
    items = [ASK, calls[0].model_dump(exclude_none=True), result]
    last = client.responses.create(input=items, **{**asked, "tool_choice": "auto"})
    assert last.output_text


def test_a_tool_s_output_in_parts_is_that_in_one(served: Served) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    fields = {"model": "agent", "temperature": 0, "max_output_tokens": 4}
    texts = []
    for output in ("42", [{"type": "input_text", "text": "42"}]):
        items = [ASK, call, {"type": "function_call_output", "call_id": "c", "output": output}]
        texts.append(served.client().responses.create(input=items, **fields))
    assert texts[0].usage.input_tokens == texts[1].usage.input_tokens
    assert texts[0].output_text == texts[1].output_text
    for output in (None, 42, [{"type": "input_image", "image_url": "x"}]):
        items = [ASK, call, {"type": "function_call_output", "call_id": "c", "output": output}]
        with pytest.raises(openai.BadRequestError) as caught:
            served.client().responses.create(input=items, **fields)
        assert caught.value.param.startswith("input")


def test_calls_of_several_answers_have_ids_of_their_own(served: Served) -> None:
    asked = {**FIELDS, "messages": [ASK], "tool_choice": "required", "n": 3}
    client = served.client()
    ids = [
        [call.id for choice in answer.choices for call in choice.message.tool_calls]
        for answer in (client.chat.completions.create(**asked) for _ in range(2))
    ]
    assert len(ids[0]) == len(set(ids[0])) == 3
    assert ids[0] == ids[1], "the same chat gives the same ids"
    assert all(len(each) == 9 and each.isalnum() for each in ids[0]), "as some templates want them"
    alone = client.chat.completions.create(**{**asked, "n": 1}).choices[0]
    assert alone.message.tool_calls[0].id == ids[0][0]
    streamed = {
        call.id
        for chunk in client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
        for call in choice.delta.tool_calls or ()
    }
    assert streamed == set(ids[0])


def test_a_tool_of_any_name_can_be_named(served: Served) -> None:
    tools = [{"type": "function", "name": "required", "parameters": {"type": "object"}}]
    tools += [{"type": "function", **ADD}]
    answer = served.client().responses.create(
        model="agent",
        input=[ASK],
        tools=tools,
        tool_choice={"type": "function", "name": "required"},
        max_output_tokens=60,
        temperature=0,
    )
    assert [item.name for item in answer.output if item.type == "function_call"] == ["required"]


def test_a_tool_that_is_not_there(served: Served) -> None:
    with pytest.raises(openai.BadRequestError):
        served.client().chat.completions.create(
            **{**FIELDS, "messages": [ASK]},
            tool_choice={"type": "function", "function": {"name": "sing"}},
        )


def test_a_tool_of_responses_keeps_what_it_says() -> None:
    tool = {"type": "function", "name": "f", "strict": True, "parameters": {"type": "object"}}
    inner = {"name": "f", "strict": True, "parameters": {"type": "object"}}
    assert responses._tool(tool) == {"type": "function", "function": inner}
