"""A pool's config: its fields and a context's, flat, and what cannot be meant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest

import infercore as ic
from infercore import ContextConfig, PoolConfig, UnsupportedFeatureError
from infercore.values.pool import pool_config, shared_context, with_shared_context

if TYPE_CHECKING:
    from pathlib import Path

REFUSED: list[tuple[str, Any]] = [
    ("n_parallel", 0),
    ("n_parallel", 257),
    ("n_parallel", None),
    ("n_parallel", True),
    ("n_cells", 0),
    ("n_step_tokens", 0),
    ("n_step_tokens", 1.5),
    ("max_step_ms", 0),
    ("max_step_ms", "fast"),
    ("max_waiting", -1),
    ("batching", "sometimes"),
    ("batching", None),
    ("batch_invariant", 1),
    ("cache_bytes", -1),
    ("cache_dir", ""),
    ("cache_dir", b"folder"),
    ("cache_dir", "a\0b"),
    ("cache_dir_bytes", None),
    ("reader_timeout", 0),
    ("reader_timeout", float("inf")),
    ("isolate", "yes"),
    ("step_timeout", 0),
    ("load_timeout", None),
    ("max_restarts", -1),
    ("restart_window", float("nan")),
    ("context", {"n_ctx": 5}),
    ("n_seq_max", 2),
    ("pooling_type", "mean"),
    ("n_ctx", -1),
]


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_a_bad_value_is_refused_with_its_field(field: str, value: object) -> None:
    with pytest.raises(ic.InvalidInputError) as caught:
        pool_config(None, {field: value})
    assert caught.value.field == field


def test_defaults_are_the_documented_ones() -> None:
    config = ic.PoolConfig()
    assert attrs.asdict(config, recurse=False) == {
        "n_parallel": 8,
        "n_cells": None,
        "n_step_tokens": None,
        "max_step_ms": None,
        "max_waiting": 1024,
        "batching": "auto",
        "batch_invariant": False,
        "cache_bytes": 0,
        "cache_dir": None,
        "cache_dir_bytes": 10 * 2**30,
        "reader_timeout": None,
        "isolate": False,
        "step_timeout": 60.0,
        "load_timeout": 600.0,
        "max_restarts": 3,
        "restart_window": 600.0,
        "context": ic.ContextConfig(),
    }


def test_fields_of_pool_and_context_are_given_side_by_side(tmp_path: Path) -> None:
    config = pool_config(None, {"n_parallel": 2, "n_ctx": 256, "cache_dir": tmp_path})
    assert (config.n_parallel, config.context.n_ctx) == (2, 256)
    assert config.cache_dir == str(tmp_path)
    other = pool_config(config, {"n_threads": 1})
    assert (other.n_parallel, other.context.n_ctx, other.context.n_threads) == (2, 256, 1)


def test_fields_are_laid_over_a_context_that_is_given_with_them() -> None:
    given = ic.ContextConfig(n_ctx=64, n_threads=1)
    config = pool_config(None, {"context": given, "n_ctx": 128})
    assert (config.context.n_ctx, config.context.n_threads) == (128, 1)


@pytest.mark.parametrize(("wrong", "near"), [("n_paralel", "n_parallel"), ("nctx", "n_ctx")])
def test_an_unknown_field_names_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(ic.InvalidInputError, match=near):
        pool_config(None, {wrong: 2})


def test_a_context_with_a_field_of_the_pool_is_refused() -> None:
    with pytest.raises(ic.InvalidInputError, match="n_parallel"):
        ic.PoolConfig(context=ic.ContextConfig(n_seq_max=3))


def test_one_window_must_fit_the_cells() -> None:
    with pytest.raises(ic.InvalidInputError, match="n_cells"):
        pool_config(None, {"n_cells": 127, "n_ctx": 128})
    assert pool_config(None, {"n_cells": 128, "n_ctx": 128}).n_cells == 128
    open_window = pool_config(None, {"n_cells": 128})
    with pytest.raises(ic.InvalidInputError, match="n_ctx=129"):
        open_window.check_window(129)


def test_a_step_fits_the_batch() -> None:
    with pytest.raises(ic.InvalidInputError, match="n_batch"):
        pool_config(None, {"n_step_tokens": 65, "n_batch": 64})


@pytest.mark.parametrize("other", [{"n_step_tokens": 64}, {"batch_invariant": True}])
def test_the_longest_step_goes_with_nothing_else_that_cuts_prompts(other: dict[str, Any]) -> None:
    with pytest.raises(ic.InvalidInputError, match=next(iter(other))) as caught:
        pool_config(None, {"max_step_ms": 100.0, **other})
    assert caught.value.field == "max_step_ms"


def test_batch_invariant_never_batches() -> None:
    with pytest.raises(ic.InvalidInputError) as caught:
        ic.PoolConfig(batch_invariant=True, batching="always")
    assert caught.value.field == "batching"


@pytest.mark.parametrize(("n_cells", "n_places"), [(None, 4), (2000, 4), (700, 2), (256, 1)])
def test_places_with_caches_of_their_own_are_as_many_as_the_cells_have_room_for(
    n_cells: int | None, n_places: int
) -> None:
    def refuses(wanted: ContextConfig) -> ContextConfig:
        if wanted.kv_unified:
            raise UnsupportedFeatureError(feature="kv_unified=True", backend="some")
        return wanted

    pool = PoolConfig(n_parallel=4, n_cells=n_cells, context=ContextConfig(n_ctx=256))
    found = with_shared_context(shared_context(pool, 256), pool, 256, refuses)
    assert (found.n_seq_max, found.n_ctx) == (n_places, n_places * 256)
    for apart in ({"kv_unified": False}, {"batch_invariant": True}):
        own = pool_config(pool, apart)
        wanted = shared_context(own, 256)
        assert (wanted.n_seq_max, wanted.n_ctx, wanted.kv_unified) == (n_places, found.n_ctx, False)
    asked = attrs.evolve(pool, context=attrs.evolve(pool.context, kv_unified=True))
    with pytest.raises(UnsupportedFeatureError):
        with_shared_context(shared_context(asked, 256), asked, 256, refuses)
