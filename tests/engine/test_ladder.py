from __future__ import annotations

import attrs
import pytest

from infercore.engine import ladder
from infercore.engine.ladder import allocate
from infercore.errors import OutOfMemoryError, UnsupportedFeatureError
from infercore.values.config import ContextConfig
from infercore.values.info import Capabilities, MemoryPlan

KINDS = Capabilities(kv_types=("f32", "f16", "q8_0"))


def maker(fits):
    asked = []

    def make(config):
        asked.append(config)
        if not fits(config):
            raise OutOfMemoryError("no memory")
        return "context"

    return make, asked


def test_what_fits_is_tried_once():
    make, asked = maker(lambda _: True)
    inner, config, attempts = allocate(make, ContextConfig(n_ctx=512), KINDS)
    assert (inner, asked) == ("context", [config])
    assert [attempt.error for attempt in attempts] == [None]


def test_by_default_nothing_is_given_up():
    make, asked = maker(lambda _: False)
    with pytest.raises(OutOfMemoryError, match="on_oom='shrink'") as caught:
        allocate(make, ContextConfig(n_ctx=512), KINDS)
    assert len(asked) == len(caught.value.attempts) == 1
    assert isinstance(caught.value.__cause__, OutOfMemoryError)


def test_shrinking_gives_up_step_by_step():
    make, asked = maker(lambda _: False)
    config = ContextConfig(n_ctx=1024, n_ubatch=128, on_oom="shrink", n_ctx_min=256)
    with pytest.raises(OutOfMemoryError) as caught:
        allocate(make, config, KINDS)
    steps = [(c.n_ubatch, c.type_k, c.n_ctx) for c in asked]
    assert steps == [
        (128, None, 1024),
        (64, None, 1024),
        (64, "q8_0", 1024),
        (64, "q8_0", 512),
        (64, "q8_0", 256),
    ]
    assert [a.n_ctx for a in caught.value.attempts] == [1024, 1024, 1024, 512, 256]


def test_the_first_that_fits_is_taken_and_the_failures_reported():
    make, _ = maker(lambda config: config.n_ctx <= 512)
    config = ContextConfig(n_ctx=1024, n_ubatch=64, on_oom="shrink")
    _, got, attempts = allocate(make, config, Capabilities())
    assert got.n_ctx == 512
    assert got.type_k is None
    assert [attempt.error for attempt in attempts] == ["no memory", None]


@pytest.mark.parametrize(
    ("fields", "smaller"),
    [
        ({"type_k": "f32", "type_v": "f32"}, "f16"),
        ({"flash_attn": "off"}, None),
        ({"type_k": "q8_0", "type_v": "q8_0"}, "q8_0"),
    ],
)
def test_the_kv_type_shrinks_only_to_what_the_engine_has(fields, smaller):
    make, asked = maker(lambda _: False)
    config = ContextConfig(n_ctx=64, n_ubatch=64, on_oom="shrink", **fields)
    with pytest.raises(OutOfMemoryError):
        allocate(make, config, KINDS)
    assert asked[-1].type_v == smaller


def test_other_errors_pass():
    def make(_):
        raise UnsupportedFeatureError(feature="x")

    with pytest.raises(UnsupportedFeatureError):
        allocate(make, ContextConfig(on_oom="shrink"), KINDS)


def plan(config):
    """A token takes a thousand bytes; weights do not count, as they are there already."""
    return MemoryPlan(
        weights_bytes=10**12,
        kv_bytes=1000 * config.n_ctx,
        compute_bytes=0,
        peak_bytes=10**12,
        n_ctx=config.n_ctx,
        kv_bytes_by_kind={"full": 1000 * config.n_ctx},
    )


def test_the_ladder_ends_at_what_the_machine_can_hold(monkeypatch):
    """Also where the engine is granted everything, and only killed for filling it."""
    monkeypatch.setattr(ladder, "free_bytes", lambda **_: 1_000_000)
    make, asked = maker(lambda _: True)
    config = ContextConfig(n_ctx=2**31 - 1, n_ubatch=64, on_oom="shrink")
    _, got, attempts = allocate(make, config, Capabilities(), plan)
    assert [c.n_ctx for c in asked] == [got.n_ctx]
    assert 450 < got.n_ctx <= 900  # a tenth is left
    assert "are free" in attempts[0].error
    assert len(attempts) > 20
    with pytest.raises(OutOfMemoryError, match="are free"):
        allocate(make, ContextConfig(n_ctx=2**27), Capabilities(), plan)
    with pytest.raises(OutOfMemoryError) as caught:
        allocate(make, ContextConfig(n_ctx=2**20, on_oom="shrink", n_ctx_min=2**19),
                 Capabilities(), plan)  # fmt: skip
    assert all("are free" in attempt.error for attempt in caught.value.attempts)


def test_the_ladder_counts_what_a_step_takes_beside_the_cache(monkeypatch):
    monkeypatch.setattr(ladder, "free_bytes", lambda **_: 1_000_000)
    make, asked = maker(lambda _: True)
    config = ContextConfig(n_ctx=1024, n_ctx_min=64, n_ubatch=64, on_oom="shrink")
    allocate(make, config, Capabilities(), lambda c: attrs.evolve(plan(c), compute_bytes=700_000))
    assert [c.n_ctx for c in asked] == [128]


def test_a_usual_window_is_not_planned_first():
    def never(_):
        raise AssertionError

    make, _ = maker(lambda _: True)
    allocate(make, ContextConfig(n_ctx=4096), KINDS, never)
