"""A container's quota of CPU time bounds the threads, on both engines."""

from __future__ import annotations

import pytest

import infercore as ic
from infercore_llamacpp import threads
from infercore_openvino import cpu, files, settings

NO_CONFIG = files.ModelFiles(
    "", "", "", has_cache=True, keys=((2, 32),), is_recurrent=False, n_state=0
)


@pytest.fixture(params=["one file", "two files"])
def grant(request, monkeypatch, tmp_path):
    """Grant CPU time, on a machine of eight cores."""
    monkeypatch.setattr(cpu, "_n_cores", lambda: 8)
    monkeypatch.setattr(threads, "_allowed_cpus", lambda: set(range(8)))
    monkeypatch.setattr(threads, "_physical_cores", len)
    one, old, period = (tmp_path / name for name in ("cpu.max", "quota", "period"))
    for module in (cpu, threads):
        for name, path in (("_QUOTA", one), ("_OLD_QUOTA", old), ("_OLD_PERIOD", period)):
            monkeypatch.setattr(module, name, path)

    def write(quota: int | None) -> None:
        if request.param == "one file":
            one.write_text(f"{'max' if quota is None else quota} 100000\n")
        else:
            old.write_text(f"{-1 if quota is None else quota}\n")
            period.write_text("100000\n")

    return write


@pytest.mark.parametrize(("quota", "n"), [(100_000, 1), (250_000, 3), (700_000, 7)])
def test_a_quota_below_the_cores_bounds_the_threads(grant, quota, n) -> None:
    grant(quota)
    found = settings.settings(ic.ContextConfig(n_ctx=64), NO_CONFIG)
    assert found.n_threads == found.properties["INFERENCE_NUM_THREADS"] == n
    assert threads.default_threads() == (n, n)


@pytest.mark.parametrize("quota", [None, 800_000, 5_000_000])
def test_without_a_bound_the_engine_chooses(grant, quota) -> None:
    grant(quota)
    assert cpu.granted_threads() is None
    assert threads.default_threads() == (8, 8)


def test_what_is_asked_for_goes_before_the_quota(grant) -> None:
    grant(100_000)
    config = ic.ContextConfig(n_ctx=64, n_threads=2)
    assert settings.settings(config, NO_CONFIG).n_threads == 2


@pytest.mark.parametrize(
    ("n_threads", "n_cores", "dies"), [(2, 1, True), (2, 2, False), (1, 4, True)]
)
def test_more_threads_than_cores_are_those_cores(monkeypatch, n_threads, n_cores, dies) -> None:
    """On a processor with a matrix unit, one thread a stream divides by zero in the engine."""
    monkeypatch.setattr(cpu, "_has_unit", lambda: True)
    monkeypatch.setattr(cpu, "_n_cores", lambda: n_cores)
    assert cpu.divides_by_zero("bf16", n_threads, None) is dies


@pytest.mark.parametrize(
    ("cores", "fields", "n_threads", "n_streams"),
    [
        (8, {"n_threads": 2}, 8, 4),
        (8, {"n_threads": 3}, 6, 2),
        (8, {"n_threads_batch": 1}, 4, 4),  # no more than four of them
        (8, {"n_threads": 8}, 8, None),
        (1, {"n_threads": 1}, 1, None),
        (8, {}, None, None),
        (8, {"n_threads": 2, "backend_options": {"num_streams": 2}}, 2, 2),
    ],
)
def test_contexts_in_threads_take_the_cores_that_one_leaves(
    monkeypatch, cores, fields, n_threads, n_streams
) -> None:
    monkeypatch.setattr(cpu, "_n_cores", lambda: cores)
    monkeypatch.setattr(cpu, "granted_threads", lambda: None)
    found = settings.settings(ic.ContextConfig(n_ctx=64, **fields), NO_CONFIG)
    assert found.properties.get("INFERENCE_NUM_THREADS") == n_threads
    assert found.properties.get("NUM_STREAMS") == n_streams
    assert found.n_threads == fields.get("n_threads", fields.get("n_threads_batch"))


def test_a_quota_bounds_them_as_well(grant) -> None:
    grant(300_000)
    config = ic.ContextConfig(n_ctx=64, n_threads=1)
    found = settings.settings(config, NO_CONFIG)
    assert found.properties["NUM_STREAMS"] == 3
