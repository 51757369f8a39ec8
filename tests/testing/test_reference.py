"""The oracle itself, against outputs that transformers computed."""

from __future__ import annotations

import time

import numpy as np
import pytest

from infercore.errors import InvalidInputError, ModelLoadError, UnsupportedFeatureError
from infercore.testing import load_reference_model, reference_backend
from infercore.testing.reference import storyteller
from infercore.values.config import ModelConfig

IDS = [(i * 37 + 11) % 1000 for i in range(24)]


@pytest.fixture(params=range(5))
def prompt(request, golden):
    assert len(golden.prompts) == 5
    return golden.prompts[request.param]


@pytest.mark.parametrize("n_batch", [512, 7])
def test_logits_at_every_position(reference_model, prompt, n_batch):
    with reference_model.new_context(n_batch=n_batch) as context:
        context.decode(prompt.tokens, logits="all")
        assert np.abs(context.logits_all() - prompt.logits).max() < 1e-4


def test_greedy_tokens(reference_model, golden, prompt):
    tokenizer, found = reference_model.tokenizer, []
    with reference_model.new_context() as context:
        context.decode(prompt.tokens)
        while len(found) < golden.max_new_tokens:
            token = int(context.logits().argmax())
            if tokenizer.is_eog(token):
                break
            found.append(token)
            context.decode_one(token)
    assert tuple(found) == prompt.greedy
    assert (len(found) < golden.max_new_tokens) == prompt.ended


def test_a_long_prefill_is_quick_enough(reference_model):
    ids = np.random.default_rng(5).integers(4, 1024, 700)
    with reference_model.new_context() as context:
        started = time.process_time()
        context.decode(ids)
        assert time.process_time() - started < 4


def test_what_the_model_says_of_itself(reference_model):
    info = reference_model.info
    assert (info.architecture, info.n_vocab, info.n_ctx_train) == ("llama", 1024, 1024)
    assert (info.n_embd, info.n_layer, info.n_head, info.n_head_kv) == (128, 4, 4, 2)
    assert info.n_params == 820_352
    assert info.size_bytes > 4 * info.n_params
    assert info.metadata["rms_norm_eps"] == "1e-05"
    assert reference_model.backend == "reference"
    assert reference_model.backend_version.startswith("numpy ")


def test_the_backend_knows_its_own_directories(tmp_path):
    backend = reference_backend()
    assert backend.name == "reference"
    assert backend.formats == ("hf",)
    assert backend.match(storyteller()) > 0
    assert backend.match(str(tmp_path)) == 0
    assert backend.match(str(tmp_path / "missing")) == 0
    assert backend.match(__file__) == 0


def test_memory_is_planned_as_it_is_taken(reference_model):
    plan = reference_model.plan_memory(n_ctx=100)
    assert plan.weights_bytes == 4 * reference_model.info.n_params
    with reference_model.new_context(n_ctx=100) as context:
        context.decode([5] * 100)
        held = context._inner.sequences[0]
        assert plan.kv_bytes == held.k.nbytes + held.v.nbytes
    assert reference_model.plan_memory(n_ctx=100, type_k="f16").kv_bytes < plan.kv_bytes


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling_type": "yarn"}, {"yarn_ext_factor": 1.0}, {"yarn_orig_ctx": 512},
        {"pooling_type": "rank"}, {"type_k": "q4_0"}, {"type_v": "iq4_nl"},
        {"offload_kqv": True}, {"op_offload": True}, {"swa_full": False},
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused(reference_model, fields):
    with pytest.raises(UnsupportedFeatureError):
        reference_model.new_context(**fields)


