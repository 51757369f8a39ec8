"""What a client is told where something fails."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from infercore.serve import errors
from infercore.serve.answering import answers

openai = pytest.importorskip("openai", reason="the client that the tests use is not installed")

if TYPE_CHECKING:
    from served import Served


@pytest.mark.parametrize(
    "error",
    [
        ic.SessionFatalError(
            "this context can no longer be trusted: lost; close it and open a new one",
            cause=RuntimeError("lost"),
        ),
        ic.SessionFatalError(
            "this pool's engine died too often: lost; open a new pool", cause=RuntimeError("lost")
        ),
        ic.SessionClosedError("this pool is closed; open a new one"),
        ic.PoolFullError(n_waiting=3),
        ic.CallTimeoutError(elapsed_ms=20, resident_tokens=7),
    ],
)
def test_an_error_advises_what_a_client_can_do(error: Exception) -> None:
    told = errors.api_error(error).message
    assert "ask again" in told
    assert not {"open", "close", "call again"} & set(re.findall(r"call again|\w+", told)), told


def test_what_a_template_cannot_do_advises_no_other_template(served: Served, model: Any) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    asked = {"model": "tale", "messages": [{"role": "user", "content": "Look."}], "tools": [tool]}
    with pytest.raises(openai.BadRequestError) as caught:
        served.client().chat.completions.create(**asked)
    assert "describe the tools in a message" in str(caught.value)
    assert "chat_template" not in str(caught.value)
    with pytest.raises(ic.UnsupportedFeatureError) as ours:
        model.tokenizer.apply_chat_template([], chat_template="")
    assert "/v1/completions" in errors.api_error(ours.value).message


def test_a_pool_that_cannot_load_its_model_again_names_no_path() -> None:
    cause = ic.ModelNotFoundError("/srv/tale.gguf does not exist", path="/srv/tale.gguf")
    text = f"this pool's engine died too often: {cause}; open a new pool"
    told = errors.api_error(ic.SessionFatalError(text, cause=cause))
    assert (told.status, told.message) == (500, "the server failed; its log says more")


def test_a_stream_of_responses_that_fails_says_so(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*arguments: Any) -> Any:
        async for item in answers(*arguments):
            yield item
            raise ic.SessionFatalError("the engine has died", cause=RuntimeError("gone"))

    monkeypatch.setattr("infercore.serve.responses.answers", failing)
    ask = {"model": "tale", "input": "Tell me of Mira.", "stream": True}
    with served.client().responses.create(**ask) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "SessionFatalError"
