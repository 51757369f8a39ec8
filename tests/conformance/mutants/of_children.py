"""Wrong in another process: source that is run there before anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conformance.mutants import breaks

HERE = "INFERCORE_TEST_SITE"

IGNORES_FILES = """
from infercore.session.session import CoreSession
CoreSession.load = lambda self, path: self.ensure_prefix("something else")
"""
SURVIVES_FORKS = """
from infercore.engine.gate import Gate
enter = Gate.__enter__
def entered(self):
    from infercore.engine import gate
    self._born = gate._forks
    return enter(self)
Gate.__enter__ = entered
"""
COMPLAINS = """
import atexit, sys
atexit.register(lambda: print("contexts were leaked", file=sys.stderr))
"""
ENDS_UNDER_A_THREAD = """
import atexit, sys, threading
from infercore.testing.reference_context import ReferenceContext
decode, beside = ReferenceContext.decode, set()
def decoded(self, *args, **fields):
    if threading.current_thread().daemon:
        beside.add(self)
    decode(self, *args, **fields)
ReferenceContext.decode = decoded
atexit.register(lambda: beside and print("terminated in mid-decode", file=sys.stderr))
"""
ENDS_WHERE_MEMORY_ENDS = """
import os, resource
from infercore.testing.reference_model import ReferenceModel
new_context = ReferenceModel.new_context
def opened(self, config):
    if resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY:
        os._exit(134)
    return new_context(self, config)
ReferenceModel.new_context = opened
"""
COUNTS_ALL_PROCESSORS = """
from infercore.testing.reference_model import ReferenceModel
new_context = ReferenceModel.new_context
def opened(self, config):
    context = new_context(self, config)
    if config.n_threads is None:
        context.set_threads(64, 64)
    return context
ReferenceModel.new_context = opened
"""


def before_all(m: Any, source: str) -> None:
    """Let other processes run ``source`` first."""
    import os

    folder = Path(os.environ[HERE])
    (folder / "sitecustomize.py").write_text(source)
    m.setenv("PYTHONPATH", str(folder))


@breaks("STATE-23", base="child")
def another_process_ignores_the_file(m: Any) -> None:
    before_all(m, IGNORES_FILES)


@breaks("THREAD-6", base="child")
def a_forked_child_goes_on(m: Any) -> None:
    before_all(m, SURVIVES_FORKS)


@breaks("THREAD-7", base="child")
def an_exit_complains(m: Any) -> None:
    before_all(m, COMPLAINS)


@breaks("THREAD-7", base="child")
def an_exit_does_not_wait_for_threads(m: Any) -> None:
    before_all(m, ENDS_UNDER_A_THREAD)


@breaks("MEM-15", base="child")
def a_process_ends_where_memory_does(m: Any) -> None:
    before_all(m, ENDS_WHERE_MEMORY_ENDS)


@breaks("THREAD-14", base="child")
def threads_are_of_all_processors(m: Any) -> None:
    before_all(m, COUNTS_ALL_PROCESSORS)
