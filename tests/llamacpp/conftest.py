"""The llama.cpp plugin's own objects, without the core around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
import pack
from llamacpp import random_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

EXACT = {**pack.EXACT, "n_threads": 1, "n_threads_batch": 1}


@pytest.fixture(scope="session", autouse=True)
def plugin_model() -> Any:
    """Return the module of the plugin's model; skip without the engine."""
    try:
        from infercore_llamacpp import model
    except ImportError as error:
        pack.skip_or_fail(str(error), failing="llamacpp" in pack.required())
    return model


@pytest.fixture(scope="session")
def story_path() -> Path:
    """Return the storyteller's file, float32."""
    return pack.model_path("llamacpp")


@pytest.fixture(scope="session")
def load(plugin_model: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that loads a model, closed at the end of the session."""
    loaded: list[Any] = []

    def load(path: Path, **fields: Any) -> Any:
        loaded.append(plugin_model.LlamaModel.load(str(path), ic.ModelConfig(**fields)))
        return loaded[-1]

    yield load
    for model in loaded:
        model.close()


@pytest.fixture(scope="session")
def story(load: Callable[..., Any], story_path: Path) -> Any:
    """Return the storyteller, loaded once."""
    return load(story_path)


@pytest.fixture
def open_context() -> Iterator[Callable[..., Any]]:
    """Return a function that opens an exact context, closed when the test ends."""
    opened: list[Any] = []

    def open_context(model: Any, **fields: Any) -> Any:
        opened.append(model.new_context(ic.ContextConfig(**{"n_ctx": 512, **EXACT, **fields})))
        return opened[-1]

    yield open_context
    for context in opened:
        context.close()


@pytest.fixture
def context(story: Any, open_context: Callable[..., Any]) -> Any:
    """Return an exact context on the storyteller."""
    return open_context(story)


@pytest.fixture(scope="session")
def prompt(golden: Any) -> Any:
    """Return the ids of the longest golden prompt, int32."""
    longest = max(golden.prompts, key=lambda found: len(found.tokens))
    return np.array(longest.tokens, dtype=np.int32)


@pytest.fixture(scope="session")
def tiny(load: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a function that gives a small random model of a kind, made and loaded once."""
    folder = tmp_path_factory.mktemp("random")
    models: dict[str, Any] = {}

    def tiny(kind: str) -> Any:
        if kind not in models:
            models[kind] = load(random_gguf.write(folder / f"{kind}.gguf", kind))
        return models[kind]

    return tiny
