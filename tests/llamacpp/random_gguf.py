"""Writes small GGUF files with random weights, of architectures that the model pack lacks.

All but one have no vocabulary, only ids. Source of the layout: ``docs/gguf.md`` in the ggml
repository; of the names: ``gguf/constants.py`` in llama.cpp.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

N_VOCAB, N_EMBD, N_FF, N_CTX = 128, 64, 128, 512
WINDOW = 32
_TYPES = {
    "float32": 0,
    "float16": 1,
    "q8_0": 8,
    "bfloat16": 30,
    "int8": 24,
    "int16": 25,
    "int32": 26,
    "int64": 27,
    "float64": 28,
}
_KINDS = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}


def write(path: Path, kind: str) -> Path:
    """Write a model of ``kind``, the name of a function below without its underscore."""
    metadata, tensors = globals()[f"_{kind}"](np.random.default_rng(7))
    return write_file(path, metadata, tensors)


def write_file(path: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """Write a GGUF file of tensors of float32, float16 or integers."""
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    head += [_text(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for name, tensor in tensors.items():
        dims = tensor.shape[::-1]
        kind = _TYPES[tensor.dtype.name]
        head.append(_text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset))
        offset += _padded(tensor.nbytes)
    start = b"".join(head)
    data = [tensor.tobytes().ljust(_padded(tensor.nbytes), b"\0") for tensor in tensors.values()]
    path.write_bytes(start.ljust(_padded(len(start)), b"\0") + b"".join(data))
    return path


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list) and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    if isinstance(value, list):
        return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    kind, layout = _KINDS[type(value)]
    return struct.pack("<I", kind) + struct.pack(layout, value)


def _padded(size: int) -> int:
    return -(-size // 32) * 32


def _metadata(arch: str, n_layer: int = 2, n_head: int = 2, **more: Any) -> dict[str, Any]:
    own = {
        "vocab_size": N_VOCAB,
        "context_length": N_CTX,
        "embedding_length": N_EMBD,
        "block_count": n_layer,
        "feed_forward_length": N_FF,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        **more,
    }
    named = {f"{arch}.{key}": value for key, value in own.items()}
    return {"general.architecture": arch, "tokenizer.ggml.model": "none", **named}


class _Tensors(dict[str, Any]):
    def __init__(self, random: np.random.Generator) -> None:
        self.random = random

    def weight(self, name: str, *shape: int, scale: float = 0.2) -> None:
        self[f"{name}.weight"] = (self.random.standard_normal(shape) * scale).astype(np.float32)

    def bias(self, name: str, size: int) -> None:
        self[f"{name}.bias"] = (self.random.standard_normal(size) * 0.1).astype(np.float32)

    def both(self, name: str, *shape: int) -> None:
        self.weight(name, *shape)
        self.bias(name, shape[0])

    def norm(self, name: str, size: int = N_EMBD) -> None:
        self[f"{name}.weight"] = np.ones(size, dtype=np.float32)

    def frame(self) -> None:
        self.weight("token_embd", N_VOCAB, N_EMBD)
        self.norm("output_norm")
        self.weight("output", N_VOCAB, N_EMBD)

    def layer(self, i: int) -> None:
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            self.weight(f"blk.{i}.{name}", N_EMBD, N_EMBD)
        self.weight(f"blk.{i}.ffn_gate", N_FF, N_EMBD)
        self.weight(f"blk.{i}.ffn_up", N_FF, N_EMBD)
        self.weight(f"blk.{i}.ffn_down", N_EMBD, N_FF)
        self.norm(f"blk.{i}.attn_norm")
        self.norm(f"blk.{i}.ffn_norm")


def _llama(random: np.random.Generator, n_head: int = 2) -> tuple[dict[str, Any], _Tensors]:
    tensors = _Tensors(random)
    tensors.frame()
    for i in range(2):
        tensors.layer(i)
    rope = {"rope.dimension_count": N_EMBD // n_head}
    return _metadata("llama", n_head=n_head, **rope), tensors


def _spm(random: np.random.Generator) -> tuple[dict[str, Any], _Tensors]:
    """One with a vocabulary: SentencePiece with a token for each byte."""
    metadata, tensors = _llama(random)
    plain = ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581a", "on", "ce"]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *plain]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(plain)]
    for name in ("token_embd", "output"):
        tensors.weight(name, len(texts), N_EMBD)
    metadata |= {
        "llama.vocab_size": len(texts),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": kinds,
    }
    return metadata, tensors


def _deep(random: np.random.Generator) -> tuple[dict[str, Any], _Tensors]:
    """A model of 32 layers whose logits span about 35, as those of trained ones do."""
    tensors = _Tensors(random)
    tensors.frame()
    for i in range(32):
        tensors.layer(i)
    for name in [name for name in tensors if name.startswith("blk") and tensors[name].ndim > 1]:
        tensors[name] *= np.float32(1.25)
    tensors["output.weight"] *= np.float32(4)
    return _metadata("llama", n_layer=32, **{"rope.dimension_count": N_EMBD // 2}), tensors


def _head16(random: np.random.Generator) -> tuple[dict[str, Any], _Tensors]:
    return _llama(random, n_head=4)


def _mrope(random: np.random.Generator) -> tuple[dict[str, Any], _Tensors]:
    """A model whose positions have several dimensions, as those that look at images."""
    tensors = _Tensors(random)
    tensors.frame()
    for i in range(2):
        tensors.layer(i)
        for name in ("attn_q", "attn_k", "attn_v"):
            tensors.bias(f"blk.{i}.{name}", N_EMBD)
    rope = {"rope.dimension_count": 32, "rope.dimension_sections": [4, 6, 6, 0]}
    return _metadata("qwen2vl", **rope), tensors


def _sliding(random: np.random.Generator) -> tuple[dict[str, Any], _Tensors]:
    tensors = _Tensors(random)
    tensors.frame()
    for i in range(6):
        tensors.layer(i)
        for name in ("post_attention_norm", "post_ffw_norm"):
            tensors.norm(f"blk.{i}.{name}")
        for name in ("attn_q_norm", "attn_k_norm"):
            tensors.norm(f"blk.{i}.{name}", 32)
    more = {"attention.sliding_window": WINDOW, "attention.key_length": 32}
    more |= {"attention.value_length": 32, "rope.freq_base": 10000.0}
    return _metadata("gemma3", n_layer=6, **more), tensors


def _recurrent(random: np.random.Generator) -> tuple[dict[str, Any], _Tensors]:
    inner, state, rank, kernel = 2 * N_EMBD, 16, 4, 4
    tensors = _Tensors(random)
    tensors.frame()
    for i in range(2):
        tensors.norm(f"blk.{i}.attn_norm")
        tensors.weight(f"blk.{i}.ssm_in", 2 * inner, N_EMBD)
        tensors.both(f"blk.{i}.ssm_conv1d", inner, kernel)
        tensors.weight(f"blk.{i}.ssm_x", rank + 2 * state, inner)
        tensors.both(f"blk.{i}.ssm_dt", inner, rank)
        tensors[f"blk.{i}.ssm_a"] = -np.exp(random.standard_normal((inner, state))).astype("f4")
        tensors[f"blk.{i}.ssm_d"] = random.standard_normal(inner).astype("f4")
        tensors.weight(f"blk.{i}.ssm_out", N_EMBD, inner)
    more = {"ssm.conv_kernel": kernel, "ssm.inner_size": inner, "ssm.state_size": state}
    more |= {"ssm.time_step_rank": rank}
    return _metadata("mamba", **more), tensors


def _hybrid(random: np.random.Generator, **more: Any) -> tuple[dict[str, Any], _Tensors]:
    """A model of which two layers attend, and two keep the last inputs of a convolution."""
    tensors = _Tensors(random)
    tensors.frame()
    for i in range(4):
        tensors.layer(i)
        for name in ("attn_q_norm", "attn_k_norm"):
            tensors.norm(f"blk.{i}.{name}", 32)
        if not i % 2:
            for name in [name for name in tensors if name.startswith(f"blk.{i}.attn_")]:
                if name != f"blk.{i}.attn_norm.weight":
                    del tensors[name]
            tensors.weight(f"blk.{i}.shortconv.conv", N_EMBD, 3)
            tensors.weight(f"blk.{i}.shortconv.in_proj", 3 * N_EMBD, N_EMBD)
            tensors.weight(f"blk.{i}.shortconv.out_proj", N_EMBD, N_EMBD)
    tensors["token_embd_norm.weight"] = tensors.pop("output_norm.weight")
    more |= {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2, 0, 2]}
    return _metadata("lfm2", n_layer=4, **more), tensors


def _hybrid_sliding(random: np.random.Generator) -> tuple[dict[str, Any], _Tensors]:
    return _hybrid(random, **{"attention.sliding_window": WINDOW})


def _encoder(random: np.random.Generator, pooling: int = 1) -> tuple[dict[str, Any], _Tensors]:
    tensors = _Tensors(random)
    tensors.weight("token_embd", N_VOCAB, N_EMBD)
    tensors.weight("token_types", 2, N_EMBD)
    tensors.weight("position_embd", N_CTX, N_EMBD)
    norms = ["token_embd_norm"]
    for i in range(2):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors.both(f"blk.{i}.{name}", N_EMBD, N_EMBD)
        tensors.both(f"blk.{i}.ffn_up", N_FF, N_EMBD)
        tensors.both(f"blk.{i}.ffn_down", N_EMBD, N_FF)
        norms += [f"blk.{i}.attn_output_norm", f"blk.{i}.layer_output_norm"]
    for name in norms:
        tensors.norm(name)
        tensors.bias(name, N_EMBD)
    more = {"attention.causal": False, "pooling_type": pooling}
    metadata = _metadata("bert", **more)
    metadata["tokenizer.ggml.token_type_count"] = 2
    return metadata, tensors


def _rank(random: np.random.Generator) -> tuple[dict[str, Any], _Tensors]:
    metadata, tensors = _encoder(random, pooling=4)
    tensors.both("cls", N_EMBD, N_EMBD)
    tensors.both("cls.output", 1, N_EMBD)
    return metadata, tensors


def _adapter(random: np.random.Generator) -> tuple[dict[str, Any], _Tensors]:
    """A LoRA adapter for the ``llama`` kind."""
    tensors = _Tensors(random)
    for i in range(2):
        for letter, shape in (("a", (4, N_EMBD)), ("b", (N_EMBD, 4))):
            name = f"blk.{i}.attn_q.weight.lora_{letter}"
            tensors[name] = random.standard_normal(shape).astype(np.float32)
    metadata = {"general.architecture": "llama", "general.type": "adapter"}
    return {**metadata, "adapter.type": "lora", "adapter.lora.alpha": 4.0}, tensors


def _learned(random: np.random.Generator) -> tuple[dict[str, Any], _Tensors]:
    """A model whose positions are learned: added once, before the first layer."""
    tensors = _Tensors(random)
    tensors.weight("token_embd", N_VOCAB, N_EMBD)
    tensors.weight("position_embd", N_CTX, N_EMBD)
    norms = ["output_norm"]
    for i in range(2):
        tensors.both(f"blk.{i}.attn_qkv", 3 * N_EMBD, N_EMBD)
        tensors.both(f"blk.{i}.attn_output", N_EMBD, N_EMBD)
        tensors.both(f"blk.{i}.ffn_up", N_FF, N_EMBD)
        tensors.both(f"blk.{i}.ffn_down", N_EMBD, N_FF)
        norms += [f"blk.{i}.attn_norm", f"blk.{i}.ffn_norm"]
    for name in norms:
        tensors.norm(name)
        tensors.bias(name, N_EMBD)
    return _metadata("gpt2"), tensors


def _unturned(random: np.random.Generator) -> tuple[dict[str, Any], _Tensors]:
    """A model in which every fourth layer turns no keys."""
    tensors = _Tensors(random)
    tensors.frame()
    for i in range(4):
        tensors.layer(i)
    return _metadata("smollm3", n_layer=4, **{"rope.dimension_count": N_EMBD // 2}), tensors


def _biased(random: np.random.Generator) -> tuple[dict[str, Any], _Tensors]:
    """A model whose positions are a bias of attention (ALiBi)."""
    metadata, tensors = _learned(random)
    del tensors["position_embd.weight"]
    tensors.norm("token_embd_norm")
    tensors.bias("token_embd_norm", N_EMBD)
    own = {key.replace("gpt2.", "bloom."): value for key, value in metadata.items()}
    return {**own, "general.architecture": "bloom"}, tensors


def _t5(random: np.random.Generator, *, decodes: bool = True) -> tuple[dict[str, Any], _Tensors]:
    """An encoder, and a decoder that reads what it made."""
    tensors = _Tensors(random)
    tensors.weight("token_embd", N_VOCAB, N_EMBD)
    for side in ("enc", "dec") if decodes else ("enc",):
        tensors.norm(f"{side}.output_norm")
        for i in range(2):
            parts = ("attn",) if side == "enc" else ("attn", "cross_attn")
            for part in parts:
                tensors.norm(f"{side}.blk.{i}.{part}_norm")
                for letter in "qkvo":
                    tensors.weight(f"{side}.blk.{i}.{part}_{letter}", N_EMBD, N_EMBD)
            if i == 0:
                tensors.weight(f"{side}.blk.{i}.attn_rel_b", 32, 2)
            tensors.norm(f"{side}.blk.{i}.ffn_norm")
            tensors.weight(f"{side}.blk.{i}.ffn_up", N_FF, N_EMBD)
            tensors.weight(f"{side}.blk.{i}.ffn_down", N_EMBD, N_FF)
    more = {"attention.relative_buckets_count": 32, "decoder_start_token_id": 0}
    return _metadata("t5" if decodes else "t5encoder", **more), tensors


def _t5encoder(random: np.random.Generator) -> tuple[dict[str, Any], _Tensors]:
    return _t5(random, decodes=False)
