"""The reference model: a Hugging Face llama directory, read into memory."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.errors import DecodeAbortedError, ModelFormatError
from infercore.testing import reference_settings, safetensors
from infercore.testing.llama import Llama, Shape
from infercore.testing.reference_context import CAPABILITIES, ReferenceContext
from infercore.testing.reference_tokenizer import ReferenceTokenizer
from infercore.values.info import MemoryPlan, ModelInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infercore.protocols.spi import FloatArray
    from infercore.values.config import ContextConfig, ModelConfig

FILES = ("config.json", "model.safetensors", "tokenizer.json")


class ReferenceModel:
    """An `EngineModel` in NumPy."""

    capabilities = CAPABILITIES

    def __init__(self, path: str, config: ModelConfig) -> None:
        reference_settings.check_model(config)
        _report(config, 0.0)
        settings = _read_settings(path)
        shape = Shape.from_config(settings, path)
        self.files = tuple(os.path.join(path, name) for name in FILES)
        self.tokenizer = ReferenceTokenizer(path, shape.n_vocab, settings)
        tensors = safetensors.read(self.files[1])
        if config.check_tensors:
            _check_finite(tensors, path)
        self._llama: Llama | None = Llama(shape, tensors, path)
        self._weights_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.runtime: Mapping[str, Any] = {"device": "cpu", "precision": "f32"}
        self.info = _info(shape, settings, self.files[1], tensors)
        _report(config, 1.0)

    def new_context(self, config: ContextConfig) -> ReferenceContext:
        """Return a new context on these weights."""
        if self._llama is None:
            raise ValueError("the model is closed")
        return ReferenceContext(self._llama, reference_settings.resolve(config, self._llama.shape))

    def plan_memory(self, config: ContextConfig) -> MemoryPlan:
        """Return the bytes of the weights, a full cache and one step's scores and logits."""
        if self._llama is None:
            raise ValueError("the model is closed")
        shape = self._llama.shape
        effective = reference_settings.resolve(config, shape)
        n_ctx, n_ubatch = effective["n_ctx"], effective["n_ubatch"]
        cell = shape.n_layer * shape.n_head_kv * shape.head_dim
        widths = {"f32": 4, "f16": 2}
        kv = n_ctx * cell * (widths[effective["type_k"]] + widths[effective["type_v"]])
        compute = 4 * n_ubatch * (3 * n_ctx * shape.n_head + 3 * shape.n_ff + shape.n_vocab)
        return MemoryPlan(
            weights_bytes=self._weights_bytes,
            kv_bytes=kv,
            compute_bytes=compute,
            peak_bytes=self._weights_bytes + kv + compute,
            n_ctx=n_ctx,
            kv_bytes_by_kind={"full": kv},
        )

    def close(self) -> None:
        """Let the weights go."""
        self._llama = None


def match(path: str) -> float:
    """Return 1 for a directory with a model in Hugging Face's format, else 0."""
    return float(all(os.path.isfile(os.path.join(path, name)) for name in FILES[:2]))


def _read_settings(path: str) -> dict[str, Any]:
    name = os.path.join(path, "config.json")
    try:
        with open(name, encoding="utf-8") as file:
            settings = json.load(file)
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{name} cannot be read: {error}", path=path) from error
    if not isinstance(settings, dict):
        raise ModelFormatError(f"{name} holds no JSON object", path=path)
    return settings


def _check_finite(tensors: Mapping[str, FloatArray], path: str) -> None:
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise ModelFormatError(f"{path}: tensor {name} holds no finite numbers", path=path)


def _report(config: ModelConfig, fraction: float) -> None:
    if config.progress is not None and config.progress(fraction) is False:
        raise DecodeAbortedError("loading was cancelled", resident_tokens=0)


def _info(
    shape: Shape, settings: Mapping[str, Any], file: str, tensors: Mapping[str, FloatArray]
) -> ModelInfo:
    return ModelInfo(
        architecture=str(settings["model_type"]),
        n_vocab=shape.n_vocab,
        n_ctx_train=shape.n_ctx_train,
        n_embd=shape.n_embd,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_head_kv=shape.n_head_kv,
        n_params=sum(tensor.size for tensor in tensors.values()),
        size_bytes=os.path.getsize(file),
        description="llama in float32, computed by NumPy",
        metadata={name: json.dumps(value) for name, value in settings.items()},
    )
