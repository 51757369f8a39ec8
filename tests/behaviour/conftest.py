"""Sessions and contexts with which engines can be compared exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def exact(exact: dict[str, str], backend_name: str) -> dict[str, Any]:
    """Return exact settings on one thread: these models are small, and cores may be busy."""
    threads = {"n_threads": 1, "n_threads_batch": 1} if backend_name == "llamacpp" else {}
    return {**exact, **threads}


@pytest.fixture
def new_context(model: Any, exact: dict[str, str]) -> Iterator[Callable[..., Any]]:
    """Open contexts with exact settings; they are closed after the test."""
    opened = []

    def open_one(**fields: Any) -> Any:
        opened.append(model.new_context(**{**exact, "n_ctx": 1024, **fields}))
        return opened[-1]

    yield open_one
    for context in opened:
        context.close()


@pytest.fixture
def new_session(model: Any, exact: dict[str, str]) -> Iterator[Callable[..., Any]]:
    """Open sessions with exact settings; they are closed after the test."""
    opened = []

    def open_one(**fields: Any) -> Any:
        opened.append(model.new_session(**{**exact, "n_ctx": 1024, **fields}))
        return opened[-1]

    yield open_one
    for session in opened:
        session.close()


@pytest.fixture
def session(new_session: Callable[..., Any]) -> Any:
    """Return an open session with a window of 1,024 tokens."""
    return new_session()


@pytest.fixture(scope="session")
def story(model: Any, golden: Any) -> str:
    """Return about 600 tokens of story."""
    prompts = [prompt for prompt in golden.prompts if not prompt.ended]
    parts = [p.text + model.tokenizer.decode(p.greedy) for p in prompts]
    tokens = model.tokenizer.encode(" ".join(parts), add_special=False)[:599]
    text: str = model.tokenizer.decode(tokens)
    return text.strip()
