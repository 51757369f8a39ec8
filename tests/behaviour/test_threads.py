"""One owner at a time, never a crash; sessions of one model run side by side."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = "Once upon a time there was a baker named Mira"


def story_of(session: Any, prompt: str) -> str:
    session.ensure_prefix(prompt)
    return "".join(chunk.text for chunk in session.decode(max_tokens=40, temperature=0))


def test_sessions_in_threads_give_what_they_give_alone(new_session: Any) -> None:
    prompts = [PROMPT, "A short tale about Oskar.", "Once upon a time there was a fiddler"]
    alone = [story_of(new_session(), prompt) for prompt in prompts]
    sessions = [new_session() for _ in prompts]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            assert list(pool.map(story_of, sessions, prompts)) == alone


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


def test_cancelling_a_prefill_keeps_what_was_evaluated(new_session: Any, story: str) -> None:
    session = new_session(n_batch=16)
    model_tokens = session.model.tokenizer.encode(story)
    done = threading.Event()
    caught: list[ic.DecodeAbortedError] = []

    def prefill() -> None:
        try:
            session.ensure_prefix(story)
        except ic.DecodeAbortedError as error:
            caught.append(error)
        done.set()

    worker = threading.Thread(target=prefill)
    worker.start()
    while not session.context.output_serial and not done.is_set():
        pass
    while not done.is_set():
        session.cancel()
    worker.join()
    if not caught:
        pytest.fail("the prefill ended before it could be cancelled")
    kept = session.context.n_past()
    assert kept < len(model_tokens)
    assert session.state == "EMPTY"
    assert session.context.tokens() == model_tokens[:kept]
    status = session.ensure_prefix(story)
    assert status.reused_tokens == kept


FORKED = """
import os, sys, infercore as ic
model = ic.load_model(sys.argv[2], backend=sys.argv[1])
session = model.new_session(n_ctx=64)
session.ensure_prefix("Once upon")
if os.fork() == 0:
    try:
        session.prefill_suffix(" a")
    except ic.InvalidStateError as error:
        print("refused", error.state, flush=True)
    session.close()
    os._exit(0)
os.wait()
print(len(session.generate(" a", max_tokens=3, temperature=0)) > 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no os.fork")
def test_a_forked_child_is_refused(backend_name: str, pack_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED, backend_name, str(pack_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["refused", "forked", "True"]


UNCLOSED = """
import sys, infercore as ic
model = ic.load_model(sys.argv[2], backend=sys.argv[1])
session = model.new_session(n_ctx=64)
session.ensure_prefix("Once upon")
stream = session.decode()
print(next(stream).text is not None)
"""


def test_garbage_at_exit_is_quiet(backend_name: str, pack_path: Path) -> None:
    command = [sys.executable, "-c", UNCLOSED, backend_name, str(pack_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("True", "")
