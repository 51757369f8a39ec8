"""The largest window that memory has room for."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from infercore.engine import ladder, window

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def needs_of(model: Any, exact: dict[str, Any]) -> Callable[[int], int]:
    def needs(n_ctx: int) -> int:
        plan = model.plan_memory(n_ctx=n_ctx, **exact)
        return int(plan.kv_bytes + plan.compute_bytes)

    return needs


def test_less_where_memory_is_short(
    model: Any, exact: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs, trained = needs_of(model, exact), model.info.n_ctx_train
    assert needs(300) < needs(trained)
    free = (needs(300) + needs(trained)) // 2
    monkeypatch.setattr(window, "free_bytes", lambda: free * 10 // 9 + 10)
    with model.new_context(n_ctx="fit", **exact) as context:
        n_ctx = context.n_ctx
        assert 256 <= n_ctx < trained
        assert needs(n_ctx) <= free + 10
        assert needs(min(trained, n_ctx + 192)) > free
    assert model.plan_memory(n_ctx="fit", **exact).n_ctx == n_ctx
    monkeypatch.setattr(window, "free_bytes", lambda: 1000)
    with pytest.raises(ic.OutOfMemoryError, match="n_ctx_min"):
        model.new_context(n_ctx="fit", **exact)


def test_a_pool_has_as_many_cells_as_memory_has_room_for(
    model: Any, exact: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs, trained = needs_of(model, exact), model.info.n_ctx_train
    for n_tokens in (trained // 2, 3 * trained):
        room = needs(n_tokens)
        monkeypatch.setattr(window, "free_bytes", lambda room=room: room * 10 // 9 + 10)
        for fields in ({}, {"cache_bytes": 2**20}):
            with model.new_pool(n_ctx="fit", n_parallel=8, **fields, **exact) as pool:
                n_ctx, n_cells = pool.open_session().explain_context().n_ctx, pool.stats().n_cells
                assert n_ctx <= n_cells <= n_tokens + 256
                assert n_ctx == trained or n_tokens < trained


def test_a_pool_of_given_windows_has_no_more_cells_than_memory_has_room_for(
    model: Any, exact: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    n_ctx, most = 128, 4 * 128
    room = needs_of(model, exact)(300)
    assert room < needs_of(model, exact)(most)
    for free, ends in ((room, (n_ctx, 300 + 64)), (2**60, (most, most)), (0, (n_ctx, n_ctx))):
        monkeypatch.setattr(window, "free_bytes", lambda free=free: free * 10 // 9 + 10)
        asked = {"n_ctx": n_ctx, "n_parallel": 4, **exact}
        with model.new_pool(**asked) as pool:
            assert ends[0] <= pool.stats().n_cells <= ends[1]
            assert pool.effective["n_cells"] == pool.stats().n_cells
            assert pool.effective["n_ctx"] == n_ctx
            assert model.plan_memory(**asked).n_ctx == pool.stats().n_cells
    monkeypatch.setattr(window, "free_bytes", lambda: 0)
    for fixed in ({"n_cells": most}, {"batch_invariant": True}, {"kv_unified": False}):
        with model.new_pool(**asked, **fixed) as pool:
            assert pool.stats().n_cells == most


@pytest.mark.parametrize("n_ctx", [128, "fit"])
def test_a_pool_of_a_path_asks_memory_too(
    pack_path: Path,
    backend_name: str,
    model: Any,
    exact: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    n_ctx: Any,
) -> None:
    room = needs_of(model, exact)(300)
    monkeypatch.setattr(window, "free_bytes", lambda: room * 10 // 9 + 10)
    asked = {"n_ctx": n_ctx, "n_parallel": 4, **exact}
    with model.new_pool(**asked) as pool:
        expected = pool.effective["n_ctx"], pool.stats().n_cells
    with ic.open_pool(pack_path, backend=backend_name, **asked) as pool:
        assert (pool.effective["n_ctx"], pool.stats().n_cells) == expected


def test_a_pool_that_was_shrunk_has_windows_that_fit_its_cells(
    model: Any, exact: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"type_k": "f16", "type_v": "f16", "n_ubatch": 64, "n_seq_max": 8}
    smaller = {**exact, **kinds, "kv_unified": True}
    needs = needs_of(model, smaller)
    room = (needs(256) + needs(512)) // 2
    monkeypatch.setattr(ladder, "free_bytes", lambda **_: room * 10 // 9 + 10)
    with model.new_pool(n_ctx=512, n_parallel=2, on_oom="shrink", **exact) as pool:
        n_cells = pool.stats().n_cells
        assert n_cells < 512
        session = pool.open_session()
        assert pool.effective["n_ctx"] == session.explain_context().n_ctx == n_cells
        with pytest.raises(ic.ContextOverflowError) as caught:
            session.ensure_prefix([5] * (n_cells + 1))
        assert (caught.value.stage, caught.value.n_ctx) == ("prefix", n_cells)


def test_a_pool_opens_though_its_models_file_is_gone(
    pack_path: Path, backend_name: str, tmp_path: Path
) -> None:
    copied = tmp_path / pack_path.name
    (shutil.copytree if pack_path.is_dir() else shutil.copy)(pack_path, copied)
    with ic.load_model(copied, backend=backend_name) as model:
        copied.rename(tmp_path / "elsewhere")
        with model.new_pool(n_ctx=64, n_parallel=2) as pool:
            assert pool.stats().n_cells == 2 * 64


def test_before_loading(pack_path: Path, backend_name: str) -> None:
    plan = ic.plan_memory(pack_path, n_ctx="fit", backend=backend_name)
    assert plan.n_ctx == ic.plan_memory(pack_path, n_ctx=0, backend=backend_name).n_ctx


def test_a_pool_takes_it_where_its_sessions_share_their_cells(
    model: Any, exact: dict[str, Any]
) -> None:
    for fields, n_ctx in (({}, model.info.n_ctx_train), ({"n_cells": 300}, 300)):
        with model.new_pool(n_ctx="fit", n_parallel=2, **fields, **exact) as pool:
            assert pool.open_session().explain_context().n_ctx == n_ctx
    for wrong in ({"batch_invariant": True}, {"kv_unified": False}):
        with pytest.raises(ic.InvalidInputError, match="n_ctx"):
            model.new_pool(n_ctx="fit", **wrong)
    for wrong_window in ("FIT", "", -1, 1.5):
        with pytest.raises(ic.InvalidInputError):
            ic.ContextConfig(n_ctx=wrong_window)  # type: ignore[arg-type]
