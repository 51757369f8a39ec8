"""Every field of a context config is honoured and read back, or refused."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import numpy as np
import pytest

import infercore as ic
from infercore_llamacpp import rope

YARN = {"rope_scaling_type": "yarn", "rope_freq_scale": 0.25}
NOT_EFFECTIVE = {"on_oom", "n_ctx_min", "backend_options", "defrag_thold"}


@pytest.mark.parametrize(
    "fields",
    [
        {"n_batch": 64},
        {"n_ubatch": 32},
        {"n_seq_max": 3},
        {"n_threads": 2},
        {"n_threads_batch": 2},
        {"rope_scaling_type": "yarn"},
        {"rope_scaling_type": "none"},
        {"rope_freq_base": 5000.0},
        {"rope_freq_scale": 0.5},
        {"yarn_attn_factor": 0.8},
        {**YARN, "yarn_ext_factor": 0.5},
        {**YARN, "yarn_beta_fast": 16.0},
        {**YARN, "yarn_beta_slow": 2.0},
        {**YARN, "yarn_orig_ctx": 256},
        {"pooling_type": "mean"},
        {"attention_type": "non-causal"},
        {"flash_attn": "on"},
        {"type_k": "bf16"},
        {"flash_attn": "on", "type_v": "q8_0"},
        {"embeddings": True},
        {"offload_kqv": False},
        {"op_offload": False},
        {"swa_full": False},
        {"n_seq_max": 2, "kv_unified": False},
        {"no_perf": True},
    ],
)
def test_a_field_that_is_set_is_in_force(story, open_context, prompt, fields):
    context = open_context(story, **fields)
    for field, value in fields.items():
        assert context.effective[field] == value
    context.decode(prompt[:32], seq_id=0, logits="last")
    assert np.isfinite(context.logits(0)).all()


@pytest.mark.parametrize("mixing", [YARN, {"yarn_ext_factor": 0.5, "rope_freq_scale": 0.25}])
def test_an_attention_factor_that_the_engine_replaces_is_refused(story, open_context, mixing):
    for same in (1.0, -1.0):
        open_context(story, **mixing, yarn_attn_factor=same)
    for factor in (0.8, 2.0):
        with pytest.raises(ic.UnsupportedFeatureError, match="yarn_ext_factor"):
            open_context(story, **mixing, yarn_attn_factor=factor)
        open_context(story, **{**mixing, "yarn_ext_factor": 0}, yarn_attn_factor=factor)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_freq_base": 5000.0},
        {"rope_freq_scale": 0.5},
        {"rope_scaling_type": "yarn", "yarn_orig_ctx": 64, "rope_freq_scale": 0.25},
        {"yarn_ext_factor": 1.0, "rope_freq_scale": 0.25},
        {"attention_type": "non-causal"},
    ],
)
def test_fields_that_change_the_numbers_do(story, open_context, prompt, fields):
    rows = []
    for settings in ({}, fields):
        context = open_context(story, **settings)
        context.decode(prompt[:64], seq_id=0, logits="last")
        rows.append(context.logits(0).copy())
    assert np.abs(rows[0] - rows[1]).max() > 1e-2


def test_effective_has_every_field(story):
    context = story.new_context(ic.ContextConfig(n_ctx=300))
    effective = dict(context.effective)
    context.close()
    fields = {f.name for f in attrs.fields(ic.ContextConfig)} - NOT_EFFECTIVE
    assert set(effective) == fields | {"activations"}
    assert effective["n_ctx"] == 512  # padded by the engine
    assert effective["n_batch"] == effective["n_ubatch"] == 300
    assert effective["flash_attn"] == "off"
    assert effective["rope_scaling_type"] == "linear"
    assert effective["yarn_orig_ctx"] == 1024
    assert effective["no_perf"] is False


def test_flash_attention_auto_tells_what_became_of_it(story, open_context):
    assert open_context(story, flash_attn="auto").effective["flash_attn"] in {"on", "off"}
    fields = {"flash_attn": None, "type_v": "q4_0"}
    assert open_context(story, **fields).effective["flash_attn"] == "on"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"type_k": "u8"}, "type_k='u8'"),
        ({"pooling_type": "rank"}, "pooling_type='rank'"),
        ({"rope_scaling_type": "longrope"}, "rope_scaling_type='longrope'"),
    ],
)
def test_what_the_model_cannot_have_is_refused(story, open_context, fields, field):
    with pytest.raises(ic.UnsupportedFeatureError) as caught:
        open_context(story, **fields)
    assert caught.value.feature == field


@pytest.mark.parametrize("field", ["offload_kqv", "op_offload"])
def test_offload_puts_nothing_where_there_is_no_gpu(story, open_context, field):
    if story.traits.has_gpu:
        pytest.skip("there is a GPU here")
    assert open_context(story, **{field: True}).effective[field] is False


def test_blocks_that_do_not_divide_the_head_are_named(tiny, open_context):
    model = tiny("head16")
    assert model.capabilities.kv_types == ("f32", "f16", "bf16")
    for field, flash in (("type_k", "on"), ("type_v", "on"), ("type_k", "off")):
        with pytest.raises(ic.InvalidInputError, match="head size of 16") as caught:
            open_context(model, flash_attn=flash, **{field: "q8_0"})
        assert caught.value.field == field


def test_every_declared_kv_type_works(story, open_context, prompt):
    for name in story.capabilities.kv_types:
        context = open_context(story, flash_attn="on", type_k=name, type_v=name)
        context.decode(prompt[:64], seq_id=0, logits="last")
        assert np.isfinite(context.logits(0)).all()


def test_recurrent_and_encoder_models_have_no_types_to_choose(tiny, open_context):
    for kind in ("recurrent", "encoder"):
        model = tiny(kind)
        assert model.capabilities.kv_types == ("f32",)
        with pytest.raises(ic.UnsupportedFeatureError):
            open_context(model, type_k="f16")
    with pytest.raises(ic.UnsupportedFeatureError):
        open_context(tiny("recurrent"), flash_attn="on")
    with pytest.raises(ic.UnsupportedFeatureError):
        open_context(tiny("recurrent"), rope_freq_base=1000.0)


def test_learned_positions_bound_the_window(tiny, open_context):
    with pytest.raises(ic.InvalidInputError) as caught:
        open_context(tiny("encoder"), n_ctx=513)
    assert caught.value.field == "n_ctx"


@pytest.mark.parametrize("n_ctx", [2**28, 2**31 - 1])
def test_a_window_that_cannot_fit_is_a_memory_error(story, n_ctx):
    with pytest.raises(ic.OutOfMemoryError, match="free"):
        story.new_context(ic.ContextConfig(n_ctx=n_ctx))


def test_thread_counts_change_live(context):
    context.set_threads(2, 3)
    assert (context.effective["n_threads"], context.effective["n_threads_batch"]) == (2, 3)


def test_default_threads_stay_within_what_is_allowed():
    import os

    from infercore_llamacpp.threads import default_threads

    single, batch = default_threads()
    assert 1 <= single <= batch <= len(os.sched_getaffinity(0))


def test_a_guessed_file_type_is_the_type_without_its_flag(story, monkeypatch):
    """The engine marks its guess, where a file states no type, with a bit of the number."""
    from infercore_llamacpp import traits

    own = story.traits.ftype
    monkeypatch.setattr(traits.api, "llama_model_ftype", lambda _: own | 1024)
    assert traits.read_traits(story.handle, has_gpu=False).ftype == own


@pytest.mark.parametrize(("scaling", "factor"), [("yarn", 1.0), ("linear", 0.0)])
def test_a_negative_factor_of_a_header_leaves_it_to_the_scaling(scaling, factor):
    header = {"rope.scaling.yarn_ext_factor": -1.0}
    traits = SimpleNamespace(
        info=SimpleNamespace(architecture="grok"), own_number=lambda key, n: header.get(key, n)
    )
    assert rope._of_yarn(scaling, traits)["yarn_ext_factor"] == factor
