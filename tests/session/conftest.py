"""Models for the session's tests: the toy for what needs no numbers, the reference for the rest."""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small matrices, which threads slow down

from typing import TYPE_CHECKING, Any

import pytest

import pack
from session.pool_texts import tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from infercore.testing import Faults


@pytest.fixture
def faults() -> Faults:
    from infercore.testing import Faults

    return Faults()


@pytest.fixture
def toy(faults: Faults) -> Iterator[Any]:
    from infercore.testing import load_toy_model

    with load_toy_model(faults=faults) as model:
        yield model


@pytest.fixture
def reference(faults: Faults) -> Iterator[Any]:
    pack.need_pack()
    from infercore.testing import load_reference_model

    with load_reference_model(faults=faults) as model:
        yield model


@pytest.fixture
def recurrent(faults: Faults) -> Iterator[Any]:
    """Return a model that cannot remove tokens from the end, but can save its state."""
    pack.need_pack()
    from infercore.testing import load_reference_model

    with load_reference_model(faults=faults, kv_remove="none", kv_shift=False) as model:
        yield model


@pytest.fixture(params=["toy", "reference", "recurrent"])
def any_model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
def greedy() -> Callable[..., list[int]]:
    def tokens_of(session: Any, n: int = 8, **fields: Any) -> list[int]:
        chunks = session.decode(max_tokens=n, temperature=0, **fields)
        return [token for chunk in chunks for token in chunk.tokens]

    return tokens_of


@pytest.fixture
def cold_greedy(greedy: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """Return what a new session of ``model`` generates after ``text``."""

    def tokens_of(model: Any, text: str, n: int = 8, **fields: Any) -> list[int]:
        with model.new_session(n_ctx=256) as fresh:
            fresh.ensure_prefix(text)
            return greedy(fresh, n, **fields)

    return tokens_of


@pytest.fixture
def alone(reference: Any) -> Callable[..., list[int]]:
    """Return what the reference generates after a text in a session of its own."""

    def tokens(text: str, n: int = 10, **fields: Any) -> list[int]:
        with reference.new_session(n_ctx=256) as session:
            return tokens_of(session, text, n, **fields)

    return tokens
