"""Each field of a config is honoured, or refused by its name."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest

import infercore as ic
from infercore_openvino import cpu, files
from infercore_openvino import settings as module

NO_CONFIG = files.ModelFiles(
    "", "", "", has_cache=True, keys=((2, 32),), is_recurrent=False, n_state=0
)
REFUSED = {
    "rope_scaling_type": "longrope",
    "pooling_type": "rank",
    "flash_attn": "on",
    "swa_full": False,
}
IN_FORCE = {
    "rope_scaling_type": "none",
    "rope_freq_base": 10000.0,
    "rope_freq_scale": 1.0,
    "attention_type": "causal",
    "flash_attn": "auto",
    "offload_kqv": False,
    "op_offload": False,
    "swa_full": True,
    "pooling_type": "none",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(ov_model, name) -> None:
    with pytest.raises(ic.UnsupportedFeatureError) as caught:
        ov_model.new_context(n_ctx=64, **{name: REFUSED[name]})
    assert (caught.value.feature, caught.value.backend) == (name, "openvino")
    assert caught.value.hint


@pytest.mark.parametrize("name", IN_FORCE)
def test_what_is_in_force_anyway_is_accepted(ov_model, name) -> None:
    with ov_model.new_context(n_ctx=64, **{name: IN_FORCE[name]}) as context:
        expected = "off" if name == "flash_attn" else IN_FORCE[name]
        assert context.effective[name] == expected


def test_every_field_has_a_value_in_force(ov_model) -> None:
    import attrs

    own = {"backend_options", "on_oom", "n_ctx_min"}
    fields = {a.name for a in attrs.fields(ic.ContextConfig)} - own
    with ov_model.new_context() as context:
        assert not fields - set(context.effective)
        assert context.effective["n_batch"] == context.n_batch == 2048
        assert context.effective["n_ubatch"] == context.n_ubatch == 512


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"type_k": "q8_0"}, "type_k"),
        ({"type_v": "q4_0"}, "type_v"),
        ({"type_k": "u8", "type_v": "u8", "backend_options": {"form": "stateful"}}, "type_k"),
        ({"type_k": "u8", "type_v": "f16"}, "type_v"),
        ({"type_k": "bf16", "type_v": "bf16", "precision": "accurate"}, "type_k"),
        ({"type_k": "f16", "type_v": "f32"}, "type_v"),
    ],
)
def test_kv_types_that_cannot_be(ov_model, fields, refused) -> None:
    with pytest.raises(ic.UnsupportedFeatureError) as caught:
        ov_model.new_context(n_ctx=64, **fields)
    assert caught.value.feature == refused


def test_eight_bits_have_another_name_here(ov_model) -> None:
    with pytest.raises(ic.UnsupportedFeatureError) as caught:
        ov_model.new_context(n_ctx=64, type_k="q8_0")
    assert "'u8'" in caught.value.hint


@pytest.mark.parametrize("fields", [{"type_k": "f32"}, {"type_v": "f32"}])
def test_one_type_given_is_that_of_both(ov_model, fields) -> None:
    with ov_model.new_context(n_ctx=64, **fields) as context:
        assert (context.effective["type_k"], context.effective["type_v"]) == ("f32", "f32")


@pytest.mark.parametrize("fields", [{"n_threads": 1}, {"n_threads_batch": 1}])
def test_one_number_of_threads_does_all(ov_model, fields) -> None:
    with ov_model.new_context(n_ctx=64, **fields) as context:
        assert (context.n_threads, context.n_threads_batch) == (1, 1)


def test_thread_numbers_that_differ(ov_model) -> None:
    with pytest.raises(ic.UnsupportedFeatureError) as caught:
        ov_model.new_context(n_ctx=64, n_threads=1, n_threads_batch=2)
    assert caught.value.feature == "n_threads_batch"


def test_more_threads_than_the_machine_has(ov_model) -> None:
    with pytest.raises(ic.UnsupportedFeatureError) as caught:
        ov_model.new_context(n_ctx=64, n_threads=512)
    assert caught.value.feature == "n_threads"
    with ov_model.new_context(n_ctx=64, n_threads=1) as context:
        for wrong in ((512, None), (1, 2)):
            with pytest.raises(ic.UnsupportedFeatureError):
                context.set_threads(*wrong)
        assert (context.n_threads, context.n_threads_batch) == (1, 1)
        context.decode([5, 6])


@pytest.mark.parametrize(
    ("asked", "n_batch", "n_ubatch"),
    [
        ({}, 2048, 512),
        ({"n_batch": 100}, 100, 100),
        ({"n_ubatch": 4000}, 4000, 4000),
        ({"n_batch": 64, "n_ubatch": 16}, 64, 16),
        ({"n_batch": 16, "n_ubatch": 64}, 16, 16),
    ],
)
def test_batch_sizes(asked, n_batch, n_ubatch) -> None:
    found = module.settings(ic.ContextConfig(n_ctx=64, **asked), NO_CONFIG)
    assert (found.n_batch, found.n_ubatch) == (n_batch, n_ubatch)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("form", "flat"),
        ("inference_precision", "f64"),
        ("dynamic_quantization_group_size", -1),
        ("dynamic_quantization_group_size", True),
        ("num_streams", 0),
        ("enable_cpu_pinning", "yes"),
    ],
)
def test_options_of_wrong_values(ov_model, name, value) -> None:
    with pytest.raises(ic.InvalidInputError) as caught:
        ov_model.new_context(n_ctx=64, backend_options={name: value})
    assert (caught.value.field, caught.value.value) == (name, value)


@pytest.mark.parametrize(
    "chosen",
    [
        {"num_streams": 2},
        {"enable_hyper_threading": False},
        {"enable_cpu_pinning": False},
    ],
)
def test_options_reach_the_engine(ov_model, chosen) -> None:
    with ov_model.new_context(n_ctx=64, backend_options=chosen) as context:
        engine = context._inner._compiled.engine
        for name, value in chosen.items():
            assert str(engine.get_property(name.upper())) == str(value)
        context.decode([0, 5, 6])


def test_half_precision_or_a_refusal(ov_model, golden) -> None:
    """Processors without bfloat16 compute in float32, which is not what was asked."""
    prompt = golden.prompts[0]
    for precision in ("bf16", "f16"):
        options = {"inference_precision": precision}
        with (
            contextlib.suppress(ic.UnsupportedFeatureError),
            ov_model.new_context(n_ctx=64, backend_options=options) as context,
        ):
            context.decode(prompt.tokens)
            assert 1e-4 < abs(context.logits() - prompt.logits[-1]).max() < context.tolerance
            assert context.effective["type_k"] == precision


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_gpu_layers", 1),
        ("split_mode", "layer"),
        ("main_gpu", 1),
        ("tensor_split", [1.0]),
        ("use_mlock", True),
        ("check_tensors", True),
        ("device", "GPU.7"),
        ("device", "AUTO"),
    ],
)
def test_model_fields_that_cannot_be(ov_path, field, value) -> None:
    with pytest.raises(ic.UnsupportedFeatureError) as caught:
        ic.load_model(ov_path, backend="openvino", **{field: value})
    assert caught.value.feature == field


@pytest.mark.parametrize(
    "fields",
    [
        {"device": "CPU"},
        {"n_gpu_layers": 0, "split_mode": "none", "use_mlock": False, "check_tensors": False},
        {"n_gpu_layers": -1, "main_gpu": 0},
        {"use_mmap": False},
        {"use_mmap": True},
    ],
)
def test_model_fields_that_are_honoured(ov_path, fields) -> None:
    with ic.load_model(ov_path, backend="openvino", **fields) as model:
        assert model.runtime["device"] == "CPU"


def test_progress_is_told_and_can_cancel(ov_path) -> None:
    told = []
    ic.load_model(ov_path, backend="openvino", progress=told.append).close()
    assert (told[0], told[-1]) == (0.0, 1.0)
    with pytest.raises(ic.ModelLoadError, match="cancelled"):
        ic.load_model(ov_path, backend="openvino", progress=lambda _: False)


def test_compiled_graphs_are_kept_in_the_folder_given(ov_path, tmp_path) -> None:
    options = {"cache_dir": str(tmp_path / "cache")}
    with ic.load_model(ov_path, backend="openvino", backend_options=options) as model:
        model.new_context(n_ctx=64).close()
    assert list((tmp_path / "cache").iterdir())


def test_no_memory_is_an_error_of_its_own(ov_model) -> None:
    with pytest.raises(ic.OutOfMemoryError) as caught:
        ov_model.new_context(n_ctx=2**31 - 1, n_seq_max=256, type_k="f32")
    assert caught.value.attempts


@pytest.mark.parametrize(
    ("fields", "on", "n_ubatch"),
    [
        ({"pooling_type": "mean"}, True, 2048),
        ({"pooling_type": "last", "n_ubatch": 64}, True, 64),
        ({"pooling_type": "none"}, False, 512),
        ({"pooling_type": "cls", "embeddings": False}, False, 512),
    ],
)
def test_pooling_switches_embeddings_on(ov_model, fields, on, n_ubatch) -> None:
    with ov_model.new_context(n_ctx=64, **fields) as context:
        assert (context.effective["embeddings"], context.n_ubatch) == (on, n_ubatch)
        context.decode([5, 6, 7], logits="none")
        if on:
            assert context.embedding().shape == (ov_model.info.n_embd,)


@pytest.mark.parametrize("precision", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("fields", [{"n_threads": 1}, {"num_streams": 2}, {}])
def test_no_precision_ends_the_process(ov_path, precision, fields) -> None:
    """With a matrix unit some settings divide by zero in the engine: tried in a child."""
    options = {name: value for name, value in fields.items() if name == "num_streams"}
    asked = {name: value for name, value in fields.items() if name not in options}
    options["inference_precision"] = precision
    command = [sys.executable, "-c", OPENS, str(ov_path), json.dumps(asked), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() in {"numbers", "refused"}
    assert precision != "f32" or done.stdout.strip() == "numbers"


OPENS = """
import json, sys
import infercore as ic, numpy as np
path, fields, options = sys.argv[1], *map(json.loads, sys.argv[2:])
with ic.load_model(path, backend="openvino") as model:
    try:
        with model.new_context(n_ctx=64, **fields, backend_options=options) as context:
            context.decode([5, 6, 7, 8])
            print("numbers" if np.isfinite(context.logits()).all() else "none")
    except ic.UnsupportedFeatureError:
        print("refused")
