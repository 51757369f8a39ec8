"""The HTTP front on Ray answers the public client as a plain server does."""

from __future__ import annotations

from typing import Any

import openai
import pytest

import infercore

PROMPT = "Once upon a time"


@pytest.fixture
def client(port: int, tale: Any) -> openai.OpenAI:
    del tale
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-")


def test_a_completion_is_that_of_a_pool_here(client: openai.OpenAI, model_path: str) -> None:
    with infercore.open_session(model_path, n_ctx=512, n_threads=1) as session:
        text = session.generate(PROMPT, max_tokens=24, temperature=0.0)
    found = client.completions.create(model="tale", prompt=PROMPT, max_tokens=24, temperature=0)
    assert found.choices[0].text == text
    chunks = client.completions.create(
        model="tale", prompt=PROMPT, max_tokens=24, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert len(pieces) > 2
    assert "".join(pieces) == text


def test_models_and_errors_are_those_of_a_plain_server(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tale"]
    with pytest.raises(openai.NotFoundError, match="there is tale"):
        client.completions.create(model="other", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tale", prompt=PROMPT, temperature=-1)


def test_a_pool_by_name_generates(tale: Any, model_path: str) -> None:
    with infercore.open_session(model_path, n_ctx=512, n_threads=1) as session:
        text = session.generate(PROMPT, max_tokens=24, seed=7, temperature=1.0)
    with tale.open_session() as session:
        assert session.generate(PROMPT, max_tokens=24, seed=7, temperature=1.0) == text
        assert session.state == "DECODED"
    with tale.open_session() as session:
        session.ensure_prefix(PROMPT)
        assert (
            "".join(c.text for c in session.decode(max_tokens=24, seed=7, temperature=1.0)) == text
        )
    assert tale.stats().n_cells > 0