@pytest.mark.parametrize(
    ("fields", "effective"),
    [
        ({"n_batch": 32, "n_ubatch": 8}, {"n_batch": 32, "n_ubatch": 8}),
        ({"n_ubatch": 900}, {"n_batch": 900, "n_ubatch": 900}),
        ({"n_seq_max": 3, "kv_unified": True}, {"n_seq_max": 3, "kv_unified": True}),
        ({"rope_freq_base": 5e4}, {"rope_freq_base": 5e4}),
        ({"rope_freq_base": 0.0}, {"rope_freq_base": 1e4}),
        ({"rope_freq_scale": 0.5}, {"rope_freq_scale": 0.5}),
        ({"attention_type": "non-causal"}, {"attention_type": "non-causal", "n_ubatch": 512}),
        ({"pooling_type": "mean"}, {"pooling_type": "mean", "n_ubatch": 512}),
        ({"type_k": "f16"}, {"type_k": "f16", "type_v": "f32"}),
        ({"flash_attn": "auto"}, {"flash_attn": "off"}),
        ({"flash_attn": "on", "type_k": "bf16"}, {"flash_attn": "on", "type_k": "bf16"}),
        ({"type_v": "q8_0"}, {"flash_attn": "on", "type_k": "f32", "type_v": "q8_0"}),
        ({}, {"n_threads": 1, "n_threads_batch": 1, "adapters": ()}),
        ({"n_threads": 2}, {"n_threads": 2, "n_threads_batch": 2}),
        ({"n_threads_batch": 3}, {"n_threads": 1, "n_threads_batch": 3}),
        ({"embeddings": True}, {"embeddings": True, "pooling_type": "none"}),
    ],
)
def test_what_it_can_do_is_reported(reference_model, fields, effective):
    with reference_model.new_context(**fields) as context:
        assert context.effective.items() >= effective.items()


def test_a_scale_needs_a_scaling(reference_model):
    with pytest.raises(InvalidInputError):
        reference_model.new_context(rope_scaling_type="none", rope_freq_scale=0.5)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_freq_base": 5e4},
        {"rope_freq_scale": 0.25},
        {"attention_type": "non-causal"},
        {"type_k": "f16", "type_v": "f16"},
        {"type_k": "bf16", "type_v": "bf16"},
        {"type_k": "q8_0"},
        {"type_v": "q8_0"},
        {"type_k": "q8_0", "type_v": "q8_0"},
    ],
)
def test_options_change_the_numbers(reference_model, fields):
    rows = []
    for options in ({}, fields):
        with reference_model.new_context(n_ctx=64, **options) as context:
            context.decode(IDS)
            rows.append(context.logits().copy())
            tolerance = context.tolerance
    moved = np.abs(rows[0] - rows[1]).max()
    assert moved > 1e-5
    if "type_k" in fields:
        assert moved < tolerance


def test_linear_scaling_is_positions_in_smaller_steps(reference_model):
    """At half the scale, twice the distance reads as the distance itself."""
    with (
        reference_model.new_context(n_ctx=64) as plain,
        reference_model.new_context(n_ctx=64, rope_freq_scale=0.5) as scaled,
    ):
        plain.decode(IDS[:2])
        scaled.decode(IDS[:1])
        engine = scaled._inner
        engine.decode_batch(np.array(IDS[1:2], np.int32), np.array([2]), [(0,)], np.array([True]))
        assert np.abs(plain.logits() - engine.logits(0)).max() < 1e-4


# -- loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"n_gpu_layers": 1}, {"n_gpu_layers": -1}, {"split_mode": "layer"}, {"main_gpu": 0},
        {"tensor_split": [1.0]}, {"device": "gpu0"}, {"use_mmap": True}, {"use_mlock": True},
    ],
)  # fmt: skip
def test_what_numpy_has_not_is_refused(fields):
    with pytest.raises(UnsupportedFeatureError):
        load_reference_model(config=ModelConfig(**fields))


def test_what_numpy_has_is_accepted():
    seen = []
    config = ModelConfig(
        device="cpu", use_mmap=False, use_mlock=False, check_tensors=True,
        progress=seen.append,
    )  # fmt: skip
    load_reference_model(config=config).close()
    assert seen[0] == 0.0
    assert seen[-1] == 1.0
    with pytest.raises(InvalidInputError):
        load_reference_model(config=ModelConfig(backend_options={"x": 1}))


def test_loading_can_be_cancelled():
    with pytest.raises(ModelLoadError, match="cancelled"):
        load_reference_model(config=ModelConfig(progress=lambda _: False))


def test_a_session_runs_on_it(reference_model, golden):
    prompt = golden.prompts[3]
    with reference_model.new_session() as session:
        session.ensure_prefix(prompt.text)
        text = "".join(chunk.text for chunk in session.decode(sampling=greedy()))
    assert text == reference_model.tokenizer.decode(list(prompt.greedy))


def greedy():
    from infercore.values.config import SamplingConfig

    return SamplingConfig(temperature=0)
