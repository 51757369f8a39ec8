"""What logits should be: a second llama, written apart from the reference backend.

The reference backend is a subject of the suite like any other, so what it is compared with shares
none of its code. This one computes in float64, one sequence at a time, with neither batches nor
micro-batches nor blocks: whatever a backend does to be quick, these are the numbers.

Source: ``LlamaForCausalLM`` of Hugging Face transformers; LoRA as its PEFT writes it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    Numbers = npt.NDArray[np.float64]
    Places = npt.NDArray[np.int64]

_FILES = ("config.json", "model.safetensors")
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


@attrs.frozen(eq=False)
class Past:
    """Cells of one sequence in order: tokens, positions, and per layer unrotated K, and V.

    ``keys`` and ``values`` are [n_layer, n_cells, n_head_kv, head_dim].
    """

    tokens: Places
    positions: Places
    keys: Numbers
    values: Numbers

    @property
    def end(self) -> int:
        """The next position."""
        return int(self.positions.max(initial=-1)) + 1

    def where(self, kept: npt.NDArray[Any]) -> Past:
        """Return the cells that ``kept`` chooses, by truth or by place."""
        return Past(
            self.tokens[kept], self.positions[kept], self.keys[:, kept], self.values[:, kept]
        )

    def at(self, positions: Places) -> Past:
        """Return the same cells at other positions."""
        return attrs.evolve(self, positions=positions)

    def joined(self, other: Past) -> Past:
        """Return these cells and then ``other``."""
        return Past(
            np.concatenate([self.tokens, other.tokens]),
            np.concatenate([self.positions, other.positions]),
            np.concatenate([self.keys, other.keys], axis=1),
            np.concatenate([self.values, other.values], axis=1),
        )


@attrs.frozen(kw_only=True)
class Yarn:
    """How YaRN mixes scaled positions with plain ones, over ``orig_ctx`` trained positions.

    Source: Peng et al., YaRN (2023), with the bounds as llama.cpp rounds them.
    """

    orig_ctx: int
    ext_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def plain(self, half: int, base: float) -> Numbers:
        """Return how much of each of ``half`` frequencies stays unscaled."""
        low, high = (
            half * math.log(self.orig_ctx / (turns * 2 * math.pi)) / math.log(base)
            for turns in (self.beta_fast, self.beta_slow)
        )
        low, high = max(0, math.floor(low)), min(2 * half - 1, math.ceil(high))
        ramp = (np.arange(half) - low) / max(1e-3, high - low)
        share: Numbers = self.ext_factor * (1 - np.clip(ramp, 0, 1))
        return share


@attrs.frozen(kw_only=True)
class Way:
    """How tokens are computed; None = as the model's own files say.

    ``added`` has numbers [n_embd] that are added to what a layer puts out, by layer.
    """

    rope_base: float | None = None
    rope_scale: float = 1.0
    yarn: Yarn | None = None
    attn_factor: float = 1.0
    causal: bool = True
    added: Mapping[int, Any] = attrs.field(factory=dict)


class Oracle:
    """A llama's weights, and what they make of tokens."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Numbers]) -> None:
        self._weights = weights
        self._n_layer = int(config["num_hidden_layers"])
        self._n_head = int(config["num_attention_heads"])
        self._n_kv = int(config.get("num_key_value_heads") or self._n_head)
        self._n_dim = int(config.get("head_dim") or config["hidden_size"] // self._n_head)
        self._eps = float(config["rms_norm_eps"])
        rope = config.get("rope_parameters") or config
        self.rope_base = float(rope.get("rope_theta", 10_000.0))
        self.config = config
        self._windows = _windows(config, self._n_layer)

    @classmethod
    def of_folder(cls, path: str) -> Oracle | None:
        """Return the oracle of a folder in Hugging Face's format; None if it is no plain llama."""
        files = [Path(path) / name for name in _FILES]
        if not all(file.is_file() for file in files):
            return None
        config = json.loads(files[0].read_text(encoding="utf-8"))
        if not _is_plain(config):
            return None
        return cls(config, _tensors(files[1]))

    @property
    def n_weights(self) -> int:
        """How many numbers the weights are."""
        return sum(weights.size for weights in self._weights.values())

    def with_adapter(self, path: str, scale: float) -> Oracle:
        """Return the oracle of these weights with a LoRA adapter of PEFT's format added."""
        settings, file = (Path(path) / name for name in _ADAPTER)
        deltas, changed = _tensors(file), dict(self._weights)
        alpha = float(json.loads(settings.read_text(encoding="utf-8"))["lora_alpha"])
        for name, a in deltas.items():
            if not name.endswith(".lora_A.weight"):
                continue
            b = deltas[name.replace(".lora_A.", ".lora_B.")]
            target = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            changed[target] = changed[target] + scale * alpha / len(a) * (b @ a)
        return Oracle(self.config, changed)

    def looked_up(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the rows [n, n_embd] of the table of tokens, which the first layer takes in."""
        rows = self._weights["model.embed_tokens.weight"][np.asarray(tokens, np.int64)]
        return np.asarray(rows, dtype=np.float32)

    def nothing(self) -> Past:
        """Return an empty sequence."""
        none = np.empty(0, np.int64)
        cells = np.empty((self._n_layer, 0, self._n_kv, self._n_dim))
        return Past(none, none, cells, cells)

    def append(
        self, past: Past, tokens: Sequence[int], way: Way | None = None
    ) -> tuple[Past, Numbers]:
        """Return ``past`` with ``tokens`` at its end, and their hidden states [n, n_embd].

        `logits` makes rows of them.
        """
        way = way or Way()
        n, w = len(tokens), self._weights
        ids = np.asarray(tokens, np.int64)
        positions = past.end + np.arange(n)
        x = w["model.embed_tokens.weight"][ids]
        everywhere = np.concatenate([past.positions, positions])
        behind = positions[:, None] - everywhere[None, :]
        hidden = behind < 0 if way.causal else np.zeros((n, 1), bool)
        keys, values = [], []
        for i in range(self._n_layer):
            at = f"model.layers.{i}."
            h = self._norm(x, w[at + "input_layernorm.weight"])
            q, k, v = (
                (h @ w[f"{at}self_attn.{name}_proj.weight"].T).reshape(n, -1, self._n_dim)
                for name in "qkv"
            )
            keys.append(k)
            values.append(v)
            read = self._attend(
                self._rotated(q, positions, way),
                self._rotated(np.concatenate([past.keys[i], k]), everywhere, way),
                np.concatenate([past.values[i], v]),
                hidden | (behind >= self._windows[i]),
            )
            x = x + read @ w[at + "self_attn.o_proj.weight"].T
            h = self._norm(x, w[at + "post_attention_layernorm.weight"])
            gate = h @ w[at + "mlp.gate_proj.weight"].T
            up = h @ w[at + "mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
            x = x + way.added.get(i, 0.0)
        added = Past(ids, positions, np.stack(keys), np.stack(values))
        return past.joined(added), self._norm(x, w["model.norm.weight"])

    def logits(self, hidden: Numbers) -> Numbers:
        """Return rows of logits [n, n_vocab] for hidden states [n, n_embd]."""
        head = self._weights.get("lm_head.weight")
        return hidden @ (self._weights["model.embed_tokens.weight"] if head is None else head).T

    def rows(self, tokens: Sequence[int], way: Way | None = None) -> Numbers:
        """Return the logits [n, n_vocab] of each of ``tokens`` in a sequence of their own."""
        return self.logits(self.append(self.nothing(), tokens, way)[1])

    def _norm(self, x: Numbers, weight: Numbers) -> Numbers:
        scaled: Numbers = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self._eps) * weight
        return scaled

    def _rotated(self, x: Numbers, positions: Places, way: Way) -> Numbers:
        """Turn pairs (j, j + half) of each head by position * base ** (-j / half)."""
        half = self._n_dim // 2
        base = way.rope_base or self.rope_base
        plain = 0.0 if way.yarn is None else way.yarn.plain(half, base)
        scales = way.rope_scale * (1 - plain) + plain
        turns = np.outer(positions, scales * base ** (-np.arange(half) / half))
        longer = 1.0 if way.yarn is None else 1 - 0.1 * math.log(way.rope_scale)
        turn = way.attn_factor * longer * np.exp(1j * turns)[:, None, :]
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def _attend(self, q: Numbers, k: Numbers, v: Numbers, hidden: npt.NDArray[np.bool_]) -> Numbers:
        """Return what each token reads, [n, n_head * head_dim]; query heads share K and V."""
        shared = self._n_head // self._n_kv
        k, v = (np.repeat(x, shared, axis=1).transpose(1, 0, 2) for x in (k, v))
        scores = q.transpose(1, 0, 2) @ k.transpose(0, 2, 1) / math.sqrt(self._n_dim)
        scores = np.where(hidden, -np.inf, scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        read: Numbers = (weights @ v).transpose(1, 0, 2).reshape(len(q), -1)
        return read


def _is_plain(config: Mapping[str, Any]) -> bool:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return (
        config.get("model_type") == "llama"
        and config.get("hidden_act", "silu") == "silu"
        and not config.get("attention_bias")
        and not config.get("mlp_bias")
        and rope.get("rope_type", "default") == "default"
    )


def _windows(config: Mapping[str, Any], n_layer: int) -> list[float]:
    """Return for each layer how many tokens one sees, itself among them."""
    kinds = config.get("layer_types") or ["full_attention"] * n_layer
    return [config["sliding_window"] if k == "sliding_attention" else math.inf for k in kinds]


def _tensors(file: Path) -> dict[str, Numbers]:
    """Read a safetensors file: the length of a JSON header, the header, raw numbers."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {name: _tensor(data, start, entry) for name, entry in header.items()}


def _tensor(data: bytes, start: int, entry: Mapping[str, Any]) -> Numbers:
    first, last = entry["data_offsets"]
    raw = data[start + first : start + last]
    if entry["dtype"] == "BF16":  # the upper half of a float32
        numbers = np.left_shift(np.frombuffer(raw, "<u2").astype("<u4"), 16).view("<f4")
    else:
        numbers = np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[entry["dtype"]])
    exact: Numbers = numbers.reshape(entry["shape"]).astype(np.float64)
    return exact
