"""Rotary positions: formulas, rotation, and constants that an export rounded."""

from __future__ import annotations

import json

import numpy as np
import pytest

import infercore as ic
import pack
from infercore_openvino import rope


def test_rotations_add_up_and_come_back() -> None:
    rng = np.random.default_rng(1)
    keys = rng.standard_normal((3, 5, 16), dtype=np.float32)
    inv_freq = rope.frequencies({"rope_theta": 10000.0}, 8)
    once = rope.rotate(keys, np.full((1, 5), 12), inv_freq)
    twice = rope.rotate(rope.rotate(keys, np.array(5), inv_freq), np.array(7), inv_freq)
    np.testing.assert_allclose(once, twice, atol=1e-5)
    back = rope.rotate(once, np.full((1, 5), -12), inv_freq)
    np.testing.assert_allclose(back, keys, atol=1e-5)


def test_what_is_not_rotated_stays() -> None:
    keys = np.ones((2, 12), dtype=np.float32)
    moved = rope.rotate(keys, np.array([0, 3]), np.array([1.0, 0.5], dtype=np.float32))
    np.testing.assert_array_equal(moved[0], keys[0])
    np.testing.assert_array_equal(moved[:, 4:], keys[:, 4:])


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"rope_theta": 500.0}, "default"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "default"),
        ({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_theta": 500.0, "rope_scaling": None}, "default"),
    ],
)
def test_configs_old_and_new(config, kind) -> None:
    found = rope.parameters(config)
    assert (found["rope_type"], found["rope_theta"]) == (kind, 500.0)
    expected = 500.0 ** (-np.arange(4) / 4) / (2 if kind == "linear" else 1)
    np.testing.assert_allclose(rope.frequencies(config, 4), expected, rtol=1e-6)


def test_llama3_keeps_fast_turns_and_slows_slow_ones() -> None:
    config = {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    plain = rope.frequencies({"rope_theta": 500000.0}, 64)
    scaled = rope.frequencies(config, 64)
    assert scaled[0] == plain[0]
    np.testing.assert_allclose(scaled[-1] * 8, plain[-1], rtol=1e-6)
    assert np.all(np.diff(scaled / plain) <= 1e-6)


@pytest.mark.parametrize("config", [{}, {"rope_theta": 1e4, "rope_scaling": {"type": "yarn"}}])
def test_unknown_scalings_have_no_formula(config) -> None:
    assert rope.frequencies(config, 4) is None


@pytest.mark.parametrize("form", ["paged", "stateful"])
def test_rounded_frequencies_are_made_exact(ov_path, copied, form, caplog) -> None:
    """Weights in float16 bring frequencies in float16, an error that grows with the position."""
    import openvino as ov
    from infercore_openvino import graph
    from infercore_openvino.engine import shared_core
    from infercore_openvino.files import find

    model = shared_core().read_model(ov_path / "openvino_model.xml")
    ov.save_model(model, copied / "openvino_model.xml", compress_to_fp16=True)
    exact = rope.frequencies(find(str(ov_path)).config, 16).astype(np.float32)
    assert not np.array_equal(exact, exact.astype(np.float16))
    found = graph.build(shared_core(), find(str(copied)), form, str(copied))
    np.testing.assert_array_equal(found.inv_freq, exact)
    (copied / "config.json").write_text("{}")
    rounded = graph.build(shared_core(), find(str(copied)), form, str(copied))
    np.testing.assert_array_equal(rounded.inv_freq, exact.astype(np.float16))
    assert "rounded to float16" in caplog.text


def test_a_half_precision_export_is_exact_at_far_positions(ov_path, copied, golden) -> None:
    import infercore as ic
    import openvino as ov
    from infercore_openvino.engine import shared_core

    prompt = max(golden.prompts, key=lambda p: len(p.tokens) + len(p.greedy))
    tokens = [*prompt.tokens, *prompt.greedy]
    model = shared_core().read_model(ov_path / "openvino_model.xml")
    ov.save_model(model, copied / "openvino_model.xml", compress_to_fp16=True)
    errors = []
    for config in (None, "{}"):
        if config is not None:
            (copied / "config.json").write_text(config)
        rows = []
        for path in (copied, ov_path):
            with (
                ic.load_model(path, backend="openvino") as one,
                one.new_context(n_ctx=512, type_k="f32") as context,
            ):
                context.decode(tokens)
                rows.append(np.array(context.logits()))
        errors.append(np.abs(rows[0] - rows[1]).max())
    assert errors[0] < errors[1]


YARN = {"rope_scaling_type": "yarn", "rope_freq_scale": 0.25}


@pytest.fixture(scope="module")
def llama_rows(story):
    """Return a function that gives llama.cpp's logits of the story with other frequencies."""
    pack.need_backend("llamacpp")
    with ic.load_model(pack.model_path("llamacpp"), backend="llamacpp") as model:
        yield lambda **fields: rows_of(model, story, **fields)


def rows_of(model, story, **fields):
    with model.new_context(**{**pack.EXACT, "n_ctx": 128, **fields}) as context:
        context.decode(story[:60], logits="all")
        return np.array(context.logits_all())


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_freq_base": 5000.0},
        {"rope_freq_scale": 0.5},
        {"rope_scaling_type": "linear", "rope_freq_scale": 0.5, "rope_freq_base": 20_000.0},
        {"yarn_attn_factor": 0.8},
        {"yarn_ext_factor": 0.5, "rope_freq_scale": 0.5},
        YARN,
        {**YARN, "yarn_orig_ctx": 128},
        {**YARN, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0, "rope_freq_base": 5000.0},
    ],
)
def test_other_frequencies_give_llama_cpp_s_logits(ov_model, story, llama_rows, fields, form):
    found = rows_of(ov_model, story, backend_options={"form": form}, **fields)
    assert np.abs(found - llama_rows(**fields)).max() < 1e-3
    assert np.abs(found - rows_of(ov_model, story)).max() > 1


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling_type": "none", "rope_freq_scale": 0.5},
        {"yarn_beta_fast": 32.0, "yarn_ext_factor": 0.0},
        {"rope_freq_base": 0, "rope_freq_scale": 0, "yarn_ext_factor": -1},
    ],
)
def test_values_that_change_nothing(ov_model, story, fields):
    assert (rows_of(ov_model, story, **fields) == rows_of(ov_model, story)).all()


def test_keys_move_by_the_frequencies_in_force(ov_model, story):
    fields = {**pack.EXACT, "n_ctx": 128, **YARN}
    with ov_model.new_context(**fields) as context, ov_model.new_context(**fields) as other:
        assert context.capabilities.kv_shift
        context.decode(story[:20])
        context.seq_shift(0, 0, -1, 30)
        context.decode_one(story[20])
        other.decode(story[:20])
        other.decode_one(story[20])
        assert np.abs(context.logits() - other.logits()).max() < 1e-3


def test_a_model_with_frequencies_of_another_kind_keeps_them(copied):
    path = copied / "config.json"
    config = json.loads(path.read_text())
    config["rope_scaling"] = {"rope_type": "llama3", "factor": 8.0}
    config.pop("rope_parameters", None)
    path.write_text(json.dumps(config))
    with (
        ic.load_model(copied, backend="openvino") as model,
        pytest.raises(ic.UnsupportedFeatureError, match="llama3"),
    ):
        model.new_context(n_ctx=64, rope_freq_base=5000.0)
