"""LoRA adapters in GGUF files: what is read, what is refused, and what damage ends in."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

import infercore as ic
from infercore.weight_files import lora
from llamacpp import random_gguf

N_HEAD, N_HEAD_KV, WIDTH, RANK = 4, 2, 64, 2
SHAPES = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "mlp.down_proj": (64, 96)}
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "mlp.down_proj": "ffn_down"}
METADATA = {
    "general.architecture": "llama",
    "general.type": "adapter",
    "adapter.type": "lora",
    "adapter.lora.alpha": 4.0,
}


def target(model_type="llama"):
    config = {"model_type": model_type, "num_attention_heads": N_HEAD}
    shapes = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in SHAPES.items()}
    return lora.Target(
        backend="some",
        shapes={**shapes, "lm_head": (128, 64)},
        config={**config, "num_key_value_heads": N_HEAD_KV},
    )


def pairs(rank=RANK):
    numbers = np.random.default_rng(3)
    return {
        name: tuple(
            numbers.standard_normal(shape).astype(np.float32)
            for shape in ((rank, n_in), (n_out, rank))
        )
        for name, (n_out, n_in) in SHAPES.items()
    }


def tensors_of(found, layer=1):
    return {
        f"blk.{layer}.{NAMES[name]}.weight.lora_{letter}": tensor
        for name, ends in found.items()
        for letter, tensor in zip("ab", ends, strict=True)
    }


def read(tmp_path, tensors, metadata=METADATA, model_type="llama", scale=1.0):
    path = random_gguf.write_file(tmp_path / "adapter.gguf", metadata, tensors)
    return lora.read(ic.AdapterSpec(path=str(path), scale=scale), target(model_type))


def test_names_are_those_of_modules_and_scales_are_those_of_alpha(tmp_path):
    given = pairs()
    output = {"output.weight.lora_a": np.ones((4, 64), np.float32)}
    output["output.weight.lora_b"] = np.ones((128, 4), np.float32)
    found = read(tmp_path, {**tensors_of(given), **output}, scale=0.5)
    assert set(found) == {*(f"model.layers.1.{name}" for name in SHAPES), "lm_head"}
    down = found["model.layers.1.mlp.down_proj"]
    assert (down.a == given["mlp.down_proj"][0]).all()
    assert (down.b == given["mlp.down_proj"][1]).all()
    assert (down.scale, found["lm_head"].scale) == (0.5 * 4.0 / 2, 0.5 * 4.0 / 4)


def test_without_alpha_the_scale_is_the_caller_s(tmp_path):
    metadata = {key: value for key, value in METADATA.items() if key != "adapter.lora.alpha"}
    found = read(tmp_path, tensors_of(pairs()), metadata, scale=0.25)
    assert {pair.scale for pair in found.values()} == {0.25}


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_rows_of_queries_and_keys_are_put_into_halves(tmp_path, model_type):
    given = pairs()
    metadata = {**METADATA, "general.architecture": model_type}
    found = read(tmp_path, tensors_of(given), metadata, model_type)
    for name, n_head in (("self_attn.q_proj", N_HEAD), ("self_attn.k_proj", N_HEAD_KV)):
        b = given[name][1]
        rows = np.arange(len(b)).reshape(n_head, -1)
        order = np.concatenate([np.concatenate([head[::2], head[1::2]]) for head in rows])
        expected = b[order] if model_type == "llama" else b
        assert (found[f"model.layers.1.{name}"].b == expected).all()


def packed(kind, array):
    if kind == "bfloat16":
        data = (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        blocks = array.reshape(-1, 32)
        scales = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
        values = np.rint(blocks / scales.astype(np.float32)).astype(np.int8)
        data = b"".join(s.tobytes() + v.tobytes() for s, v in zip(scales, values, strict=True))
    return SimpleNamespace(
        dtype=SimpleNamespace(name=kind),
        shape=array.shape,
        nbytes=len(data),
        tobytes=lambda: data,
    )


@pytest.mark.parametrize(("kind", "error"), [("float16", 1e-3), ("bfloat16", 1e-2), ("q8_0", 2e-2)])
def test_numbers_in_fewer_bits(tmp_path, kind, error):
    a, b = pairs(rank=32)["mlp.down_proj"]
    turned = [x.astype(np.float16) if kind == "float16" else packed(kind, x) for x in (a, b)]
    found = read(tmp_path, tensors_of({"mlp.down_proj": turned}))["model.layers.1.mlp.down_proj"]
    assert np.abs(found.a - a).max() < error * np.abs(a).max()
    assert np.abs(found.b - b).max() < error * np.abs(b).max()
    assert (found.a != 0).any()


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"token_embd.weight.lora_a": np.ones((64, 2), np.float32)}, "token_embd.weight.lora_a"),
        ({"blk.0.attn_norm.weight": np.ones((1, 64), np.float32)}, "blk.0.attn_norm.weight"),
        ({"blk.1.attn_q.weight.lora_a": np.ones((2, 64), np.int32)}, "blk.1.attn_q.weight.lora_a"),
    ],
)
def test_what_is_no_known_matrix_is_refused_by_name(tmp_path, changed, names):
    with pytest.raises(ic.UnsupportedFeatureError, match=names):
        read(tmp_path, {**tensors_of(pairs()), **changed})


def test_kinds_that_are_not_computed_are_refused_by_name(tmp_path):
    tensors = tensors_of(pairs())
    with pytest.raises(ic.UnsupportedFeatureError, match="activated LoRA"):
        read(tmp_path, tensors, {**METADATA, "adapter.alora.invocation_tokens": [1, 2]})
    with pytest.raises(ic.UnsupportedFeatureError, match="'gpt2'"):
        read(tmp_path, tensors, model_type="gpt2")


@pytest.mark.parametrize(
    "metadata",
    [
        {**METADATA, "general.architecture": "qwen2"},
        {**METADATA, "general.type": "model"},
        {**METADATA, "general.type": 5},
        {**METADATA, "adapter.type": "lokr"},
        {**METADATA, "adapter.lora.alpha": "much"},
    ],
)
def test_what_is_no_adapter_for_this_model(tmp_path, metadata):
    with pytest.raises(ic.ModelFormatError, match="not a LoRA adapter for this model"):
        read(tmp_path, tensors_of(pairs()), metadata)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: t.pop("blk.1.attn_q.weight.lora_b"),
        lambda t: t.update({"blk.1.attn_q.weight.lora_b": np.ones((63, 2), np.float32)}),
        lambda t: t.update({"blk.1.attn_k.weight.lora_a": np.ones((2, 63), np.float32)}),
        lambda t: t.update({"blk.1.attn_k.weight.lora_a": np.ones((0, 64), np.float32)}),
        lambda t: t.update({"blk.1.ffn_down.weight.lora_b": np.ones(128, np.float32)}),
        lambda t: t.update(tensors_of(pairs(), layer=9)),
        dict.clear,
    ],
)
def test_matrices_that_do_not_fit(tmp_path, spoil):
    tensors = tensors_of(pairs())
    spoil(tensors)
    with pytest.raises(ic.ModelFormatError, match="not a LoRA adapter for this model"):
        read(tmp_path, tensors)


def test_damaged_files_are_typed_errors(tmp_path):
    path = random_gguf.write_file(tmp_path / "a.gguf", METADATA, tensors_of(pairs()))
    sound, draw, ends = path.read_bytes(), random.Random(5), set()
    for _ in range(400):
        data = bytearray(sound[: draw.choice([len(sound), draw.randrange(len(sound))])])
        for _ in range(draw.randrange(4)):
            at = draw.randrange(min(len(data), 900)) if data else 0
            data[at : at + 1] = bytes([draw.randrange(256)])
        path.write_bytes(data)
        try:
            lora.read(ic.AdapterSpec(path=str(path)), target())
            ends.add("read")
        except (ic.ModelFormatError, ic.UnsupportedFeatureError) as error:
            ends.add(type(error).__name__)
    assert ends == {"read", "ModelFormatError", "UnsupportedFeatureError"}


def test_what_is_no_file(tmp_path):
    with pytest.raises(ic.ModelNotFoundError):
        lora.read(ic.AdapterSpec(path=str(tmp_path / "none")), target())
    for path in (tmp_path, "/dev/null"):
        with pytest.raises(ic.ModelFormatError):
            lora.read(ic.AdapterSpec(path=str(path)), target())
