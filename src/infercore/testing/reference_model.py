"""The reference's models: a Hugging Face directory of a llama or a BERT, read into memory."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.errors import ModelFormatError
from infercore.testing import (
    bert,
    llama,
    reference_context,
    reference_encoder,
    reference_settings,
)
from infercore.testing.attention import FLASH_BLOCK
from infercore.testing.kv_formats import KV_FORMATS
from infercore.testing.products import adapter_target
from infercore.testing.reference_context import ReferenceContext
from infercore.testing.reference_encoder import EncoderContext
from infercore.testing.reference_sampler import ReferenceSampler
from infercore.testing.reference_tokenizer import ReferenceTokenizer, json_object
from infercore.values.info import MemoryPlan, ModelInfo
from infercore.weight_files import lora, safetensors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infercore.protocols.spi import FloatArray
    from infercore.values.config import ContextConfig, ModelConfig, SamplingConfig
    from infercore.weight_files.lora import Pair

FILES = ("config.json", "model.safetensors", "tokenizer.json")
_POOLING_JSON = os.path.join("1_Pooling", "config.json")
_POOLINGS = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
}
_MODES = {"mean": "mean", "cls": "cls", "last": "lasttoken"}
"""What newer descriptions call them."""


class Loaded:
    """What every model of the reference has: files, a tokenizer, and tensors in memory."""

    def __init__(
        self, path: str, config: ModelConfig, settings: Mapping[str, Any], shape: Any
    ) -> None:
        reference_settings.check_model(config)
        self._shape = shape
        self.files = tuple(os.path.join(path, name) for name in FILES)
        self.tokenizer = ReferenceTokenizer(path, shape.n_vocab, settings)
        self.tensors = safetensors.read(self.files[1])
        _check_finite(self.tensors, path)  # small models: whether check_tensors is asked or not
        self.runtime: Mapping[str, Any] = {"device": "cpu", "precision": "f32"}
        self._weights_bytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def _info(self, settings: Mapping[str, Any], shape: Any, **kind: Any) -> ModelInfo:
        generation = self.tokenizer.generation
        said = {**settings, **{f"generation_config.{name}": v for name, v in generation.items()}}
        return ModelInfo(
            architecture=str(settings["model_type"]),
            n_vocab=shape.n_vocab,
            n_ctx_train=shape.n_ctx_train,
            n_embd=shape.n_embd,
            n_layer=shape.n_layer,
            n_head=shape.n_head,
            n_params=sum(tensor.size for tensor in self.tensors.values()),
            size_bytes=os.path.getsize(self.files[1]),
            metadata={name: json.dumps(value) for name, value in said.items()},
            **kind,
        )

    def _planned(
        self, effective: Mapping[str, Any], kv: int, n_scores: int, pairs: Sequence[Pair] = ()
    ) -> MemoryPlan:
        """Return the plan of a step with ``n_scores`` a head and token, of which 3 copies are held.

        What else a step takes is little beside them.
        """
        n_values = effective["n_ubatch"] * 3 * n_scores * self._shape.n_head
        compute = n_values * np.dtype(np.float32).itemsize
        weights = self._weights_bytes + sum(pair.a.nbytes + pair.b.nbytes for pair in pairs)
        return MemoryPlan(
            weights_bytes=weights,
            kv_bytes=kv,
            compute_bytes=compute,
            peak_bytes=weights + kv + compute,
            n_ctx=effective["n_ctx"],
        )


class ReferenceModel(Loaded):
    """An `EngineModel` in NumPy: a llama."""

    capabilities = reference_context.CAPABILITIES

    def __init__(self, path: str, config: ModelConfig, settings: Mapping[str, Any]) -> None:
        shape = llama.Shape.from_config(settings, path)
        super().__init__(path, config, settings, shape)
        self._llama = llama.Llama(shape, self.tensors, path)
        self.matrices = self._llama.matrices
        self.info = self._info(settings, shape, n_head_kv=shape.n_head_kv)

    def new_context(self, config: ContextConfig) -> ReferenceContext:
        """Return a new context on these weights."""
        return ReferenceContext(self._llama, reference_settings.resolve(config, self._shape))

    def new_sampler(self, config: SamplingConfig) -> ReferenceSampler:
        """Return the reference's own sampler."""
        return ReferenceSampler(config, self.tokenizer)

    def plan_memory(self, config: ContextConfig) -> MemoryPlan:
        """Return the bytes of the weights, a full cache and one step's scores and logits."""
        shape = self._shape
        effective = reference_settings.resolve(config, shape)
        n_ctx = effective["n_ctx"]
        n_values = n_ctx * shape.n_layer * shape.n_head_kv * shape.head_dim
        kv = sum(KV_FORMATS[effective[name]].n_bytes(n_values) for name in ("type_k", "type_v"))
        n_scores = FLASH_BLOCK if effective["flash_attn"] == "on" else n_ctx
        target = adapter_target(self.matrices)
        read = [lora.read(adapter, target) for adapter in effective["adapters"]]
        pairs = [pair for adapter in read for pair in adapter.values()]
        return self._planned(effective, kv, n_scores, pairs)

    def close(self) -> None:
        """Let the weights go."""
        del self._llama, self.matrices, self.tensors


