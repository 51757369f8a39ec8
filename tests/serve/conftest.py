"""A server over each engine; the packages that serving needs are in the extra ``test``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from served import Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def pool(model: Any) -> Iterator[Any]:
    """Return a pool on the storyteller."""
    with model.new_pool(n_ctx=512, n_parallel=4, n_threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def served(pool: Any) -> Iterator[Served]:
    """Return a server without keys."""
    with serving({"tale": pool}) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Any:
    """Return the public client, connected."""
    return served.client()
