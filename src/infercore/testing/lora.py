"""LoRA adapters, read from a directory as the PEFT library writes it.

A matrix W becomes W + scale * B A, with scale = alpha / rank times what the caller asks for.
Source: Hu et al. 2021, "LoRA", section 4.1; file names and keys of Hugging Face PEFT.
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import ModelFormatError, ModelNotFoundError, UnsupportedFeatureError
from infercore.testing import safetensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infercore.protocols.spi import FloatArray
    from infercore.testing.products import Matrix
    from infercore.values.config import AdapterSpec

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
}
"""Settings of PEFT that change the computation, with the values that are computed here."""


@attrs.frozen(eq=False)
class Delta:
    """What an adapter adds: for each matrix A [rank, n_in] and B [n_out, rank], and the scale."""

    pairs: Mapping[str, tuple[FloatArray, FloatArray]]
    scale: float


def read(spec: AdapterSpec, matrices: Mapping[str, Matrix]) -> Delta:
    """Return the adapter at ``spec.path`` for the model with these matrices.

    Raises `ModelNotFoundError`, `ModelFormatError` for what is no adapter or one of another
    model, `UnsupportedFeatureError` for a kind that is not plain LoRA.
    """
    files = [os.path.join(spec.path, name) for name in (CONFIG, TENSORS)]
    if not os.path.exists(spec.path):
        raise ModelNotFoundError(f"there is no adapter at {spec.path}", path=spec.path)
    if not all(map(os.path.isfile, files)):
        raise _wrong(spec.path, f"it is no folder with {CONFIG} and {TENSORS}")
    config = _settings(files[0])
    pairs = _pairs(safetensors.read(files[1]), matrices, spec.path)
    rank = len(next(iter(pairs.values()))[0])
    by = math.sqrt(rank) if config.get("use_rslora") else rank
    return Delta(pairs, spec.scale * float(config["lora_alpha"]) / by)


def _settings(file: str) -> dict[str, Any]:
    try:
        with open(file, encoding="utf-8") as opened:
            config = dict(json.load(opened))
        float(config["lora_alpha"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _wrong(file, f"its settings cannot be read ({error!r})") from error
    for name, plain in _PLAIN.items():
        if config.get(name, plain[0]) not in plain:
            raise UnsupportedFeatureError(
                feature=f"an adapter with {name}={config[name]!r}", backend="reference"
            )
    return config


def _pairs(
    tensors: Mapping[str, FloatArray], matrices: Mapping[str, Matrix], path: str
) -> dict[str, tuple[FloatArray, FloatArray]]:
    found: dict[str, dict[str, FloatArray]] = {}
    for key, tensor in tensors.items():
        name, _, end = key.removeprefix(_PREFIX).rpartition(".lora_")
        found.setdefault(name, {})[end] = tensor
    pairs = {}
    for name, ends in found.items():
        if name not in matrices or set(ends) != {"A.weight", "B.weight"}:
            raise _wrong(path, f"the model has no matrix {name!r}, or A or B of it is missing")
        a, b = ends["A.weight"], ends["B.weight"]
        n_out, n_in = matrices[name].weight.shape
        if not len(a) or a.shape[1:] != (n_in,) or b.shape != (n_out, len(a)):
            raise _wrong(path, f"{name} is [{n_out}, {n_in}], its A {a.shape} and B {b.shape}")
        pairs[name] = (a, b)
    if len({len(a) for a, _ in pairs.values()}) != 1:
        raise _wrong(path, "it holds no matrices, or such of several ranks")
    return pairs


def _wrong(path: str, why: str) -> ModelFormatError:
    return ModelFormatError(f"{path} is no LoRA adapter for this model: {why}", path=path)
