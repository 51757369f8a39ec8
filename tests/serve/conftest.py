"""A server over each engine; the packages that serving needs are in the extra ``test``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from served import Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def pool(pack_path: Path, backend_name: str) -> Iterator[Any]:
    """Return a pool on the storyteller, in a process of its own as ``infercore serve`` opens it."""
    import infercore as ic

    fields = {"n_ctx": 512, "n_parallel": 4, "n_threads": 1}
    with ic.open_pool(pack_path, backend=backend_name, isolate=True, **fields) as opened:
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
