"""Build the pack's `recurrent` and `sliding` models: real kinds of memory, random weights.

They show what an engine does that cannot take tokens back (mamba), or whose layers see only a
window (gemma3). Their tokenizer is the storyteller's. Run: ``python tools/build_kinds.py``.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

DATA = Path(__file__).parents[1] / "models" / "src" / "infercore_models" / "data"
STORYTELLER = DATA / "storyteller" / "storyteller-f32.gguf"
N_EMBD, N_FF, N_HEAD, HEAD_SIZE, N_CTX, WINDOW = 32, 64, 1, 32, 1024, 64
SSM_INNER, SSM_STATE, SSM_RANK, SSM_KERNEL = 2 * N_EMBD, 8, 4, 4


class Writer:
    """A GGUF file with the storyteller's tokenizer and random float32 tensors."""

    def __init__(self, path: Path, architecture: str, n_layer: int, seed: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._random = np.random.default_rng(seed)
        self.file = gguf.GGUFWriter(path, architecture)
        self.file.add_file_type(gguf.LlamaFileType.ALL_F32)
        self.file.add_block_count(n_layer)
        self.file.add_context_length(N_CTX)
        self.file.add_embedding_length(N_EMBD)
        self.file.add_feed_forward_length(N_FF)
        self.file.add_layer_norm_rms_eps(1e-5)
        self.n_vocab = self._copy_tokenizer()
        self.file.add_vocab_size(self.n_vocab)
        self.weight("token_embd", self.n_vocab, N_EMBD, scale=1.0)
        self.weight("output", self.n_vocab, N_EMBD, scale=1.0)
        self.norm("output_norm", N_EMBD)

    def _copy_tokenizer(self) -> int:
        reader = gguf.GGUFReader(STORYTELLER)
        for key, field in reader.fields.items():
            if key.startswith("tokenizer."):
                kind = field.types[0]
                sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
                self.file.add_key_value(key, field.contents(), kind, sub_type=sub)
        return len(reader.fields["tokenizer.ggml.tokens"].data)

    def weight(self, name: str, *shape: int, scale: float = 0.2) -> None:
        data = self._random.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        self.file.add_tensor(f"{name}.weight", data)

    def bias(self, name: str, size: int) -> None:
        data = self._random.standard_normal(size, dtype=np.float32) * np.float32(0.1)
        self.file.add_tensor(f"{name}.bias", data)

    def norm(self, name: str, size: int) -> None:
        self.file.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))

    def raw(self, name: str, data: np.ndarray) -> None:
        self.file.add_tensor(name, data.astype(np.float32))

    def random(self, *shape: int) -> np.ndarray:
        return self._random.standard_normal(shape, dtype=np.float32)

    def close(self) -> None:
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def build_recurrent(path: Path) -> None:
    """Write a mamba model of two layers."""
    out = Writer(path, "mamba", 2, seed=11)
    out.file.add_head_count(0)
    out.file.add_ssm_conv_kernel(SSM_KERNEL)
    out.file.add_ssm_inner_size(SSM_INNER)
    out.file.add_ssm_state_size(SSM_STATE)
    out.file.add_ssm_time_step_rank(SSM_RANK)
    for i in range(2):
        block = f"blk.{i}"
        out.norm(f"{block}.attn_norm", N_EMBD)
        out.weight(f"{block}.ssm_in", 2 * SSM_INNER, N_EMBD)
        out.weight(f"{block}.ssm_conv1d", SSM_INNER, SSM_KERNEL)
        out.bias(f"{block}.ssm_conv1d", SSM_INNER)
        out.weight(f"{block}.ssm_x", SSM_RANK + 2 * SSM_STATE, SSM_INNER)
        out.weight(f"{block}.ssm_dt", SSM_INNER, SSM_RANK)
        out.bias(f"{block}.ssm_dt", SSM_INNER)
        out.raw(f"{block}.ssm_a", -np.exp(out.random(SSM_INNER, SSM_STATE)))
        out.raw(f"{block}.ssm_d", out.random(SSM_INNER))
        out.weight(f"{block}.ssm_out", N_EMBD, SSM_INNER)
    out.close()


def build_sliding(path: Path) -> None:
    """Write a gemma3 model of six layers: five see the last 64 tokens, one sees all."""
    out = Writer(path, "gemma3", 6, seed=12)
    out.file.add_head_count(N_HEAD)
    out.file.add_head_count_kv(N_HEAD)
    out.file.add_key_length(HEAD_SIZE)
    out.file.add_value_length(HEAD_SIZE)
    out.file.add_rope_freq_base(10_000.0)
    out.file.add_sliding_window(WINDOW)
    for i in range(6):
        block = f"blk.{i}"
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            out.norm(f"{block}.{name}", N_EMBD)
        for name in ("attn_q_norm", "attn_k_norm"):
            out.norm(f"{block}.{name}", HEAD_SIZE)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            out.weight(f"{block}.{name}", N_EMBD, N_EMBD)
        out.weight(f"{block}.ffn_gate", N_FF, N_EMBD)
        out.weight(f"{block}.ffn_up", N_FF, N_EMBD)
        out.weight(f"{block}.ffn_down", N_EMBD, N_FF)
    out.close()


if __name__ == "__main__":
    build_recurrent(DATA / "recurrent" / "recurrent-f32.gguf")
    build_sliding(DATA / "sliding" / "sliding-f32.gguf")
