"""Write a model of a real shape with random weights: GGUF, and an OpenVINO IR made from it.

The IR is made from weights in q8_0 alone. The hybrid shape (as LFM2: short convolutions between a
few layers of attention) is GGUF alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from pathlib import Path

import attrs
import gguf
import numpy as np


@attrs.frozen(kw_only=True)
class Shape:
    """The sizes of a llama model, or of a hybrid one where ``attention`` names layers.

    The others of a hybrid are short convolutions over ``N_CONV`` tokens.
    """

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_vocab: int = 32_000
    n_ctx_train: int = 16_384
    gain: float = 0.0
    """Of each product, which makes logits span 30; 0.0: weights spread by 0.02, logits by 1."""
    attention: tuple[int, ...] = ()

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @property
    def architecture(self) -> str:
        return "lfm2" if self.attention else "llama"


SHAPES = {
    "tiny": Shape(n_layer=2, n_embd=256, n_head=4, n_head_kv=2, n_ff=512, n_vocab=4_096),
    "0.5b": Shape(n_layer=24, n_embd=1_024, n_head=16, n_head_kv=4, n_ff=4_608),
    "deep": Shape(
        n_layer=32, n_embd=128, n_head=4, n_head_kv=2, n_ff=256, n_vocab=1_024, gain=1.25
    ),
    "1b": Shape(n_layer=24, n_embd=1_536, n_head=24, n_head_kv=8, n_ff=6_144),
    "tiny-hybrid": Shape(
        n_layer=3, n_embd=256, n_head=4, n_head_kv=2, n_ff=512, n_vocab=4_096, attention=(1,)
    ),
    "0.35b-hybrid": Shape(
        n_layer=16,
        n_embd=1_024,
        n_head=16,
        n_head_kv=8,
        n_ff=4_608,
        attention=(2, 5, 8, 10, 12, 14),
    ),
}
KINDS = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "f16": gguf.GGMLQuantizationType.F16,
}
N_CONV = 3
GAIN_OF_LOGITS = 4.5
SPECIAL = ("<|bos|>", "<|eos|>", "<|turn|>", "<|end|>")
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
<|turn|>{{ message.role }}
{% if message.role == 'assistant' and not loop.last -%}
{{ message.content.split('</think>')[-1] }}
{%- else -%}
{{ message.content }}
{%- endif %}<|end|>
{% endfor -%}
{%- if add_generation_prompt %}<|turn|>assistant
{% endif -%}
"""
"""Leaves out what a turn of the past thought, as the templates of reasoning models do."""


