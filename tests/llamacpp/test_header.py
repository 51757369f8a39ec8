"""The header of a GGUF file as the plugin reads it, and what it refuses on seeing it."""

from __future__ import annotations

import time

import pytest

from llamacpp import random_gguf


@pytest.fixture
def header(plugin_model):
    from infercore_llamacpp import header

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
