"""The BERT encoder in plain NumPy, float32 throughout.

Source: ``BertModel`` of Hugging Face transformers, whose tensor names are used here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from infercore.errors import ModelFormatError
from infercore.testing.llama import whole
from infercore.testing.products import Matrix
from infercore.weight_files.safetensors import take

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infercore.protocols.spi import FloatArray, TokenArray
    from infercore.testing.llama import Product

    Attend = Callable[[FloatArray, FloatArray, FloatArray], FloatArray]


_SIZES = {
    "n_vocab": "vocab_size",
    "n_embd": "hidden_size",
    "n_ff": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_types": "type_vocab_size",
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
    n_types: int
    n_ctx_train: int
    norm_eps: float

    @classmethod
    def from_config(cls, config: Mapping[str, Any], path: str) -> Shape:
        """Return the shape. Raises `ModelFormatError` for what is not a plain BERT."""
        try:
            _check_plain(config)
            sizes = {field: whole(config, name) for field, name in _SIZES.items()}
            if sizes["n_embd"] % sizes["n_head"]:
                raise ValueError(f"{sizes['n_head']} heads do not divide {sizes['n_embd']} numbers")
            return cls(**sizes, norm_eps=float(config["layer_norm_eps"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFormatError(
                f"{path} holds no BERT that the reference can compute: {error}", path=path
            ) from error


def _check_plain(config: Mapping[str, Any]) -> None:
    plain: dict[str, tuple[Any, tuple[Any, ...]]] = {  # the default, and what is computed here
        "hidden_act": ("gelu", ("gelu_pytorch_tanh", "gelu_new")),
        "position_embedding_type": ("absolute", ("absolute",)),
        "is_decoder": (False, (False,)),
        "add_cross_attention": (False, (False,)),
        "sliding_window": (None, (None,)),
    }
    for name, (usual, possible) in plain.items():
        value = config.get(name, usual)
        if value not in possible:
            raise ValueError(f"its {name} is {value!r}, not {possible[0]!r}")


@attrs.frozen(eq=False)
class Linear:
    """A matrix and its bias [n_out]."""

    matrix: Matrix
    bias: FloatArray

    def __call__(self, x: FloatArray, product: Product) -> FloatArray:
        """Return ``x`` [n, n_in] multiplied, [n, n_out]."""
        return product(x, self.matrix) + self.bias


@attrs.frozen(eq=False)
class Norm:
    """Layer normalization: mean 0 and variance 1, then scaled and moved."""

    weight: FloatArray
    bias: FloatArray
    eps: float

    def __call__(self, x: FloatArray) -> FloatArray:
        """Return ``x`` [n, n_embd] normalized."""
        centred = x - x.mean(axis=1, keepdims=True)
        variance = np.square(centred).mean(axis=1, keepdims=True)
        scaled = centred / np.sqrt(variance + np.float32(self.eps))
        return np.asarray(scaled * self.weight + self.bias)


@attrs.frozen(kw_only=True, eq=False)
class Layer:
    """The weights of one layer."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    attention_norm: Norm
    up: Linear
    down: Linear
    mlp_norm: Norm


class Bert:
    """Weights and the forward pass; products are passed in, as are those of `Llama`."""

    def __init__(self, shape: Shape, tensors: Mapping[str, FloatArray], path: str) -> None:
        self.shape = s = shape
        self._tensors = {name.removeprefix("bert."): x for name, x in tensors.items()}
        self._path = path
        self._words = self._take("embeddings.word_embeddings.weight", s.n_vocab, s.n_embd)
        self._positions = self._take(
            "embeddings.position_embeddings.weight", s.n_ctx_train, s.n_embd
        )
        types = self._take("embeddings.token_type_embeddings.weight", s.n_types, s.n_embd)
        self._type = types[0]  # one text at a time, so all tokens are of the first kind
        self._norm = self._layer_norm("embeddings.LayerNorm")
        self._layers = [self._layer(f"encoder.layer.{i}.") for i in range(s.n_layer)]

    def _take(self, name: str, *shape: int) -> FloatArray:
        return take(self._tensors, name, shape, self._path)

    def _linear(self, name: str, n_out: int, n_in: int) -> Linear:
        matrix = Matrix(name, self._take(f"{name}.weight", n_out, n_in))
        return Linear(matrix, self._take(f"{name}.bias", n_out))

    def _layer_norm(self, name: str) -> Norm:
        n = self.shape.n_embd
        weight, bias = self._take(f"{name}.weight", n), self._take(f"{name}.bias", n)
        return Norm(weight, bias, self.shape.norm_eps)

    def _layer(self, at: str) -> Layer:
        n, n_ff = self.shape.n_embd, self.shape.n_ff
        return Layer(
            query=self._linear(at + "attention.self.query", n, n),
            key=self._linear(at + "attention.self.key", n, n),
            value=self._linear(at + "attention.self.value", n, n),
            output=self._linear(at + "attention.output.dense", n, n),
            attention_norm=self._layer_norm(at + "attention.output.LayerNorm"),
            up=self._linear(at + "intermediate.dense", n_ff, n),
            down=self._linear(at + "output.dense", n, n_ff),
            mlp_norm=self._layer_norm(at + "output.LayerNorm"),
        )

    def forward(self, tokens: TokenArray, attend: Attend, product: Product) -> FloatArray:
        """Return the last hidden states [n_tokens, n_embd] of one whole text.

        ``attend(q, k, v)`` gets [n_tokens, n_head, head_dim] each, and returns as much.
        """
        n, s = len(tokens), self.shape
        heads = (n, s.n_head, s.n_embd // s.n_head)
        x = self._norm(self._words[tokens] + self._positions[:n] + self._type)
        for layer in self._layers:
            q, k, v = (
                linear(x, product).reshape(heads)
                for linear in (layer.query, layer.key, layer.value)
            )
            read = attend(q, k, v).reshape(x.shape)
            x = layer.attention_norm(x + layer.output(read, product))
            x = layer.mlp_norm(x + layer.down(_gelu(layer.up(x, product)), product))
        return x


def _gelu(x: FloatArray) -> FloatArray:
    """The tanh form of Hendrycks and Gimpel 2016, "Gaussian Error Linear Units"."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
    activated: FloatArray = np.float32(0.5) * x * (1 + np.tanh(inner))
    return activated
