"""A dropped session is freed with its last reference: Python does not count its cache."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest

from session.pool_waits import SECONDS


@pytest.mark.parametrize("use", ["none", "prefix", "stream", "processors"])
def test_a_pool_that_is_dropped_is_freed_with_its_thread(reference: Any, use: str) -> None:
    pool = reference.new_pool(n_ctx=64)
    session = pool.open_session()
    stream = None
    if use != "none":
        session.ensure_prefix("Once")
    if use == "stream":
        stream = session.decode(max_tokens=4)
        next(stream)
    if use == "processors":
        other = pool.open_session()
        kept = [pool, lambda _ids, logits: logits]
        for one in (session, other):
            one.ensure_prefix("Once")
        streams = [
            one.decode(max_tokens=4, processors=[lambda ids, logits: kept[1](ids, logits)])
            for one in (session, other)
        ]
        for _ in zip(*streams, strict=True):
            pass
        del one, other, kept, streams
    found, scheduler = weakref.ref(pool), pool.owner.scheduler
    del pool, session, stream
    until = time.monotonic() + SECONDS
    while found() is not None or not scheduler.ended:
        assert time.monotonic() < until
        gc.collect()
        time.sleep(0.01)
    assert scheduler.context.closed


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
