"""Models for the guard's tests: the toy for what needs no numbers, the reference for the rest."""

from __future__ import annotations

import os

# The reference multiplies small matrices, which threads only slow down; NumPy reads it once.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from typing import TYPE_CHECKING, Any

import pytest

import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def toy_model() -> Iterator[Any]:
    from infercore.testing import load_toy_model

    with load_toy_model() as model:
        yield model


@pytest.fixture(scope="session")
def reference_model() -> Iterator[Any]:
    pack.need_pack()
    from infercore.testing import load_reference_model

    with load_reference_model() as model:
        yield model


@pytest.fixture
def toy(toy_model: Any) -> Iterator[Any]:
    with toy_model.new_context(n_ctx=64, n_batch=8) as context:
        yield context


@pytest.fixture
def reference(reference_model: Any) -> Iterator[Any]:
    with reference_model.new_context(n_ctx=64, n_batch=16, n_ubatch=8, n_seq_max=1) as context:
        yield context


@pytest.fixture
def several(reference_model: Any) -> Iterator[Any]:
    """Return a context with four sequences in one window of 64 tokens."""
    with reference_model.new_context(n_ctx=64, n_batch=16, n_seq_max=4, kv_unified=True) as context:
        yield context


@pytest.fixture(params=["toy", "reference"])
def either(request: pytest.FixtureRequest) -> Any:
    """Return a context of each of the two models, empty, with a window of 64."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def state_of() -> Callable[[Any], Any]:
    """Return a function that tells all that a refused call must not change."""

    def state(context: Any) -> Any:
        ids = range(context.n_seq_max)
        held = [(context.n_past(s), context.n_resident(s), context.tokens(s)) for s in ids]
        try:
            row = context.logits().tobytes()
        except Exception as error:  # noqa: BLE001  (its kind is the state)
            row = type(error).__name__
        return held, row

    return state


@pytest.fixture
def fresh_logits(reference_model: Any) -> Callable[..., Any]:
    """Return a function that computes the last logits of cells anew, one token after another."""
    import numpy as np

    def fresh(tokens: list[int], **fields: Any) -> Any:
        with reference_model.new_context(**fields) as context:
            for token in tokens:
                context.decode_one(token)
            return np.array(context.logits())

    return fresh
