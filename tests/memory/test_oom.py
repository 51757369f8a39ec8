"""A real failure to allocate, in a child whose address space is limited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

resource = pytest.importorskip("resource", reason="address space can be limited on Unix only")

SOURCE = """
import json, resource, sys
import infercore as ic, psutil
backend, path, on_oom, room, trusting = sys.argv[1:]
FIELDS = {"n_threads": 1, "n_threads_batch": 1} if backend == "llamacpp" else {"type_k": "f16"}
if trusting == "yes":
    import infercore_llamacpp.model
    infercore_llamacpp.model.free_bytes = lambda **_: 2**62
model = ic.load_model(path, backend=backend)
small = model.new_context(n_ctx=64, **FIELDS)
small.decode([5, 6, 7])
now = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (now + int(room), resource.RLIM_INFINITY))
told = {}
try:
    context = model.new_context(n_ctx=2**18, n_ctx_min=1024, on_oom=on_oom, **FIELDS)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    context.decode([5] * 600)
    told["attempts"] = [[a.n_ctx, a.n_ubatch, a.type_k, a.error] for a in context.attempts]
    told["effective"] = {k: context.effective[k] for k in ("n_ctx", "n_ubatch", "type_k", "type_v")}
    told["n_ctx"], told["config"] = context.n_ctx, context.config.n_ctx
    context.close()
except ic.OutOfMemoryError as error:
    told["error"], told["state"] = str(error), error.state_after
    told["attempts"] = [[a.n_ctx, a.n_ubatch, a.type_k, a.error] for a in error.attempts]
    told["notes"] = getattr(error.__cause__, "__notes__", [])
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
small.decode_one(8)
told["small"] = small.n_past()
print(json.dumps(told))
"""
ROOM = 96 * 2**20
# Threads that meet in malloc would have arenas of their own, for each of which it reserves 64 MiB.
ENVIRONMENT = {**os.environ, "MALLOC_ARENA_MAX": "1"}


def run(backend: str, path: Path, on_oom: str, trusting: str = "no") -> dict[str, Any]:
    """Run the source; ``trusting`` leaves it to the engine to find out that memory is short."""
    command = [sys.executable, "-c", SOURCE, backend, str(path), on_oom, str(ROOM), trusting]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env=ENVIRONMENT
    )
    assert (done.returncode, done.stderr) == (0, "")
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["small"] == 4  # what was open before goes on
    return told


def test_without_a_ladder_it_is_a_typed_error(backend_name: str, pack_path: Path) -> None:
    told = run(backend_name, pack_path, "raise")
    assert told["state"] == "unchanged"
    ((n_ctx, _, _, why),) = told["attempts"]
    assert n_ctx == 2**18
    assert why
    assert "on_oom='shrink'" in told["error"]


def test_the_ladder_ends_at_what_fits_and_tells_the_steps(
    backend_name: str, pack_path: Path
) -> None:
    told = run(backend_name, pack_path, "shrink")
    *failed, (n_ctx, n_ubatch, type_k, none) = told["attempts"]
    assert none is None
    assert all(why for *_, why in failed)
    assert [a[1] for a in failed[:4]] == [None, 256, 128, 64]
    assert 1024 <= n_ctx == told["n_ctx"] == told["config"] < 2**18
    assert n_ubatch == 64 == told["effective"]["n_ubatch"]
    assert told["effective"]["n_ctx"] >= n_ctx
    if backend_name == "llamacpp":
        assert type_k == "q8_0" == told["effective"]["type_k"] == told["effective"]["type_v"]


def test_the_engines_own_failure_brings_its_words(backend_name: str, pack_path: Path) -> None:
    if backend_name != "llamacpp":
        pytest.skip("this engine says it in the exception itself")
    told = run(backend_name, pack_path, "raise", trusting="yes")
    assert any("allocate" in note for note in told["notes"])
