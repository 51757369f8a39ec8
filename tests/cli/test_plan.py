"""``infercore plan`` adds up what a context will take, before anything is loaded."""

from __future__ import annotations

import json

import pytest

import infercore
import pack
from infercore.cli.inspecting import free_bytes

engines = pytest.mark.parametrize("engine", sorted(pack.FORMATS), indirect=True)


@engines
def test_sum_and_fit(run, engine) -> None:
    result = run("plan", engine.path, "--json", "--n-ctx", "512")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    parts = told["weights_bytes"] + told["kv_bytes"] + told["compute_bytes"]
    assert told["total_bytes"] == parts
    assert told["n_ctx"] == 512
    assert told["fits"] is True
    assert told["kv_bytes"] == infercore.plan_memory(engine.path, n_ctx=512).kv_bytes


@engines
def test_options_change_the_plan(run, engine) -> None:
    wide, narrow = (
        json.loads(run("plan", engine.path, "--json", "--type-k", kind, "--type-v", kind).stdout)
        for kind in ("f32", "f16")
    )
    assert wide["kv_bytes"] > narrow["kv_bytes"]


@engines
def test_fields_of_a_pool_count(run, engine) -> None:
    start = ("plan", engine.path, "--json", "--n-ctx", "128")
    for words, fields in (
        (("-np", "4"), {"n_parallel": 4}),
        (("--n-cells", "256", "--batch-invariant"), {"n_cells": 256, "batch_invariant": True}),
    ):
        result = run(*start, *words)
        assert result.exit_code == 0, result.stderr
        planned = infercore.plan_memory(engine.path, n_ctx=128, **fields)
        assert json.loads(result.stdout)["kv_bytes"] == planned.kv_bytes
    alone = json.loads(run(*start).stdout)["kv_bytes"]
    assert json.loads(run(*start, "-np", "4").stdout)["kv_bytes"] > alone
    wrong = run(*start, "--n-parallel", "0")
    assert (wrong.exit_code, "--n-parallel" in wrong.stderr) == (2, True)


@engines
def test_fields_of_the_model_count_too(run, engine, tmp_path) -> None:
    """As loading does: a GPU that is not there is refused, by both in the same words."""
    start = (engine.path, "--backend", engine.name)
    for refused in (("--main-gpu", "200"), ("--device", "TPU9"), ("--option", "odd=1")):
        planned, loaded = run("plan", *start, *refused), run("inspect", *start, *refused)
        assert (planned.exit_code, planned.stdout) == (1, "")
        assert planned.stderr.split(";")[0] == loaded.stderr.split(";")[0]
    if engine.name == "llamacpp":
        window = '--option=kv_overrides={"llama.context_length": 64}'
        result = run("plan", *start, window, "--n-ctx", "0", "--json")
        assert json.loads(result.stdout)["n_ctx"] == 64
    else:
        cache = ("--option", f"cache_dir={tmp_path}", "--option", "form=stateful")
        assert run("plan", *start, *cache).exit_code == 0


@engines
def test_table(run, engine) -> None:
    result = run("plan", engine.path, "--n-ctx", "512", "--backend", engine.name)
    assert result.exit_code == 0, result.stderr
    for part in ("weights", "KV cache, full", "compute", "sum", "peak", "free now"):
        assert part in result.stdout
    assert "fits: n_ctx 512" in result.stdout
    trained = infercore.plan_memory(engine.path, n_ctx=0, backend=engine.name).n_ctx
    result = run("plan", engine.path, "--n-ctx", "fit", "--backend", engine.name)
    assert f"fits: n_ctx {trained}" in result.stdout
    result = run("plan", engine.path, "--n-ctx", "some", "--backend", engine.name)
    assert (result.exit_code, "neither a number of tokens nor fit" in result.stderr) == (2, True)


def test_too_little_memory_is_told(run, machine, monkeypatch) -> None:
    plan = infercore.MemoryPlan(
        weights_bytes=2**30, kv_bytes=2**20, compute_bytes=0, peak_bytes=2**30, n_ctx=64
    )
    monkeypatch.setitem(vars(infercore), "plan_memory", lambda *_, **__: plan)
    monkeypatch.setattr("infercore.cli.inspecting.free_bytes", lambda: 2**29)
    result = run("plan", "model.gguf")
    assert result.exit_code == 1
    assert "DOES NOT FIT: n_ctx 64, peak 1,024.0 MiB of 512.0 MiB free" in result.stdout
    assert json.loads(run("plan", "model.gguf", "--json").stdout)["fits"] is False


def test_free_memory_is_a_count_of_bytes() -> None:
    assert 2**20 < free_bytes() < 2**50


def test_memory_that_a_container_may_take_back_is_free(monkeypatch, tmp_path) -> None:
    files = {
        "memory.max": "3000",
        "memory.current": "2500",
        "memory.stat": "anon 1\ninactive_file 2000",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr("infercore.values.memory._CGROUP", tmp_path)
    assert free_bytes() == 2500
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes() > 2**20


def test_backend_that_cannot_tell(run, reference) -> None:
    result = run("plan", reference.path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "plan_memory is not supported" in result.stderr


@engines
def test_a_window_that_no_machine_holds(run, engine) -> None:
    result = run("plan", engine.path, "--n-ctx", "2000000000", "--json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.output)
    assert found["n_ctx"] == 2_000_000_000
    assert not found["fits"]
