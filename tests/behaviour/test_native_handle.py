"""What the engine's own API takes."""

from __future__ import annotations

import pytest

import infercore as ic
import pack


def test_llamacpp_takes_its_handles():
    pack.need_backend("llamacpp")
    api = pytest.importorskip("llama_cpp")
    with (
        ic.load_model(pack.model_path("llamacpp"), backend="llamacpp") as model,
        model.new_context(n_ctx=256) as context,
    ):
        assert api.llama_n_ctx(context.native_handle) == 256
        assert api.llama_model_n_embd(model.native_handle) == model.info.n_embd


def test_openvino_takes_its_handles():
    pack.need_backend("openvino")
    ov = pytest.importorskip("openvino")
    with (
        ic.load_model(pack.model_path("openvino"), backend="openvino") as model,
        model.new_context(n_ctx=256) as context,
    ):
        assert isinstance(model.native_handle, ov.Model)
        context.decode([5, 6, 7])
        assert context.native_handle.get_output_tensor(0).shape[-1] == model.info.n_vocab
