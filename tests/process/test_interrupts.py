"""Ctrl-C in the middle of a prefill, a decode or a save: a KeyboardInterrupt, and nothing lost."""

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
backend, path, what, file = sys.argv[1:]
TEXT = "Once upon a time there was a baker named Mira who baked bread. " * 30
model = ic.load_model(path, backend=backend)
FIELDS = {"n_ctx": 1024, "n_batch": 64, "n_ubatch": 16, "n_threads": 1}
session = model.new_session(**FIELDS)
def prefill(i):
    session.ensure_prefix(TEXT[i:])
def decode(i):
    for _ in session.decode(max_tokens=400, temperature=0, ignore_eos=True):
        pass
def save(i):
    session.save(file)
    session.load(file)
BEFORE = {"prefill": "x", "decode": TEXT[:60], "save": TEXT}
def told(session):
    session.ensure_prefix(TEXT[:80])
    return "".join(c.text for c in session.decode(max_tokens=12, temperature=0))
n = 0
for i in range(5):
    session.ensure_prefix(BEFORE[what])
    timer = threading.Timer(0.001 + 0.008 * i, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        {"prefill": prefill, "decode": decode, "save": save}[what](i)
        timer.join()
        time.sleep(0.2)
    except KeyboardInterrupt:
        n += 1
state = session.state
again = told(session)
with model.new_session(**FIELDS) as fresh:
    print(json.dumps({"n": n, "state": state, "same": again == told(fresh)}))
"""


@pytest.mark.parametrize("what", ["prefill", "decode", "save"])
def test_an_interrupt_leaves_a_session_that_goes_on(
    backend_name: str, pack_path: Path, tmp_path: Path, what: str
) -> None:
    file = tmp_path / "session.bin"
    command = [sys.executable, "-c", SOURCE, backend_name, str(pack_path), what, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["n"] > 0
    assert told["state"] not in {"FATAL", "CLOSED"}
    assert told["same"]
    assert [path.name for path in tmp_path.iterdir()] in ([], [file.name])
