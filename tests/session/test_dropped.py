"""A dropped session is freed with its last reference: Python does not count its cache."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest


@pytest.mark.parametrize("n_seq_max", [1, 2])
def test_a_context_goes_with_its_last_session(reference: Any, n_seq_max: int) -> None:
    session = reference.new_session(n_ctx=64, n_seq_max=n_seq_max)
    session.ensure_prefix("Once")
    context = weakref.ref(session.context)
    gc.collect()
    gc.disable()
    try:
        del session
        assert context() is None
    finally:
        gc.enable()
