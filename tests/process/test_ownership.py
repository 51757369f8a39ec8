"""Closing and forgetting in any order, callbacks that raise, threads, exit: each in a child."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

START = """
import gc, itertools, sys, threading
import infercore as ic
backend, path = sys.argv[1:]
FIELDS = {"n_ctx": 64} | ({"n_threads": 1, "n_threads_batch": 1} if backend == "llamacpp" else {})
def load():
    return ic.load_model(path, backend=backend)
def opened(model):
    context = model.new_context(**FIELDS)
    context.decode([5, 6, 7])
    return context
def refused(kind, call):
    try:
        call()
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")
"""

BODIES = {
    "closing in any order": """
for order in itertools.permutations(range(4)):
    model = load()
    parts = [model, opened(model), model.new_session(**FIELDS), model.new_sampler()]
    parts[2].ensure_prefix("Once")
    for i in order:
        parts[i].close()
    for part in parts:
        part.close()
    assert all(part.closed for part in parts[:3])
""",
    "forgetting in any order": """
for order in itertools.permutations(range(4)):
    model = load()
    context = opened(model)
    parts = [model, context, model.new_session(**FIELDS), model.new_sampler()]
    del model, context
    parts[2].ensure_prefix("Once")
    for i in order:
        parts[i] = None
        gc.collect()
""",
    "native samplers closed in any order": """
for order in itertools.permutations(range(3)):
    model = load()
    context = opened(model)
    if not model.capabilities.native_sampler:
        refused(ic.UnsupportedFeatureError, lambda: model.new_sampler(implementation="native"))
        break
    sampler = model.new_sampler(implementation="native", seed=3)
    sampler.sample(context)
    parts = [model, context, sampler]
    twin = sampler.clone()
    for i in order:
        parts[i].close()
    refused(ic.SessionClosedError, lambda: sampler.sample(context))
    twin.reset()
    twin.close()
""",
    "a context outlives its model's variable": """
def make():
    model = load()
    return opened(model)
context = make()
gc.collect()
context.decode_one(5)
assert context.n_past() == 4
tokenizer = load().tokenizer
gc.collect()
assert tokenizer.encode("a")  # a part keeps its model
""",
    "a row that is kept": """
rows = []
for close in (True, True, False):
    model = load()
    context = opened(model)
    context.decode_one(5)
    rows.append((context.logits(), context.logits().copy()))
    context.decode_one(6)
    rows.append((context.logits(), context.logits().copy()))
    if close:
        context.close()
        model.close()
    del model, context
    gc.collect()
in_their_place = [b"x" * 2**n for n in range(12, 24) for _ in range(8)]
assert all((row == copy).all() for row, copy in rows[1::2])  # those of the last calls
sums = [row.sum() for row, _ in rows[::2]]  # of calls before them: other numbers, but no crash
del rows
gc.collect()
with load() as model:
    opened(model).decode_one(5)
""",
    "a cycle of garbage": """
for _ in range(3):
    model = load()
    context = opened(model)
    context.set_abort_callback(lambda c=context: c.closed)
    model.mine = {"context": context, "model": model}
    del model, context
    gc.collect()
""",
    "an abort callback that raises": """
model = load()
context = opened(model)
def fail():
    raise KeyError("mine")
context.set_abort_callback(fail)
refused(KeyError, lambda: context.decode([5] * 30))
context.set_abort_callback(lambda: True)
refused(ic.DecodeAbortedError, lambda: context.decode([5] * 30))
assert context.n_past() == context.n_resident() == len(context.tokens())
context.set_abort_callback(None)
context.decode([5] * 30)
assert context.n_past() >= 33
def interrupt():
    raise KeyboardInterrupt
context.set_abort_callback(interrupt)
refused(KeyboardInterrupt, lambda: context.decode([5] * 10))
context.set_abort_callback(None)
context.clear()
context.decode([5])
""",
    "a callback that uses or closes its context": """
model = load()
context = opened(model)
seen = []
def meddle():
    for call in (context.n_past, lambda: context.decode([5]), context.close):
        try:
            call()
        except ic.SessionBusyError:
            seen.append("busy")
    return False
context.set_abort_callback(meddle)
context.decode([5] * 8)
assert len(seen) >= 3, seen
assert context.n_past() == 11
""",
    "progress that raises or cancels": """
def fail(fraction):
    raise KeyError(fraction)
refused(KeyError, lambda: ic.load_model(path, backend=backend, progress=fail))
refused(ic.ModelLoadError, lambda: ic.load_model(path, backend=backend, progress=lambda f: False))
told = []
ic.load_model(path, backend=backend, progress=told.append).close()
assert told[-1] == 1.0
""",
    "a second thread": """
model = load()
context = opened(model)
outcomes = []
def work():
    for _ in range(200):
        try:
            context.decode([5])
            context.seq_remove(0, 3)
            outcomes.append("ok")
        except ic.SessionBusyError:
            outcomes.append("busy")
        except ic.ContextOverflowError:
            outcomes.append("full")
threads = [threading.Thread(target=work) for _ in range(3)]
[t.start() for t in threads]
[t.join() for t in threads]
assert len(outcomes) == 600 and "ok" in outcomes
assert context.n_past() == context.n_resident()
context.clear()
context.decode([5, 6, 7])
""",
    "closing while another thread decodes": """
for _ in range(5):
    model = load()
    context = model.new_context(**{**FIELDS, "n_ctx": 512, "n_batch": 16, "n_ubatch": 16})
    ended = []
    def work():
        try:
            while True:
                context.decode([5] * 400)
                context.clear()
        except ic.InferCoreError as error:
            ended.append(type(error).__name__)
    worker = threading.Thread(target=work)
    worker.start()
    while not context.output_serial:
        pass
    context.close()
    model.close()
    worker.join()
    assert ended[0] in ("DecodeAbortedError", "SessionClosedError"), ended
    assert context.closed
""",
    "exit with everything open": """
model = load()
context = opened(model)
session = model.new_session(**FIELDS)
session.ensure_prefix("Once")
stream = session.decode()
next(stream)
sampler = model.new_sampler()
cycle = [model]
cycle.append(cycle)
""",
    "exit in the middle of a decode": """
model = load()
context = model.new_context(**{**FIELDS, "n_ctx": 1024})
def work():
    try:
        while True:
            context.decode([5] * 900)
            context.clear()
    except (ic.DecodeAbortedError, ic.SessionClosedError):
        pass
threading.Thread(target=work, daemon=True).start()
while not context.output_serial:
    pass
""",
    "exit by an error": """
model = load()
context = opened(model)
def fail():
    raise SystemExit(0)
fail()
""",
}


@pytest.mark.parametrize("what", list(BODIES))
def test_nothing_crashes_and_nothing_is_said(backend_name: str, pack_path: Path, what: str) -> None:
    source = f"{START}{BODIES[what]}\nprint('done')\n"
    source = source.replace("\nfail()\n\nprint('done')", "\nprint('done')\nfail()")
    done = subprocess.run(
        [sys.executable, "-c", source, backend_name, str(pack_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
