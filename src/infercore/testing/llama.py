"""The llama architecture in plain NumPy, float32 throughout.

Source: ``LlamaForCausalLM`` of Hugging Face transformers, whose tensor names are used here.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, cast

import attrs
import numpy as np

from infercore.errors import ModelFormatError
from infercore.testing.products import Matrix
from infercore.weight_files.safetensors import take

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infercore.protocols.spi import FloatArray, TokenArray

    Product = Callable[[FloatArray, Matrix], FloatArray]
    Attend = Callable[[int, FloatArray, FloatArray, FloatArray], FloatArray]


def whole(config: Mapping[str, Any], name: str) -> int:
    """Return a size in ``config``. Raises `TypeError` or `ValueError` for anything else."""
    size = operator.index(config[name])
    if size < 1:
        raise ValueError(f"its {name} is {size}")
    return size


_SIZES = {
    "n_vocab": "vocab_size",
    "n_embd": "hidden_size",
    "n_ff": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_ctx_train": "max_position_embeddings",
}


@attrs.frozen(kw_only=True)
class Shape:
    """The numbers of ``config.json`` that fix the computation."""

    n_vocab: int
    n_embd: int
    n_ff: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ctx_train: int
    norm_eps: float
    rope_theta: float
    has_own_head: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any], path: str) -> Shape:
        """Return the shape. Raises `ModelFormatError` for what is not a plain llama."""
        rope = _rope_of(config)
        try:
            _check_plain(config, rope)
            sizes = {field: whole(config, name) for field, name in _SIZES.items()}
            kept = {name: value for name, value in config.items() if value is not None}
            n_head = sizes["n_head"]
            usual = {"num_key_value_heads": n_head, "head_dim": sizes["n_embd"] // n_head}
            return cls(
                **sizes,
                n_head_kv=whole({**usual, **kept}, "num_key_value_heads"),
                head_dim=whole({**usual, **kept}, "head_dim"),
                norm_eps=float(config["rms_norm_eps"]),
                rope_theta=float(rope["rope_theta"]),
                has_own_head=not config.get("tie_word_embeddings"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFormatError(
                f"{path} holds no llama that the reference can compute: {error}", path=path
            ) from error


def _rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rope settings, which older files keep at the top."""
    theta = {name: config[name] for name in ("rope_theta",) if name in config}
    parts = (theta, config.get("rope_scaling"), config.get("rope_parameters"))
    said = {name: value for part in parts for name, value in (part or {}).items()}
    return {"rope_theta": 10_000.0, "rope_type": "default", **said}


def _check_plain(config: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    found = {
        "model_type": config["model_type"],
        "hidden_act": config.get("hidden_act", "silu"),
        "attention_bias": config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
        "rope_type": rope["rope_type"],
        "sliding_window": config.get("sliding_window"),
    }
    plain = ("llama", "silu", False, False, "default", None)
    for (name, value), expected in zip(found.items(), plain, strict=True):
        if value != expected:
            raise ValueError(f"its {name} is {value!r}, not {expected!r}")


@attrs.frozen(kw_only=True, eq=False)
class Layer:
    """The weights of one layer, each matrix [n_out, n_in]."""

    attention_norm: FloatArray
    query: Matrix
    key: Matrix
    value: Matrix
    output: Matrix
    mlp_norm: FloatArray
    gate: Matrix
    up: Matrix
    down: Matrix


class Llama:
    """Weights and the forward pass.

    Attention is passed in, as it knows of sequences; so are products, as they know of threads
    and adapters. ``matrices`` has by name what adapters may change.
    """

    def __init__(self, shape: Shape, tensors: Mapping[str, FloatArray], path: str) -> None:
        self.shape = shape
        self.matrices: dict[str, Matrix] = {}
        self._tensors = tensors
        self._path = path
        s = shape
        self._embed = self._take("model.embed_tokens.weight", s.n_vocab, s.n_embd)
        self._norm = self._take("model.norm.weight", s.n_embd)
        self._head = Matrix("model.embed_tokens", self._embed)
        if s.has_own_head:
            self._head = self._matrix("lm_head", s.n_vocab, s.n_embd)
        self._layers = [self._layer(f"model.layers.{i}.") for i in range(s.n_layer)]

    def _take(self, name: str, *shape: int) -> FloatArray:
        return take(self._tensors, name, shape, self._path)

    def _matrix(self, name: str, n_out: int, n_in: int) -> Matrix:
        matrix = Matrix(name, self._take(f"{name}.weight", n_out, n_in))
        self.matrices[name] = matrix
        return matrix

    def _layer(self, at: str) -> Layer:
        s = self.shape
        n_q, n_kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
        return Layer(
            attention_norm=self._take(at + "input_layernorm.weight", s.n_embd),
            query=self._matrix(at + "self_attn.q_proj", n_q, s.n_embd),
            key=self._matrix(at + "self_attn.k_proj", n_kv, s.n_embd),
            value=self._matrix(at + "self_attn.v_proj", n_kv, s.n_embd),
            output=self._matrix(at + "self_attn.o_proj", s.n_embd, n_q),
            mlp_norm=self._take(at + "post_attention_layernorm.weight", s.n_embd),
            gate=self._matrix(at + "mlp.gate_proj", s.n_ff, s.n_embd),
            up=self._matrix(at + "mlp.up_proj", s.n_ff, s.n_embd),
            down=self._matrix(at + "mlp.down_proj", s.n_embd, s.n_ff),
        )

    def forward(
        self,
        tokens: TokenArray | FloatArray,
        attend: Attend,
        product: Product,
        added: FloatArray | None = None,
    ) -> FloatArray:
        """Return the final-norm hidden states [n_tokens, n_embd]; of rows, where they are given.

        ``attend(layer, q, k, v)`` gets [n_tokens, n_heads, head_dim] each, before rope, and
        returns what each head of each token reads, shaped as q. ``added`` [n_layer, n_embd] is
        added to what the layers put out.
        """
        s, n = self.shape, len(tokens)
        x: FloatArray = self._embed[tokens] if tokens.ndim == 1 else cast("FloatArray", tokens)
        for i, layer in enumerate(self._layers):
            h = _rms_norm(x, layer.attention_norm, s.norm_eps)
            q = product(h, layer.query).reshape(n, s.n_head, s.head_dim)
            k = product(h, layer.key).reshape(n, s.n_head_kv, s.head_dim)
            v = product(h, layer.value).reshape(n, s.n_head_kv, s.head_dim)
            x = x + product(attend(i, q, k, v).reshape(n, s.n_head * s.head_dim), layer.output)
            h = _rms_norm(x, layer.mlp_norm, s.norm_eps)
            x = x + product(_silu(product(h, layer.gate)) * product(h, layer.up), layer.down)
            if added is not None:
                x = x + added[i]
        return _rms_norm(x, self._norm, s.norm_eps)

    def logits(self, hidden: FloatArray, product: Product) -> FloatArray:
        """Return the logits [n_rows, n_vocab] of final-norm hidden states."""
        return product(hidden, self._head)


def _rms_norm(x: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
    mean = np.square(x).mean(axis=1, keepdims=True)
    return np.asarray(x / np.sqrt(mean + np.float32(eps)) * weight)


def _silu(x: FloatArray) -> FloatArray:
    half = x * np.float32(0.5)
    activated: FloatArray = half + half * np.tanh(half)
    return activated