class ReferenceEncoder(Loaded):
    """An `EngineModel` in NumPy: a BERT."""

    capabilities = reference_encoder.CAPABILITIES

    def __init__(self, path: str, config: ModelConfig, settings: Mapping[str, Any]) -> None:
        shape = bert.Shape.from_config(settings, path)
        super().__init__(path, config, settings, shape)
        self._bert = bert.Bert(shape, self.tensors, path)
        self._pooling = _pooling_of(path)
        described = os.path.join(path, _POOLING_JSON)
        if os.path.exists(described):  # other vectors by default are another model
            self.files = (*self.files, described)
        self.info = self._info(settings, shape, n_head_kv=shape.n_head, has_encoder=True)

    def new_context(self, config: ContextConfig) -> EncoderContext:
        """Return a new context on these weights."""
        return EncoderContext(self._bert, self._resolve(config))

    def _resolve(self, config: ContextConfig) -> dict[str, Any]:
        return reference_settings.resolve_encoder(config, self._shape, self._pooling)

    def plan_memory(self, config: ContextConfig) -> MemoryPlan:
        """Return the bytes of the weights and of one step's scores; there is no cache."""
        effective = self._resolve(config)
        return self._planned(effective, 0, effective["n_ubatch"])

    def close(self) -> None:
        """Let the weights go."""
        del self._bert, self.tensors


KINDS = {"llama": ReferenceModel, "bert": ReferenceEncoder}


def load(path: str, config: ModelConfig) -> Loaded:
    """Return the model in the directory ``path``. Raises `ModelFormatError`."""
    settings = json_object(path, "config.json")
    kind = KINDS.get(str(settings.get("model_type")))
    if kind is None:
        raise ModelFormatError(
            f"{path} holds a {settings.get('model_type')!r}; the reference computes "
            f"{' and '.join(KINDS)}",
            path=path,
        )
    return kind(path, config, settings)


def match(path: str) -> float:
    """Return 1 for a directory with a model in Hugging Face's format, else 0."""
    return float(all(os.path.isfile(os.path.join(path, name)) for name in FILES))


def _pooling_of(path: str) -> str:
    """Return the pooling that the directory names, as sentence-transformers writes it."""
    settings = json_object(path, _POOLING_JSON)
    named = str(settings.get("pooling_mode"))
    found = [kind for kind, key in _POOLINGS.items() if settings.get(key) or named == _MODES[kind]]
    return found[0] if len(found) == 1 else "none"


def _check_finite(tensors: Mapping[str, FloatArray], path: str) -> None:
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise ModelFormatError(f"{path}: tensor {name} holds no finite numbers", path=path)
