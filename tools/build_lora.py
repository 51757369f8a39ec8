"""Build the pack's `storyteller-lora`: a LoRA adapter for the storyteller, in two formats.

Its numbers are random, with a fixed seed: it tells no better stories, it shows whether an engine
applies an adapter. Run: ``python tools/build_lora.py``; the same bytes come out each time.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np

DATA = Path(__file__).parents[1] / "models" / "src" / "infercore_models" / "data"
BASE = DATA / "storyteller" / "hf" / "config.json"
TARGET = DATA / "storyteller-lora"
SEED, RANK, ALPHA, LAYERS = 21, 2, 4.0, (1, 2)
STRENGTH = 0.22
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Pairs = dict[tuple[int, str], tuple[np.ndarray, np.ndarray]]


def shapes(config: dict) -> dict[str, tuple[int, int]]:
    """Rows and columns of each matrix, by its name in transformers."""
    n, n_ff, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    n_q, n_kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        "self_attn.q_proj": (n_q, n),
        "self_attn.k_proj": (n_kv, n),
        "self_attn.v_proj": (n_kv, n),
        "self_attn.o_proj": (n, n_q),
        "mlp.gate_proj": (n_ff, n),
        "mlp.up_proj": (n_ff, n),
        "mlp.down_proj": (n, n_ff),
    }


def draw(config: dict) -> Pairs:
    """A [rank, n_in] and B [n_out, rank] of each matrix."""
    random = np.random.default_rng(SEED)
    pairs: Pairs = {}
    for layer in LAYERS:
        for name, (n_out, n_in) in shapes(config).items():
            a = random.standard_normal((RANK, n_in), dtype=np.float32)
            b = random.standard_normal((n_out, RANK), dtype=np.float32)
            pairs[layer, name] = (a * np.float32(STRENGTH), b * np.float32(STRENGTH))
    return pairs


def write_peft(folder: Path, pairs: Pairs) -> None:
    """The folder that the PEFT library writes and reads."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "storyteller",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "layers_to_transform": list(LAYERS),
        "target_modules": sorted(name.split(".")[1] for name in GGUF_NAMES),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    tensors = {}
    for (layer, name), ab in pairs.items():
        for letter, tensor in zip("AB", ab, strict=True):
            key = f"base_model.model.model.layers.{layer}.{name}.lora_{letter}.weight"
            tensors[key] = tensor
    write_safetensors(folder / "adapter_model.safetensors", tensors)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, tensor in sorted(tensors.items()):
        end = len(body) + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [len(body), end]}
        body += tensor.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def permuted(b: np.ndarray, n_head: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp rotates them: pairs side by side, not in halves."""
    halves = b.reshape(n_head, 2, len(b) // n_head // 2, b.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(b.shape))


def write_gguf(path: Path, pairs: Pairs, config: dict) -> None:
    """The file that llama.cpp's own converter would write."""
    out = gguf.GGUFWriter(path, "llama")
    out.add_string("general.type", "adapter")
    out.add_string("general.name", "storyteller-lora")
    out.add_string("adapter.type", "lora")
    out.add_float32("adapter.lora.alpha", ALPHA)
    heads = {
        "self_attn.q_proj": config["num_attention_heads"],
        "self_attn.k_proj": config["num_key_value_heads"],
    }
    for (layer, name), (a, b) in pairs.items():
        base = f"blk.{layer}.{GGUF_NAMES[name]}.weight"
        out.add_tensor(f"{base}.lora_a", a)
        out.add_tensor(f"{base}.lora_b", permuted(b, heads[name]) if name in heads else b)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def main() -> None:
    config = json.loads(BASE.read_text())
    pairs = draw(config)
    write_peft(TARGET / "hf", pairs)
    write_gguf(TARGET / "storyteller-lora-f32.gguf", pairs, config)


if __name__ == "__main__":
    main()
