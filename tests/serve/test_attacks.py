"""What an attacker found: each of these was answered otherwise once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from infercore.serve import wire

httpx = pytest.importorskip("httpx", reason="the client that the tests use is not installed")

if TYPE_CHECKING:
    from pathlib import Path

    from served import Served

CHAT = "/v1/chat/completions"
ASK = {"model": "tale", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
WRONG: dict[str, tuple[str, Any]] = {
    "digits of an id": (CHAT, {**ASK, "logit_bias": {"1" * 5_000: 1}}),
    "a bias beyond float32": (CHAT, {**ASK, "logit_bias": {"5": 1e308}}),
    "a choice of no name": (CHAT, {**ASK, "tools": [TOOL], "tool_choice": {"function": 5}}),
    "messages without end": (CHAT, {**ASK, "messages": ASK["messages"] * 3_000}),
    "an item of no kind": ("/v1/responses", {"model": "tale", "input": [{"type": []}]}),
    "a prompt of nothing": ("/v1/completions", {"model": "tale", "prompt": [[]]}),
    "prompts without end": ("/v1/completions", {"model": "tale", "prompt": ["a"] * 200}),
    "a form of no object": (
        "/v1/responses",
        {"model": "tale", "input": "a", "text": {"format": 1}},
    ),
    "a verbosity": ("/v1/responses", {"model": "tale", "input": "a", "text": {"verbosity": "low"}}),
    "probabilities of a prompt": (
        "/v1/completions",
        {"model": "tale", "prompt": "a", "echo": True, "logprobs": 0},
    ),
    "fields that leave no token": (CHAT, {**ASK, "regex": "(yes|no)", "ignore_eos": True}),
    "padding of a stream": (CHAT, {**ASK, "stream_options": {"include_obfuscation": True}}),
    "options nobody knows": (
        "/v1/responses",
        {"model": "tale", "input": "a", "stream_options": {"x": 1}},
    ),
    "a choice without tools": (
        "/v1/responses",
        {"model": "tale", "input": "a", "tool_choice": "required"},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_400(served: Served, name: str) -> None:
    path, body = WRONG[name]
    answer = httpx.post(f"{served.url}{path}", json=body, timeout=60)
    assert answer.status_code == 400, answer.text


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        inner = {"type": "array", "items": inner}
    return inner


RESPONSE = {"model": "tale", "input": "Hi"}
TEXT = {"model": "tale", "prompt": "Hi", "max_tokens": 4}
SCHEMA = {"name": "s", "schema": {"type": "object"}}
DEEP_TOOL = {**TOOL, "function": {"name": "f", "parameters": nested(300)}}
NAMED: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "a form's": (CHAT, {"response_format": {"type": "text", "x": 1}}, "response_format.x"),
    "a schema's": (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {**SCHEMA, "x": 1}}},
        "response_format.json_schema.x",
    ),
    "an item's": (
        "/v1/responses",
        {"input": [{"role": "user", "content": "Hi", "x": 1}]},
        "input.x",
    ),
    "an item's part": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [5]}]},
        "input",
    ),
    "usage": (
        "/v1/responses",
        {"stream": True, "stream_options": {"include_usage": True}},
        "stream_options.include_usage",
    ),
    "no stream": (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    "a long prompt": ("/v1/completions", {"prompt": "tick tock " * 900}, "prompt"),
    "a long input": ("/v1/responses", {"input": "tick tock " * 900}, "input"),
    "a regex": ("/v1/completions", {"regex": "("}, "regex"),
    "a grammar": (CHAT, {"grammar": "root ::= ("}, "grammar"),
    "a schema": (
        "/v1/responses",
        {"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "x"}}}},
        "text.format",
    ),
    "a template's": (
        CHAT,
        {"chat_template_kwargs": {"messages": 5}},
        "chat_template_kwargs",
    ),
    "a deep variable": (CHAT, {"chat_template_kwargs": nested(300)}, "chat_template_kwargs"),
    "a deep tool": (CHAT, {"tools": [DEEP_TOOL]}, "tools"),
    "a deep form": (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": nested(300)}}},
        "response_format",
    ),
    "a deep part": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": nested(300)}]}]},
        "messages",
    ),
    "a deep form of text": (
        "/v1/responses",
        {"text": {"format": {"type": "json_schema", "name": "s", "schema": nested(300)}}},
        "text",
    ),
    "a deep item": ("/v1/responses", {"input": [nested(300)]}, "input"),
    "tokens": ("/detokenize", {"tokens": [-1]}, "tokens"),
    "answers": (CHAT, {"n": 1000}, "n"),
    "prompts": ("/v1/completions", {"prompt": ["a"] * 300}, "prompt"),
    "answers of prompts": ("/v1/completions", {"prompt": ["a"] * 128, "n": 3}, "n"),
}
BODIES = {
    CHAT: ASK,
    "/v1/responses": RESPONSE,
    "/v1/completions": TEXT,
    "/detokenize": {"model": "tale"},
}


@pytest.mark.parametrize("name", NAMED)
def test_a_refusal_names_the_field_of_its_route(served: Served, name: str) -> None:
    path, body, param = NAMED[name]
    answer = httpx.post(f"{served.url}{path}", json={**BODIES[path], **body}, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert "engine" not in answer.json()["error"]["message"]
    assert "retry-after" not in answer.headers


@pytest.mark.parametrize(
    ("field", "given"),
    [("tools", "web_search"), ("tools", "mcp"), ("input", "item_reference")],
)
def test_what_responses_do_not_know_is_refused_by_name(
    served: Served, field: str, given: str
) -> None:
    answer = httpx.post(f"{served.url}/v1/responses", json={**RESPONSE, field: [{"type": given}]})
    assert answer.status_code == 400
    told = answer.json()["error"]
    assert told["param"] == field
    assert f"type '{given}' is not supported here" in told["message"]


@pytest.mark.parametrize(("depth", "status"), [(wire.MAX_DEPTH, 200), (wire.MAX_DEPTH + 1, 400)])
def test_how_deep_a_field_may_be(served: Served, depth: int, status: int) -> None:
    inner: Any = 1
    for _ in range(depth):
        inner = [inner]
    body = {**ASK, "chat_template_kwargs": {"deep": inner[0]}}
    assert httpx.post(f"{served.url}{CHAT}", json=body).status_code == status


def test_a_method_that_a_route_does_not_have(served: Served) -> None:
    answer = httpx.get(f"{served.url}{CHAT}")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    "body", [b'{"model":"\xff"}', b'{"model":"tale","messages":' + b"[" * 99_999]
)
def test_a_body_that_is_no_json_is_400(served: Served, body: bytes) -> None:
    assert httpx.post(f"{served.url}{CHAT}", content=body).status_code == 400


def test_no_tokens_are_refused_and_not_without_limit(served: Served) -> None:
    answer = httpx.post(f"{served.url}{CHAT}", json={**ASK, "max_completion_tokens": 0})
    assert answer.status_code == 400


def test_a_page_of_another_origin_may_not_call(served: Served) -> None:
    headers = {"Origin": "http://evil", "Content-Type": "text/plain"}
    assert httpx.post(f"{served.url}{CHAT}", json=ASK, headers=headers).status_code == 403
    own = {"Origin": served.url}
    assert httpx.post(f"{served.url}{CHAT}", json=ASK, headers=own).status_code == 200


def test_a_load_that_its_client_left_is_everybody_s(pack_path: Path) -> None:
    import infercore as ic
    from infercore.serve.models import Models

    opened = []

    def opens() -> Any:
        opened.append(ic.open_pool(pack_path, n_ctx=64, n_threads=1))
        return opened[-1]

    async def story() -> None:
        served = Models({"tale": opens}, n_warm=1).get("tale")

        async def use() -> None:
            async with served.used():
                pass

        leaving = [asyncio.create_task(use()) for _ in range(3)]
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await use()
        await served.close()

    asyncio.run(story())
    assert [pool.closed for pool in opened] == [True]


def test_a_model_that_cannot_be_opened_tells_no_path(tmp_path: Path) -> None:
    import infercore as ic
    from infercore.serve.app import App
    from infercore.serve.config import ServeConfig
    from infercore.serve.models import Models

    secret = tmp_path / "secret.bin"
    secret.write_bytes(b"x")
    app = App(Models({"tale": lambda: ic.open_pool(secret)}, n_warm=1), ServeConfig())

    async def story() -> Any:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return await http.post(CHAT, json=ASK)

    answer = asyncio.run(story())
    assert answer.status_code == 503
    assert "secret" not in answer.text
