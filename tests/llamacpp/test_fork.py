"""A forked child leaves the engine of its parent alone."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
import gc, os, sys, warnings
warnings.simplefilter("ignore")
import infercore as ic
from infercore_llamacpp.library import api

freed = []
for name in ("llama_free", "llama_model_free"):
    own = getattr(api, name)
    setattr(api, name, lambda handle, own=own, name=name: (freed.append(name), own(handle)))
model = ic.load_model(sys.argv[1], backend="llamacpp")
context = model.new_context(n_ctx=64, n_threads=1)
context.decode([5, 6, 7])
row = context.logits()
freed.clear()
child = os.fork()
if not child:
    context.close()
    model.close()
    del context, model, row
    gc.collect()
    os._exit(len(freed))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
context.decode([8])
assert context.n_past() == 4
del row
context.close()
model.close()
assert freed == ["llama_free", "llama_model_free"], freed
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="there is no fork here")
def test_what_the_parent_has_is_freed_by_the_parent(story_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SOURCE, str(story_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


ANEW = """
import os, sys, warnings
warnings.simplefilter("ignore")
import infercore as ic

def compute(model):
    context = model.new_context(n_ctx=64, n_threads=2)
    context.decode([5, 6, 7])

compute(ic.load_model(sys.argv[1], backend="llamacpp"))
child = os.fork()
if not child:
    compute(ic.load_model(sys.argv[1], backend="llamacpp", check_in_child=False))
    if not (grandchild := os.fork()):
        compute(ic.load_model(sys.argv[1], backend="llamacpp", check_in_child=False))
        os._exit(7)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="there is no fork here")
def test_a_child_computes_with_a_model_of_its_own(story_path: Path) -> None:
    """Before, it waited for the parent's threads of OpenMP, for good."""
    command = [sys.executable, "-c", ANEW, str(story_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
