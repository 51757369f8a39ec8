"""The header of a GGUF file as the plugin reads it, and what it refuses on seeing it."""

from __future__ import annotations

import os
import struct
import time

import pytest

import infercore as ic
from llamacpp import random_gguf


@pytest.fixture
def header(plugin_model):
    from infercore.weight_files import gguf as header

    return header


@pytest.fixture
def soundness(plugin_model):
    from infercore_llamacpp import soundness

    return soundness


def write(tmp_path, **changed):
    metadata, tensors = random_gguf._llama(random_gguf.np.random.default_rng(0))
    return str(random_gguf.write_file(tmp_path / "m.gguf", {**metadata, **changed}, tensors))


def test_what_a_header_holds(header, story_path):
    found = header.read(str(story_path))
    assert found.architecture == "llama"
    assert (found.own("block_count"), found.own("context_length")) == (4, 1024)
    assert len(found.metadata["tokenizer.ggml.tokens"]) == 1024
    assert found.tensors["token_embd.weight"].dims == (128, 1024)
    assert found.doubled == []


@pytest.mark.parametrize("size", [24, 100, 1000, 20_000])
def test_a_header_cut_off_is_malformed_and_left_to_the_engine(
    header, soundness, story_path, tmp_path, size
):
    path = tmp_path / "cut.gguf"
    path.write_bytes(story_path.read_bytes()[:size])
    with pytest.raises(header.MalformedError):
        header.read(str(path))
    assert soundness.complaint(str(path)) is None


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("llama.block_count", 513, "1 to 512 layers"),
        ("llama.block_count", "four", "1 to 512 layers"),
        ("llama.attention.layer_norm_rms_epsilon", -0.5, "at least 0"),
        ("llama.rope.scaling.type", "warp", "there are none, linear"),
        ("llama.pooling_type", 8, "there are 0 to 4"),
        ("llama.expert_count", 4, "uses 0 of 4"),
        ("llama.expert_used_count", 2, "uses 2 of 0"),
        ("tokenizer.ggml.tokens", ["a", "b", "a"], "b'a' 2 times"),
    ],
)
def test_what_is_refused(soundness, tmp_path, key, value, says):
    assert soundness.complaint(write(tmp_path)) is None
    assert says in str(soundness.complaint(write(tmp_path, **{key: value})))


@pytest.mark.parametrize("kind", ["llama", "head16", "mrope", "sliding", "recurrent", "encoder"])
def test_sound_models_pass(soundness, tmp_path, kind):
    assert soundness.complaint(str(random_gguf.write(tmp_path / "m.gguf", kind))) is None


def test_a_large_vocabulary_is_read_quickly(soundness, tmp_path):
    path = write(tmp_path, **{"tokenizer.ggml.tokens": [f"t{i}" for i in range(150_000)]})
    took = []
    for _ in range(3):  # another process may have the processor just then
        begun = time.perf_counter()
        assert soundness.complaint(path) is None
        took.append(time.perf_counter() - begun)
    assert min(took) < 2


MATRIX, VECTOR = "blk.0.attn_q.weight", "output_norm.weight"


@pytest.mark.parametrize("name", [MATRIX, VECTOR, "token_embd.weight", "blk.1.ffn_norm.weight"])
@pytest.mark.parametrize("kind", ["int8", "int16", "int32", "int64", "float64", "float16"])
def test_a_type_that_no_kernel_takes_is_refused(soundness, tmp_path, name, kind):
    metadata, tensors = random_gguf._llama(random_gguf.np.random.default_rng(0))
    tensors[name] = tensors[name].astype(kind)
    says = soundness.complaint(str(random_gguf.write_file(tmp_path / "m.gguf", metadata, tensors)))
    if kind == "float16" and tensors[name].ndim > 1:
        assert says is None
    else:
        assert name in says


def vocabulary(model, *tokens):
    """Metadata of a vocabulary with all bytes; ``tokens`` are (text, kind) behind them."""
    held = [(f"<0x{i:02X}>", 6) for i in range(256)] + list(tokens)
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [text for text, _ in held],
        "tokenizer.ggml.token_type": [kind for _, kind in held],
    }


@pytest.mark.parametrize("text", ["a", "", "<0x4>", "<0xG1>", "<0x41> ", "\u2581the"])
@pytest.mark.parametrize("model", ["llama", "gpt2", "t5", "bert"])
def test_a_byte_that_is_none_is_refused(soundness, tmp_path, model, text):
    if model != "bert":
        assert soundness.complaint(write(tmp_path, **vocabulary(model, ("a", 1)))) is None
    says = soundness.complaint(write(tmp_path, **vocabulary(model, (text, 6))))
    assert "marked as a byte" in says


@pytest.mark.parametrize("missing", [0, 0x41, 0xFF])
def test_a_vocabulary_without_all_bytes_is_refused(soundness, tmp_path, missing):
    whole = vocabulary("llama", ("a", 1))
    cut = {
        key: value if isinstance(value, str) else value[:missing] + value[missing + 1 :]
        for key, value in whole.items()
    }
    assert f"no token for the byte 0x{missing:02X}" in soundness.complaint(write(tmp_path, **cut))


@pytest.mark.parametrize("size", [0, 1, 32, 63, 96])
def test_heads_that_a_kernel_would_leave_are_refused(soundness, tmp_path, size):
    rwkv = {"general.architecture": "rwkv7", "rwkv7.block_count": 2}
    assert soundness.complaint(write(tmp_path, **rwkv, **{"rwkv7.wkv.head_size": 64})) is None
    says = soundness.complaint(write(tmp_path, **rwkv, **{"rwkv7.wkv.head_size": size}))
    assert "multiple of 64" in says


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<QQ", 2**33, 1),
        struct.pack("<QQ", 1, 2**33),
        struct.pack("<QQ", 0, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 8, 2**29),
        struct.pack("<QQ", 0, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 0, 2**32),
        struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**32),
    ],
)
def test_a_sparse_giant_is_refused_at_once(soundness, tmp_path, head):
    path = tmp_path / "giant.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + head)
    os.truncate(path, 5 * 2**30)
    started = time.perf_counter()
    says = soundness.complaint(str(path))
    assert time.perf_counter() - started < 5
    assert says is not None


def test_a_file_that_is_cut_short_meanwhile_is_malformed(header, story_path, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(story_path.read_bytes())
    with ic.open_regular(path) as file:
        reader = header._Reader(file)
        path.write_bytes(b"GGUF")
        with pytest.raises(struct.error):
            reader.header()


@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_what_is_no_regular_file_is_refused_without_waiting(plugin_model, tmp_path, kind):
    path = tmp_path / "model.gguf"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "model.gguf")
    with pytest.raises(ic.ModelLoadError):
        plugin_model.LlamaModel.load(str(path), ic.ModelConfig())
    from infercore_llamacpp import gguf

    assert gguf.match(path) < gguf.SURE
