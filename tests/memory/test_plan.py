"""What `plan_memory` says beforehand is what loading and decoding take, within 15 %.

Of a model of a few megabytes an engine's fixed costs weigh more than the weights, and buffers are
taken from the system only as far as they are used. So on the pack the cache alone is compared,
with what opening a context takes (llama.cpp writes to all of it then) or with the arrays that
hold it (OpenVINO). Of a model of a real shape everything is: weights, cache and buffers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import infercore as ic

NEAR = 0.15
N_CTX = 65536
START = """
import json, sys
import infercore as ic, psutil
path, small, fields = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
def rss():
    return psutil.Process().memory_info().rss
warm = ic.load_model(small, backend="llamacpp")
with warm.new_context(**{**fields, "n_ctx": 64}) as context:
    context.decode([5] * 60)  # what the engine allocates once for ever
"""
OPENING = """
start = rss()
with warm.new_context(**fields):
    print(rss() - start)
"""
WHOLE = """
start = rss()
with ic.load_model(path, backend="llamacpp") as model, model.new_context(**fields) as context:
    context.decode([5 + i % 90 for i in range(600)])
    for token in range(5, 15):
        context.decode_one(token)
    print(rss() - start)
"""


def taken(body: str, path: Path, small: Path, fields: dict[str, Any]) -> int:
    """Return the bytes that a child process took while it ran ``body``."""
    command = [sys.executable, "-c", START + body, str(path), str(small), json.dumps(fields)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=590)
    return int(done.stdout)


def near(planned: int, measured: int) -> bool:
    return abs(planned - measured) < NEAR * measured


@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_the_cache_on_the_pack(backend_name: str, pack_path: Path, model: Any, kind: str) -> None:
    fields: dict[str, Any] = {"n_ctx": N_CTX, "type_k": kind, "type_v": kind}
    plan = ic.plan_memory(pack_path, backend=backend_name, **fields)
    if backend_name == "llamacpp":
        fields |= {"n_threads": 1, "n_threads_batch": 1}
        measured = taken(OPENING, pack_path, pack_path, fields)
    else:
        with model.new_context(**fields) as context:
            measured = context._inner._cache.n_bytes
    assert near(plan.kv_bytes, measured), (plan, measured)


def test_the_parts_are_what_the_shape_says(backend_name: str, pack_path: Path, model: Any) -> None:
    info = model.info
    head = info.n_embd // info.n_head
    for n_ctx in (1024, N_CTX):
        plan = ic.plan_memory(pack_path, backend=backend_name, n_ctx=n_ctx, type_k="f16")
        assert near(plan.kv_bytes, 2 * n_ctx * info.n_layer * info.n_head_kv * head * 2)
        assert plan.kv_bytes == sum(plan.kv_bytes_by_kind.values())
        assert near(plan.weights_bytes, info.size_bytes)
        assert plan.peak_bytes >= plan.total_bytes
        assert plan.n_ctx == n_ctx


def test_a_model_that_is_loaded_plans_the_same(
    backend_name: str, pack_path: Path, model: Any
) -> None:
    before = ic.plan_memory(pack_path, backend=backend_name, n_ctx=2048)
    after = model.plan_memory(n_ctx=2048)
    assert (before.weights_bytes, before.kv_bytes) == (after.weights_bytes, after.kv_bytes)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_of_half_a_billion(backend_name: str, pack_path: Path, tmp_path: Path) -> None:
    if backend_name != "llamacpp":
        pytest.skip("a model of this format takes a converter of its own to write")
    pytest.importorskip("gguf", reason="writes the model")
    script = Path(__file__).parents[2] / "benchmarks" / "make_model.py"
    if not script.is_file():
        pytest.skip("the benchmarks are not beside these tests")
    command = [sys.executable, str(script), str(tmp_path), "--no-ir"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    path = tmp_path / "0.5b-q8_0.gguf"
    fields = {"n_ctx": 2048, "n_threads": 2, "n_threads_batch": 2}
    plan = ic.plan_memory(path, **fields)
    measured = taken(WHOLE, path, pack_path, fields)
    assert near(plan.total_bytes, measured), (plan, measured)
