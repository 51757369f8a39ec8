"""Ctrl-C while a pool works: it ends the caller's own call, and what others hold stays true."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
import json, os, signal, sys, threading, time
import infercore as ic
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
backend, path, what = sys.argv[1:]
TEXT = "Once upon a time there was a baker named Mira who baked bread. " * 12
OTHER = "The dog ran home and"
FIELDS = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1}
model = ic.load_model(path, backend=backend, check_in_child=False)
def told(session, text):
    session.ensure_prefix(text)
    return "".join(c.text for c in session.decode(max_tokens=12, temperature=0))
with model.new_pool(n_parallel=2, **FIELDS) as pool:
    mine, other = pool.open_session(), pool.open_session()
    heard, done = [], threading.Event()
    def beside():
        while not done.is_set():
            heard.append(told(other, OTHER))
    calls = {
        "prefill": lambda i: mine.ensure_prefix(TEXT[i:]),
        "decode": lambda i: list(mine.decode(max_tokens=200, temperature=0, ignore_eos=True)),
        "open": lambda i: [pool.open_session().close() for _ in range(300)],
        "snapshot": lambda i: [mine.restore(mine.snapshot()) for _ in range(20)],
        "fork": lambda i: [told(fork, TEXT[:40]) for fork in [mine.fork() for _ in range(2)]],
    }
    thread = threading.Thread(target=beside)
    thread.start()
    n = 0
    for i in range(5):
        mine.ensure_prefix("x" if what == "prefill" else TEXT[:60])
        timer = threading.Timer(0.002 + 0.01 * i, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            calls[what](i)
            timer.join()
            time.sleep(0.3)
        except KeyboardInterrupt:
            n += 1
    done.set()
    thread.join(60)
    again, held = told(mine, TEXT[:80]), pool.stats().n_running
    alive = thread.is_alive()
with model.new_session(**FIELDS) as fresh:
    expected = told(fresh, TEXT[:80]), told(fresh, OTHER)
print(json.dumps({"n": n, "alive": alive, "running": held, "texts": [again, sorted(set(heard))],
                  "expected": [expected[0], [expected[1]]]}))
"""


@pytest.mark.parametrize("what", ["prefill", "decode", "fork"])
def test_an_interrupt_ends_its_own_call_alone(
    backend_name: str, pack_path: Path, what: str
) -> None:
    command = [sys.executable, "-c", SOURCE, backend_name, str(pack_path), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["n"] > 0
    assert not told["alive"]
    assert told["running"] == 0
    assert told["texts"] == told["expected"]