def byte_alphabet() -> list[str]:
    """The 256 printable characters that byte-level BPE (GPT-2) writes bytes with."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = itertools.count(256)
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def vocabulary(n_vocab: int) -> tuple[list[str], list[str]]:
    """Tokens and merges: specials, bytes, then pairs of letters, then pairs of pairs."""
    tokens = [*SPECIAL, *byte_alphabet()]
    merges: list[str] = []
    letters = [byte_alphabet()[ord(c)] for c in "etaoinshrdlcumwfgypbvk"]
    starts = [byte_alphabet()[ord(" ")], *letters]
    parts = [letters]
    while len(tokens) < n_vocab:
        longer = []
        for left, right in itertools.product(starts, parts[-1]):
            if len(tokens) == n_vocab:
                break
            tokens.append(left + right)
            merges.append(f"{left} {right}")
            longer.append(left + right)
        parts.append(longer)
    return tokens, merges


def write_gguf(path: Path, shape: Shape, kind: str = "q8_0", seed: int = 0) -> None:
    """Write the model as GGUF with weights of ``kind``, one of `KINDS` (norms in float32)."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    add_metadata(writer, shape)
    rng = np.random.default_rng(seed)
    for name, rows in tensors(shape):
        if isinstance(rows, int):
            writer.add_tensor(name, np.ones(rows, dtype=np.float32))
            continue
        data = rng.standard_normal(rows, dtype=np.float32) * np.float32(spread(shape, name, rows))
        if "conv.weight" in name:
            writer.add_tensor(name, data)
            continue
        writer.add_tensor(name, gguf.quants.quantize(data, KINDS[kind]), raw_dtype=KINDS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def spread(shape: Shape, name: str, rows: tuple[int, ...]) -> float:
    """The standard deviation of a tensor's weights."""
    if not shape.gain:
        return 0.02
    gain = GAIN_OF_LOGITS if name in {"token_embd.weight", "output.weight"} else shape.gain
    return gain / float(np.sqrt(rows[-1]))


def add_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    tokens, merges = vocabulary(shape.n_vocab)
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    if shape.attention:
        writer.add_shortconv_l_cache(N_CONV)
        layers = range(shape.n_layer)
        writer.add_head_count_kv([shape.n_head_kv * (i in shape.attention) for i in layers])
    else:
        writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = gguf.TokenType
    n_special = len(SPECIAL)
    writer.add_token_types(
        [kinds.CONTROL] * n_special + [kinds.NORMAL] * (shape.n_vocab - n_special)
    )
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def tensors(shape: Shape) -> list[tuple[str, tuple[int, int] | int]]:
    """Names and sizes of all tensors: [out, in], or the length of a norm."""
    d = shape.n_embd
    found: list[tuple[str, tuple[int, int] | int]] = [("token_embd", (shape.n_vocab, d))]
    for i in range(shape.n_layer):
        attends = not shape.attention or i in shape.attention
        block = {
            "attn_norm": d,
            **(attention(shape) if attends else convolution(shape)),
            "ffn_norm": d,
            "ffn_gate": (shape.n_ff, d),
            "ffn_up": (shape.n_ff, d),
            "ffn_down": (d, shape.n_ff),
        }
        found += [(f"blk.{i}.{name}", size) for name, size in block.items()]
    end = {"token_embd_norm": d} if shape.attention else {"output_norm": d}
    found += [*end.items(), ("output", (shape.n_vocab, d))]
    return [(f"{name}.weight", size) for name, size in found]


def attention(shape: Shape) -> dict[str, tuple[int, int] | int]:
    d, kv = shape.n_embd, shape.head_size * shape.n_head_kv
    found: dict[str, tuple[int, int] | int] = {
        "attn_q": (d, d),
        "attn_k": (kv, d),
        "attn_v": (kv, d),
        "attn_output": (d, d),
    }
    norms = ("attn_q_norm", "attn_k_norm") if shape.attention else ()
    return found | dict.fromkeys(norms, shape.head_size)


def convolution(shape: Shape) -> dict[str, tuple[int, int] | int]:
    d = shape.n_embd
    return {
        "shortconv.conv": (d, N_CONV),
        "shortconv.in_proj": (3 * d, d),
        "shortconv.out_proj": (d, d),
    }


def write_ir(source: Path, target: Path, shape: Shape) -> None:
    """Turn the GGUF into an OpenVINO IR, with the tokenizer and configuration beside it."""
    import openvino_genai  # noqa: PLC0415  (only for this format)

    openvino_genai.LLMPipeline(str(source), "CPU", enable_save_ov_model=True)
    target.mkdir(exist_ok=True)
    for file in source.parent.glob("openvino_*"):
        shutil.move(str(file), target / file.name)
    write_tokenizer(target / "tokenizer.json", shape)
    config = {
        "model_type": "llama",
        "num_hidden_layers": shape.n_layer,
        "hidden_size": shape.n_embd,
        "num_attention_heads": shape.n_head,
        "num_key_value_heads": shape.n_head_kv,
        "head_dim": shape.head_size,
        "intermediate_size": shape.n_ff,
        "max_position_embeddings": shape.n_ctx_train,
        "vocab_size": shape.n_vocab,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (target / "config.json").write_text(json.dumps(config))
    names = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "add_bos_token": True}
    told = {**names, "chat_template": CHAT_TEMPLATE}
    (target / "tokenizer_config.json").write_text(json.dumps(told))


def write_tokenizer(path: Path, shape: Shape) -> None:
    from tokenizers import (  # noqa: PLC0415
        AddedToken,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
    )

    tokens, merges = vocabulary(shape.n_vocab)
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 0)]
    )
    tokenizer.save(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--kind", choices=KINDS, default="q8_0", help="the weights' type")
    parser.add_argument("--no-ir", action="store_true", help="write the GGUF file alone")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[options.shape]
    file = options.folder / f"{options.shape}-{options.kind}.gguf"
    write_gguf(file, shape, options.kind)
    print(file)
    if not options.no_ir and not shape.attention and options.kind == "q8_0":
        target = options.folder / f"{options.shape}-ir"
        write_ir(file, target, shape)
        print(target)


if __name__ == "__main__":
    main()
