"""What the handler of a signal raises passes through as itself, and the context goes on."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest

import infercore as ic

if not hasattr(signal, "setitimer"):
    pytest.skip("there is no timer here", allow_module_level=True)


class Boom(Exception):  # noqa: N818  (a handler's own)
    """What nobody but the handler knows."""


class Handler:
    """A handler that is an object."""

    def __call__(self, *_: object) -> None:
        raise Boom


def raising(*_: object) -> None:
    raise Boom


# One that comes between the opening of a file and its `with` leaves the file to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("handler", [raising, Handler()], ids=["function", "object"])
def test_a_handlers_exception_is_itself(model: Any, handler: Any) -> None:
    before = signal.signal(signal.SIGALRM, handler)
    n, tokens = 0, list(range(20, 40))
    try:
        with model.new_context(n_ctx=128, n_threads=1, n_threads_batch=1) as context:
            context.decode(tokens)
            expected = context.logits().copy()
            for i in range(30):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0003 + 0.0004 * i)
                    for _ in range(8):
                        context.clear()
                        context.decode(tokens)
                        context.load_state(context.save_state())
                except Boom:
                    n += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                context.clear()
                context.decode(tokens)
                assert np.abs(context.logits() - expected).max() <= context.tolerance
    finally:
        signal.signal(signal.SIGALRM, before)
    assert n > 5


def test_an_overflow_of_a_first_text_leaves_the_session_empty(model: Any) -> None:
    with model.new_session(n_ctx=32, n_threads=1, n_threads_batch=1) as session:
        with pytest.raises(ic.ContextOverflowError):
            session.generate("dog " * 100)
        assert (session.state, session.explain_context().resident_tokens) == ("EMPTY", 0)
        assert session.generate("Once", max_tokens=2, ignore_eos=True)


@pytest.mark.parametrize("name", ["self", "rows", "template"])
def test_no_name_of_a_variable_is_taken(model: Any, name: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    template = "{{ messages[0].content }} {{ " + name + " }}"
    text = model.tokenizer.apply_chat_template(messages, chat_template=template, **{name: "there"})
    assert text.startswith("Hi")