"""


@pytest.mark.parametrize(
    ("cores", "threads", "streams", "unit", "refused"),
    [
        (2, 1, 1, True, True),
        (2, 2, 2, True, True),
        (2, 2, 1, True, False),
        (2, 1, 1, False, False),
        (1, 512, 1, True, True),
        (1, None, 1, True, True),
    ],
)
def test_one_thread_a_stream_with_a_matrix_unit(
    monkeypatch, cores, threads, streams, unit, refused
) -> None:
    monkeypatch.setattr(cpu, "_has_unit", lambda: unit)
    monkeypatch.setattr(cpu, "_n_cores", lambda: cores)
    options = {"inference_precision": "bf16", "num_streams": streams}
    asked = ic.ContextConfig(n_ctx=64, n_threads=threads, backend_options=options)
    found = module.settings(asked, NO_CONFIG)
    with pytest.raises(ic.UnsupportedFeatureError) if refused else contextlib.nullcontext():
        cpu.check(found)


def test_a_cache_larger_than_the_memory_is_refused_before_it_is_made(ov_model) -> None:
    with pytest.raises(ic.OutOfMemoryError, match="are free") as caught:
        ov_model.new_context(n_ctx=134_217_712)
    assert len(caught.value.attempts) == 1


def test_a_ladder_ends_at_a_window_that_the_machine_can_hold(ov_model, monkeypatch) -> None:
    monkeypatch.setattr("infercore_openvino.memory.free_bytes", lambda **_: 2**20)
    with ov_model.new_context(n_ctx=2**20, on_oom="shrink") as context:
        kind = context.effective["type_k"]  # the ladder goes down to 8 bits, before the window
        planned = ov_model.plan_memory(n_ctx=context.n_ctx, type_k=kind, type_v=kind)
        assert (kind, planned.kv_bytes <= 2**20) == ("u8", True)
        context.decode([5 + i % 1000 for i in range(context.n_ctx)])
