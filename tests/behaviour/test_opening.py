"""A session on a path: each field and option reaches the part that it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic

if TYPE_CHECKING:
    from pathlib import Path

TINY = {"n_ctx": 64}


def test_options_of_the_model_reach_the_model(
    backend_name: str, pack_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {
        "llamacpp": {"use_extra_bufts": False, "kv_overrides": {"llama.context_length": 77}},
        "openvino": {"cache_dir": str(tmp_path / "cache"), "inference_precision": "f32"},
    }[backend_name]
    with ic.open_session(pack_path, backend_options=given, **TINY) as session:
        session.ensure_prefix("Once upon a time")
        if backend_name == "llamacpp":
            assert session.model.info.n_ctx_train == 77
        else:
            assert list((tmp_path / "cache").iterdir())
            assert session.context.effective["inference_precision"] == "f32"


def test_an_option_of_the_context_reaches_the_context(
    backend_name: str, pack_path: Path, model: Any
) -> None:
    if backend_name == "llamacpp":
        pytest.skip("llama.cpp has no options of a context beside the fields of ContextConfig")
    options = {"form": "stateful"}
    config = ic.ContextConfig(n_ctx=64, n_batch=8)
    with ic.open_session(pack_path, config=config, backend_options=options) as session:
        assert session.context.effective["form"] == "stateful"
        assert (session.context.n_ctx, session.context.n_batch) == (64, 8)
    with ic.open_session(model, backend_options=options, **TINY) as session:
        assert session.context.effective["form"] == "stateful"


@pytest.mark.parametrize("wrong", ["use_extra_buft", "cache_dirr", "froms", "zzz"])
def test_an_unknown_option_is_refused_before_anything_is_loaded(
    backend_name: str, pack_path: Path, wrong: str
) -> None:
    loaded: list[float] = []
    with pytest.raises(ic.InvalidInputError, match=wrong) as caught:
        ic.open_session(pack_path, backend_options={wrong: 1}, progress=loaded.append, **TINY)
    assert caught.value.field == "backend_options"
    assert loaded == []
    nearest = {"llamacpp": "use_extra_buft", "openvino": "cache_dirr"}[backend_name]
    if wrong == nearest:
        assert "did you mean" in str(caught.value)


@pytest.mark.parametrize("wrong", [5, "form", ["form"]])
def test_options_that_are_no_mapping(pack_path: Path, wrong: Any) -> None:
    with pytest.raises(ic.InvalidInputError) as caught:
        ic.open_session(pack_path, backend_options=wrong)
    assert caught.value.field == "backend_options"


def test_an_option_of_the_model_is_too_late_for_a_context(backend_name: str, model: Any) -> None:
    late = {"llamacpp": "use_extra_bufts", "openvino": "cache_dir"}[backend_name]
    with pytest.raises(ic.InvalidInputError, match="load_model"):
        model.new_context(backend_options={late: False})


def test_the_devices_of_a_backend_come_with_their_memory(backend_name: str) -> None:
    (found,) = [info for info in ic.backends(devices=True) if info.name == backend_name]
    assert found.devices
    cpu = next(device for device in found.devices if device.kind == "cpu")
    assert cpu.memory_total_bytes is not None
    assert cpu.memory_total_bytes > 2**28
