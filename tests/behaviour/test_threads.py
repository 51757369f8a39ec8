"""One owner at a time, never a crash; sessions of one model run side by side."""

from __future__ import annotations

import threading
from typing import Any

import infercore as ic

PROMPT = "Once upon a time there was a baker named Mira"


def story_of(session: Any, prompt: str) -> str:
    session.ensure_prefix(prompt)
    return "".join(chunk.text for chunk in session.decode(max_tokens=40, temperature=0))


def test_a_second_thread_is_refused_or_waits_its_turn(session: Any) -> None:
    outcomes: list[str] = []

    def hammer() -> None:
        for _ in range(30):
            try:
                session.ensure_prefix(PROMPT)
                outcomes.append("ok")
            except ic.SessionBusyError:  # noqa: PERF203
                outcomes.append("busy")

    threads = [threading.Thread(target=hammer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 120
    assert set(outcomes) <= {"ok", "busy"}
    assert story_of(session, PROMPT)
