"""A stream that is left in another thread frees its session."""

from __future__ import annotations

import threading
from typing import Any

PROMPT = "Once upon a time there was a baker named Mira"


def ids(chunks: list[Any]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


def test_an_iterator_left_in_another_thread_frees_the_session(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    shown: list[Any] = []

    def read_some() -> None:
        stream = session.decode(temperature=0, ignore_eos=True)
        shown.extend(next(stream) for _ in range(3))

    thread = threading.Thread(target=read_some)
    thread.start()
    thread.join()
    start = session.explain_context().prefix_tokens
    assert session.context.tokens()[start:] == ids(shown)
    session.ensure_prefix(PROMPT)
