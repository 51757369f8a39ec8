"""A CPU with AMX, and a build that dies there: quantised models load and decode all the same."""

from __future__ import annotations

import ctypes
import json
import re
import signal
import struct
import subprocess
import sys

import llama_cpp
import pytest

import infercore as ic
import infercore_models
from infercore.weight_files.gguf import Tensor

F32, Q4_0 = 0, 2

DECODES = """
import sys
import infercore as ic
with ic.load_model(sys.argv[1]) as model, model.new_context(n_ctx=128, n_threads=1) as context:
    context.decode(list(range(5, 69)))
    context.decode_one(7)
    print(context.n_past())
"""


LOADS = """
import sys
from infercore_llamacpp import amx
amx.is_sound = lambda: False
import infercore as ic
for path in sys.argv[1:]:
    try:
        ic.load_model(path, backend="llamacpp", check_in_child=False)
    except ic.ModelFormatError:
        print("refused")
"""


@pytest.fixture
def amx(plugin_model, monkeypatch, tmp_path):
    """Return the module, with nothing known, a cache of its own, and a CPU that has the unit."""
    from infercore_llamacpp import amx

    monkeypatch.delenv("INFERCORE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(amx, "_in_use", lambda: True)
    amx.is_sound.cache_clear()
    yield amx
    amx.is_sound.cache_clear()


def load(plugin_model, path, **options):
    plugin_model.LlamaModel.load(str(path), ic.ModelConfig(backend_options=options)).close()


def test_a_quantised_model_decodes_on_this_cpu(plugin_model):
    path = str(infercore_models.path("storyteller", "gguf-q8_0"))
    command = [sys.executable, "-c", DECODES, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "65\n"), done.stderr


def test_the_tiny_model_is_one(plugin_model, amx, tmp_path):
    amx.write_model(str(tmp_path / "tiny.gguf"))
    model = plugin_model.LlamaModel.load(
        str(tmp_path / "tiny.gguf"), ic.ModelConfig(backend_options={"use_extra_bufts": False})
    )
    assert (model.info.n_layer, model.info.n_vocab) == (1, 64)
    model.close()


def test_a_build_that_dies_goes_without(plugin_model, amx, monkeypatch, story_path, caplog):
    monkeypatch.setattr(amx, "_try", lambda: False)
    chosen = []
    real = plugin_model.loading.to_overrides
    monkeypatch.setattr(
        plugin_model.loading,
        "to_overrides",
        lambda params, given: (chosen.append(params.use_extra_bufts), real(params, given))[1],
    )
    load(plugin_model, story_path)
    load(plugin_model, story_path, use_extra_bufts=False)
    assert chosen == [False, False]
    assert "AMX" in caplog.text
    with pytest.raises(ic.UnsupportedFeatureError, match="AMX"):
        load(plugin_model, story_path, use_extra_bufts=True)


@pytest.fixture
def quantised(tmp_path, story_path):
    """Return the path of a story in Q4_0, which AVX multiplies faster with interleaved rows."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    path, asked = tmp_path / "q4_0.gguf", ctypes.byref(params)
    assert llama_cpp.llama_model_quantize(str(story_path).encode(), str(path).encode(), asked) == 0
    return path


@pytest.fixture
def layout(plugin_model):
    """Return the module, where this build interleaves rows at all."""
    module = plugin_model.loading.layout
    if module._interleaving(module._device(0)) is None:
        pytest.skip("this build of llama.cpp has no layout of interleaved rows")
    return module


def test_without_amx_rows_are_interleaved_for_avx_all_the_same(
    plugin_model, layout, amx, monkeypatch, quantised
):
    monkeypatch.setattr(amx, "_try", lambda: False)
    adapter = infercore_models.path("storyteller-lora", "gguf-f32")
    rows = []
    for options, is_laid_out in (({}, True), ({"use_extra_bufts": False}, False)):
        config = ic.ModelConfig(device="CPU", backend_options=options)
        loaded = plugin_model.loading.load(str(quantised), config, allocate=False)
        llama_cpp.llama_model_free(ctypes.c_void_p(loaded.handle))
        assert (loaded.n_copied > 0) is is_laid_out
        fields = {"device": "CPU", "backend_options": options}
        with (
            ic.load_model(quantised, **fields) as model,
            model.new_context(n_ctx=64) as context,
        ):
            for adapters in ((), (ic.AdapterSpec(path=adapter),)):
                context.set_adapters(adapters)
                context.decode(list(range(5, 45)))
                rows.append(context.logits().copy())
                context.clear()
            tolerance = context.tolerance
    plain, adapted, *others = rows
    assert abs(plain - adapted).max() > 0.1
    assert abs(plain - others[0]).max() <= tolerance
    assert abs(adapted - others[1]).max() <= tolerance


@pytest.mark.parametrize(
    ("name", "dims", "kind", "is_laid_out"),
    [
        ("blk.0.ffn_up.weight", (64, 32), Q4_0, True),
        ("blk.0.ffn_up.weight", (64, 31), Q4_0, False),  # rows go by eights
        ("blk.0.ffn_up.weight", (64, 32), F32, False),
        ("blk.0.ffn_up_exps.weight", (64, 32, 2), Q4_0, True),
        ("blk.0.ffn_up_exps.weight", (64, 32, 1), Q4_0, False),  # the only expert
        ("blk.0.ffn_up_exps.weight", (64, 32), Q4_0, False),
        ("blk.0.attn_k_b.weight", (64, 32, 2), Q4_0, False),
        ("blk.0.ffn_up.bias", (64, 32), Q4_0, False),
        ("token_embd.weight", (64, 32), Q4_0, False),
        ("output.weight", (64, 32), Q4_0, True),
        # What no model has, and what would end the process where the engine were asked.
        ("blk.0.ffn_up.weight", (16, 32), Q4_0, False),
        ("blk.0.ffn_up.weight", (0, 32), Q4_0, False),
        ("blk.0.ffn_up.weight", (64, 0), Q4_0, False),
        ("blk.0.ffn_up.weight", (64,), Q4_0, False),
        ("blk.0.ffn_up.weight", (64, 32, 2, 2), Q4_0, False),
        ("blk.0.ffn_up.weight", (2**40, 2**40), 99, False),
        ("blk.0.ffn_up.weight", (64, 32), 31, False),  # a type that was given up
        ("blk.0.ffn_up.weight", (64, 32), 2**31, False),
        ("blk.700.ffn_up.weight", (64, 32), Q4_0, False),
    ],
)
def test_what_is_only_multiplied_with_is_laid_out(layout, name, dims, kind, is_laid_out):
    given = [Tensor("token_embd.weight", (64, 32), F32, 0), Tensor(name, dims, kind, 0)]
    assert bool(patterns_of(layout, given)) is is_laid_out


def test_an_output_that_is_the_table_of_tokens_too_stays(layout):
    assert not patterns_of(layout, [Tensor("output.weight", (64, 32), Q4_0, 0)])


def test_headers_that_no_engine_takes_are_refused_by_it(quantised, tmp_path):
    data, name = quantised.read_bytes(), b"blk.0.ffn_up.weight"
    place = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4
    paths = []
    for offset, layout, value in (
        (16, "<I", 31), (16, "<I", 99), (16, "<I", 2**31),
        (0, "<Q", 0), (0, "<Q", 16), (0, "<Q", 2**40), (0, "<Q", 2**63), (8, "<Q", 2**63),
    ):  # fmt: skip
        changed = bytearray(data)
        struct.pack_into(layout, changed, place + offset, value)
        paths.append(tmp_path / f"{len(paths)}.gguf")
        paths[-1].write_bytes(changed)
    command = [sys.executable, "-c", LOADS, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n" * len(paths)), done.stderr


def test_few_patterns_tell_the_layers_apart(layout):
    mixed = [Tensor(f"blk.{i}.ffn_down.weight", (64, 32), (Q4_0, F32)[i % 2], 0) for i in range(13)]
    whole = [
        Tensor(f"blk.{i}.{name}.weight", (64, 32), Q4_0, 0)
        for i in range(13)
        for name in ("attn_q", "shortconv.in_proj")
    ]
    patterns = patterns_of(layout, [*mixed, *whole])
    found = {t.name for t in [*mixed, *whole] if any(re.search(p, t.name) for p in patterns)}
    assert found == {t.name for t in [*mixed[::2], *whole]}
    assert len(patterns) == 2


def patterns_of(layout, tensors):
    device = layout._device(0)
    buffer_type = layout._interleaving(device)
    chosen = layout._multiplied(tensors, lambda kind: layout._rows_by(device, buffer_type, *kind))
    return layout._patterns(chosen, tensors)


def test_the_trial_tells_what_a_real_model_would_meet(amx):
    """The same model without the trial, with every layout there is."""
    forced = "from infercore_llamacpp import amx\namx.is_sound = lambda: True\n" + DECODES
    path = str(infercore_models.path("storyteller", "gguf-q8_0"))
    command = [sys.executable, "-c", forced, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert amx._try() is (done.returncode == 0)


@pytest.mark.parametrize(
    ("code", "sound"), [(0, True), (-signal.SIGSEGV, False), (-signal.SIGILL, False)]
)
def test_how_a_child_ends_is_the_verdict(amx, monkeypatch, code, sound):
    ended = subprocess.CompletedProcess([], code)
    monkeypatch.setattr(amx.child, "run", lambda *_, **__: ended)
    assert amx.is_sound() is sound
    assert list(json.loads(amx._cache_file().read_text()).values()) == [sound]


def no_model(amx, monkeypatch):
    monkeypatch.setattr(amx, "write_model", lambda path: None)  # the child finds none


def no_executable(amx, monkeypatch):
    monkeypatch.setattr(sys, "executable", None)  # as inside of another program


def no_end(amx, monkeypatch):
    monkeypatch.setattr(amx, "SECONDS", 0.01)


def killed(amx, monkeypatch):
    ended = subprocess.CompletedProcess([], -9)
    monkeypatch.setattr(amx.child, "run", lambda *_, **__: ended)


@pytest.mark.parametrize("hinder", [no_model, no_executable, no_end, killed])
def test_what_could_not_be_tried_is_left_out_and_no_verdict(amx, monkeypatch, caplog, hinder):
    hinder(amx, monkeypatch)
    assert not amx.is_sound()
    assert "could not be tried" in caplog.text
    assert not amx._cache_file().exists()


def test_without_a_home_nothing_is_kept(amx, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(amx.os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(amx, "_try", lambda: True)
    assert amx._cache_file() is None
    assert amx.is_sound()


def test_the_verdict_is_kept_with_the_build_it_is_on(amx, monkeypatch):
    tries = []
    monkeypatch.setattr(amx, "_try", lambda: bool(tries.append(1)) or True)
    assert amx.is_sound()
    amx.is_sound.cache_clear()
    assert amx.is_sound()
    assert len(tries) == 1
    kept = json.loads(amx._cache_file().read_text())
    assert kept == {amx._library(): True}
    monkeypatch.setattr(amx, "_library", lambda: "another build")
    amx.is_sound.cache_clear()
    assert amx.is_sound()
    assert len(tries) == 2
    assert json.loads(amx._cache_file().read_text()) == {**kept, "another build": True}


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"x": 1}'])
def test_a_damaged_cache_is_none(amx, monkeypatch, damage):
    monkeypatch.setattr(amx, "_try", lambda: True)
    amx._cache_file().parent.mkdir(parents=True)
    amx._cache_file().write_text(damage)
    assert amx.is_sound()


def test_a_cache_that_cannot_be_written_is_done_without(amx, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file, no folder")
    monkeypatch.setattr(amx, "_try", lambda: True)
    assert amx.is_sound()


@pytest.mark.parametrize("where", ["elsewhere", "none"])
def test_the_cache_can_be_moved_and_left_out(amx, monkeypatch, tmp_path, where):
    monkeypatch.setenv("INFERCORE_CACHE_DIR", where if where == "none" else str(tmp_path / where))
    monkeypatch.setattr(amx, "_try", lambda: True)
    assert amx.is_sound()
    found = [path.parent.name for path in tmp_path.rglob("llamacpp-amx.json")]
    assert found == ([] if where == "none" else [where])
