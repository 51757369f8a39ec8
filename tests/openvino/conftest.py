"""The storyteller through this plugin, in both forms of its graph."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def ov_path() -> Path:
    """Return the folder of the storyteller in OpenVINO's format."""
    pack.need_backend("openvino")
    return pack.model_path("openvino")


@pytest.fixture(scope="session")
def ov_model(ov_path: Path) -> Iterator[Any]:
    """Return the storyteller, loaded once; tests do not close it."""
    import infercore

    with infercore.load_model(ov_path, backend="openvino") as model:
        yield model


@pytest.fixture(params=["paged", "stateful"])
def form(request: pytest.FixtureRequest) -> str:
    """Return each form of the graph."""
    return str(request.param)


@pytest.fixture
def open_context(ov_model: Any) -> Iterator[Callable[..., Any]]:
    """Open contexts with exact settings; they are closed after the test."""
    opened = []

    def open_one(*, form: str = "paged", **fields: Any) -> Any:
        options = {"form": form, **fields.pop("backend_options", {})}
        fields = {**pack.EXACT, "n_ctx": 512, "backend_options": options, **fields}
        opened.append(ov_model.new_context(**fields))
        return opened[-1]

    yield open_one
    for context in opened:
        context.close()


@pytest.fixture
def copied(ov_path: Path, tmp_path: Path) -> Path:
    """Return a copy of the model that a test may damage."""
    return shutil.copytree(ov_path, tmp_path / "model")


@pytest.fixture(scope="session")
def story(golden: Any) -> list[int]:
    """Return the longest golden prompt with its continuation: about 350 tokens."""
    prompt = max(golden.prompts, key=lambda p: len(p.tokens))
    return [*prompt.tokens, *prompt.greedy]


@pytest.fixture(scope="session")
def reference(ov_model: Any) -> Callable[..., Any]:
    """Return the logits after tokens at given positions, made in a fresh context."""

    def logits_after(tokens: list[int]) -> Any:
        fields = {**pack.EXACT, "n_ctx": 512}
        with ov_model.new_context(**fields) as context:
            context.decode(tokens)
            return np.array(context.logits())

    return logits_after
