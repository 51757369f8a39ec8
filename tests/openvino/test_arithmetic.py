"""The number format of products and sums: the engine's own choice, and what goes with it."""

from __future__ import annotations

import numpy as np
import pytest

import infercore as ic
from infercore_openvino import arithmetic, cpu, files, graph, settings
from infercore_openvino.engine import shared_core

FILES = files.ModelFiles("", "", "", has_cache=True, keys=((2, 32),), is_recurrent=False, n_state=0)
CHOICES = [
    ({}, "bf16", "bf16"),
    ({"type_k": "bf16"}, "bf16", "bf16"),
    ({"type_k": "u8", "type_v": "u8"}, "bf16", "u8"),
    ({"type_k": "f16"}, "f32", "f16"),
    ({"type_v": "f32"}, "f32", "f32"),
    ({"type_k": "f16", "precision": "accurate"}, "f32", "f16"),
]


@pytest.fixture
def in_bfloat16(monkeypatch) -> None:
    """Be a processor on which the engine computes in bfloat16 unless told otherwise."""
    monkeypatch.setattr(arithmetic, "default_inference", lambda _: "bf16")
    monkeypatch.setattr(cpu, "divides_by_zero", lambda *_: False)


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize(("fields", "inference", "kind"), CHOICES)
def test_a_type_of_cache_that_needs_float32_gets_it(fields, inference, kind) -> None:
    found = settings.settings(ic.ContextConfig(n_ctx=64, **fields), FILES)
    assert (found.inference, found.kv_type) == (inference, kind)
    assert kind in found.kv_types


@pytest.mark.usefixtures("in_bfloat16")
def test_a_type_that_goes_with_no_format_together_with_the_other_is_refused() -> None:
    for fields in (
        {"type_k": "bf16", "type_v": "f16"},
        {"type_k": "bf16", "precision": "accurate"},
        {"type_k": "f16", "backend_options": {"inference_precision": "bf16"}},
    ):
        with pytest.raises(ic.UnsupportedFeatureError) as caught:
            settings.settings(ic.ContextConfig(n_ctx=64, **fields), FILES)
        assert caught.value.feature in {"type_k", "type_v"}


def test_hidden_states_as_an_output_change_no_bit_of_the_logits(ov_path) -> None:
    """In bfloat16 the engine kept the sums of all layers in float32 for them."""
    core, found = shared_core(), files.find(str(ov_path))
    inference = arithmetic.default_inference("CPU")
    if inference == "bf16" and cpu.divides_by_zero(inference, None, None):
        inference = "f32"
    properties = {"INFERENCE_PRECISION_HINT": inference}
    rows = []
    for has_output in (True, False):
        model = graph.build(core, found, "stateful", str(ov_path)).model
        if not has_output:
            result = model.output("hidden").node
            model.remove_result(result)
        request = core.compile_model(model, "CPU", properties).create_infer_request()
        inputs = {
            "input_ids": np.array([[5, 6, 7, 8]]),
            "attention_mask": np.ones((1, 4), dtype=np.int64),
            "position_ids": np.arange(4)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
            "out_rows": np.arange(4),
            "hidden_rows": np.empty(0, dtype=np.int64),
        }
        known = {name for port in request.model_inputs for name in port.get_names()}
        request.infer({name: value for name, value in inputs.items() if name in known})
        rows.append(np.array(request.get_output_tensor(0).data))
    assert np.array_equal(*rows)
