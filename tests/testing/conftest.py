"""The reference model and the golden outputs that it must reproduce."""

from __future__ import annotations

import os

# The reference multiplies small matrices, which threads only slow down; NumPy reads it once.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from typing import TYPE_CHECKING, Any

import pytest

import pack

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def reference_model() -> Iterator[Any]:
    pack.need_pack()
    from infercore.testing import load_reference_model

    with load_reference_model() as model:
        yield model
