"""An isolated pool, the same pool in this process, and a session, for the tests of a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from isolated.pools import HERE, ISOLATED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def pool(pack_path: Path, backend_name: str) -> Iterator[Any]:
    """Return an isolated pool; each test may kill its worker."""
    with ic.open_pool(pack_path, backend=backend_name, isolate=True, **ISOLATED) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(model: Any) -> Iterator[Any]:
    """Return the same pool in this process."""
    with model.new_pool(**HERE) as opened:
        yield opened


@pytest.fixture
def session(pool: Any) -> Iterator[Any]:
    with pool.open_session() as opened:
        yield opened
