"""A restore or an evict that a handler breaks off leaves a session that can be saved."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from engine.interrupts import interrupt
from infercore.session import homes

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT, OTHER = "Once upon a time there was a baker", "A short"


class Boom(Exception):  # noqa: N818  (any exception)
    pass


@pytest.mark.parametrize("name", ["restore", "evict"])
def test_it_can_be_saved(new_session: Callable[..., Any], name: str) -> None:
    """The exception comes in front of each line of what these calls do, one after another."""
    session, other = new_session(n_ctx=64), new_session(n_ctx=64)
    other.ensure_prefix(OTHER)
    short = other.snapshot()
    for at in range(1, 400):
        session.ensure_prefix(TEXT)
        seen = 0

        def trace(frame: Any, event: str, _: object, stop: int = at) -> Any:
            nonlocal seen
            if not frame.f_code.co_filename.endswith(("snapshots.py", "evicting.py")):
                return trace
            seen += event == "line"
            if seen == stop:
                seen += 1
                raise Boom
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            session.restore(short) if name == "restore" else session.evict(1, 3)
            is_done = True
        except Boom:
            is_done = False
        finally:
            sys.settrace(before)
        if is_done:
            assert at > 5
            return
        data = session.snapshot().to_bytes()
        other.restore(ic.Snapshot.from_bytes(data))
        texts = [[c.text for c in s.decode(max_tokens=2, temperature=0)] for s in (session, other)]
        assert texts[0] == texts[1]
        session.ensure_prefix("x")
    pytest.fail("it never ended")


def test_a_ctrl_c_while_tokens_are_moved_ends_no_session(
    new_session: Callable[..., Any], backend_name: str
) -> None:
    """What the engine holds is not known then: it is evaluated anew."""
    plugin = importlib.import_module(f"infercore_{backend_name}")
    session = new_session(n_ctx=64)
    session.ensure_prefix(TEXT)
    expected = [c.text for c in session.decode(max_tokens=3, temperature=0)]
    for at in range(1, 500):
        session.ensure_prefix(TEXT)
        came = interrupt(at, partial(session.evict, 2, 4), plugin.__path__[0])
        session.ensure_prefix(TEXT)
        assert [c.text for c in session.decode(max_tokens=3, temperature=0)] == expected
        if not came:
            assert at > 5
            return
    pytest.fail("it never ended")


@pytest.mark.parametrize("name", ["fork", "sample_many"])
def test_a_ctrl_c_takes_no_context_from_its_session(
    new_session: Callable[..., Any], name: str
) -> None:
    """A session that begins to share its context has it after the interruption as before."""
    calls: dict[str, Callable[[Any], object]] = {
        "fork": lambda session: session.fork().close(),
        "sample_many": lambda session: session.sample_many(2, max_tokens=2, seed=1),
    }
    with new_session(n_ctx=64) as session:
        session.ensure_prefix(TEXT)
        expected = [c.text for c in session.decode(max_tokens=3, temperature=0)]
    for at in range(1, 500):
        session = new_session(n_ctx=192, n_seq_max=3)
        session.ensure_prefix(TEXT)
        came = interrupt(at, partial(calls[name], session), homes.__file__)
        session.ensure_prefix(TEXT)
        assert [c.text for c in session.decode(max_tokens=3, temperature=0)] == expected
        session.close()
        if not came:
            assert at > 5
            return
    pytest.fail("it never ended")
