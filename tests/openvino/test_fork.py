"""A child of `os.fork` ends as any process does, although the engine has lost its threads there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import pack

SOURCE = """
import os, sys, time
import infercore as ic
path, how = sys.argv[1:]
model = ic.load_model(path, backend="openvino", check_in_child=False)
context = model.new_context(n_ctx=64)
context.decode([5, 6, 7])
session = model.new_session(n_ctx=64)
session.generate("Once", max_tokens=3)
child = os.fork()
if not child:
    if how == "inherited":
        try:
            context.decode([8])
        except ic.InvalidStateError:
            sys.exit(7)
    if how == "anew":
        with ic.load_model(path, backend="openvino", check_in_child=False) as own:
            own.new_context(n_ctx=64).decode([5, 6, 7])
    if how == "collected":
        import gc
        del context, session, model
        gc.collect()
    sys.exit(7)
for _ in range(600):
    if os.waitpid(child, os.WNOHANG)[0]:
        break
    time.sleep(0.05)
else:
    os.kill(child, 9)
    sys.exit("the child hangs")
context.decode([8])
assert context.n_past() == 4
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("how", ["at once", "inherited", "anew", "collected"])
def test_a_forked_child_ends(how) -> None:
    pack.need_backend("openvino")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SOURCE, str(pack.model_path("openvino")), how],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
