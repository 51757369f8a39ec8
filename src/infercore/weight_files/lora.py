"""LoRA adapters: a folder as the PEFT library writes it, or a GGUF file as llama.cpp reads it.

A matrix W becomes W + scale * B A, with scale = alpha / rank times what the caller asks for.
Source: Hu et al. 2021, "LoRA", section 4.1; file names and keys of Hugging Face PEFT; names in
GGUF files of ``convert_lora_to_gguf.py`` and ``src/llama-adapter.cpp`` of llama.cpp.
"""

from __future__ import annotations

import json
import math
import os
import re
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from infercore.errors import ModelFormatError, ModelNotFoundError, UnsupportedFeatureError
from infercore.values.files import open_regular, read_regular
from infercore.weight_files import gguf, safetensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import BinaryIO

    from infercore.protocols.spi import FloatArray
    from infercore.values.config import AdapterSpec
    from infercore.weight_files.gguf import Header, Tensor

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_MAX_JSON_BYTES = 2**24
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

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""What GGUF files call the kinds of models whose matrices have the names below."""
_TURNED = {"llama": {"self_attn.q_proj": "num_attention_heads",
                     "self_attn.k_proj": "num_key_value_heads"}}  # fmt: skip
"""Matrices whose rows GGUF files hold in another order, and the setting with their heads."""
_IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR = re.compile(r"(?:blk\.(\d+)\.(\w+)|(output))\.weight\.lora_([ab])")
_ALORA = "adapter.alora.invocation_tokens"


@attrs.frozen(eq=False)
class Pair:
    """What an adapter adds to a matrix: A [rank, n_in], B [n_out, rank] and their scale."""

    a: FloatArray
    b: FloatArray
    scale: float


@attrs.frozen(kw_only=True)
class Target:
    """The model that an adapter is for: its matrices as [n_out, n_in], and its ``config.json``.

    Matrices have the names of their modules in transformers, as ``model.layers.0.mlp.up_proj``.
    """

    backend: str
    shapes: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any] = attrs.field(factory=dict)

    def refuse(self, feature: str, hint: str = "") -> UnsupportedFeatureError:
        """Return the error for an adapter of a kind that is not computed here."""
        return UnsupportedFeatureError(feature=feature, backend=self.backend, hint=hint)


def read(spec: AdapterSpec, target: Target) -> dict[str, Pair]:
    """Return what the adapter at ``spec.path`` adds to each of the model's matrices.

    Raises `ModelNotFoundError`, `ModelFormatError` for what is no adapter or one of another
    model, `UnsupportedFeatureError` for what is no plain LoRA of known matrices.
    """
    path = spec.path
    if not os.path.exists(path):
        raise ModelNotFoundError(f"there is no adapter at {path}", path=path)
    try:
        pairs = (_of_folder if os.path.isdir(path) else _of_file)(path, target)
    except OSError as error:
        if isinstance(error, ModelFormatError):
            raise
        raise _wrong(path, f"it cannot be read ({error})") from error
    if not pairs:
        raise _wrong(path, "it holds no matrices")
    for name, pair in pairs.items():
        _check_shapes(name, pair, target, path)
    return {name: attrs.evolve(p, scale=p.scale * spec.scale) for name, p in pairs.items()}


def _check_shapes(name: str, pair: Pair, target: Target, path: str) -> None:
    if name not in target.shapes:
        raise _wrong(path, f"the model has no matrix {name!r}")
    n_out, n_in = target.shapes[name]
    rank = len(pair.a)
    if not rank or pair.a.shape != (rank, n_in) or pair.b.shape != (n_out, rank):
        shapes = f"its A {pair.a.shape} and B {pair.b.shape}"
        raise _wrong(path, f"{name} is [{n_out}, {n_in}], {shapes}")


def _wrong(path: str, why: str) -> ModelFormatError:
    return ModelFormatError(f"{path} is not a LoRA adapter for this model: {why}", path=path)


def _paired(
    found: Mapping[str, Mapping[str, FloatArray]], scale_of: Callable[[int], float], path: str
) -> dict[str, Pair]:
    pairs = {}
    for name, ends in found.items():
        if set(ends) != {"a", "b"} or not ends["a"].ndim or not len(ends["a"]):
            raise _wrong(path, f"A or B of {name!r} is missing")
        pairs[name] = Pair(ends["a"], ends["b"], scale_of(len(ends["a"])))
    return pairs


# -- a folder of PEFT --------------------------------------------------------------------------


def _of_folder(path: str, target: Target) -> dict[str, Pair]:
    files = [os.path.join(path, name) for name in (CONFIG, TENSORS)]
    if not all(map(os.path.isfile, files)):
        raise _wrong(path, f"it is not a folder with {CONFIG} and {TENSORS}")
    config = _settings(files[0], target)
    found: dict[str, dict[str, FloatArray]] = {}
    for key, tensor in safetensors.read(files[1]).items():
        name, _, end = key.removeprefix(_PREFIX).rpartition(".lora_")
        if end not in {"A.weight", "B.weight"}:
            raise _wrong(path, f"the tensor {key!r} is neither A nor B of a matrix")
        found.setdefault(name, {})[end[0].lower()] = tensor
    alpha, root = float(config["lora_alpha"]), bool(config.get("use_rslora"))
    return _paired(found, lambda rank: alpha / (math.sqrt(rank) if root else rank), path)


def _settings(file: str, target: Target) -> dict[str, Any]:
    try:
        config = dict(json.loads(read_regular(file, _MAX_JSON_BYTES)))
        float(config["lora_alpha"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise _wrong(file, f"its settings cannot be read ({error!r})") from error
    for name, plain in _PLAIN.items():
        if config.get(name, plain[0]) not in plain:
            raise target.refuse(f"an adapter with {name}={config[name]!r}")
    return config


# -- a GGUF file -------------------------------------------------------------------------------


def _of_file(path: str, target: Target) -> dict[str, Pair]:
    with open_regular(path) as file:
        if file.read(4) != gguf.MAGIC:
            raise _wrong(path, "it is neither a GGUF file nor a folder of PEFT")
        try:
            header = gguf.read(path)
        except (gguf.MalformedError, gguf.ImplausibleError) as error:
            raise _wrong(path, str(error)) from error
        alpha = _check_kind(header, path, target)
        found: dict[str, dict[str, FloatArray]] = {}
        for tensor in header.tensors.values():
            name, end = _module(tensor.name, target)
            numbers = _numbers(file, tensor, path, target)
            found.setdefault(name, {})[end] = numbers
    _unturn(found, header.architecture, target, path)
    return _paired(found, lambda rank: alpha / rank if alpha else 1.0, path)


def _check_kind(header: Header, path: str, target: Target) -> float:
    """Return alpha; 0 where the file has none, which llama.cpp takes for a scale of one."""
    said = [header.metadata.get(key) for key in ("general.type", "adapter.type")]
    if said != ["adapter", "lora"]:
        raise _wrong(path, f"it describes itself as {said[0]!r} of kind {said[1]!r}")
    alpha = header.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float):
        raise _wrong(path, f"its adapter.lora.alpha is {alpha!r}")
    if header.metadata.get(_ALORA):
        hint = f"{path} works only after its invocation tokens"
        raise target.refuse("activated LoRA", hint)
    kind = str(target.config.get("model_type"))
    if kind not in _ARCHITECTURES:
        hint = "give the PEFT folder that the file was made from"
        raise target.refuse(f"a GGUF adapter for a model of type {kind!r}", hint)
    if header.architecture != _ARCHITECTURES[kind]:
        raise _wrong(path, f"it is for {header.architecture!r}, and the model is a {kind!r}")
    return alpha


def _module(name: str, target: Target) -> tuple[str, str]:
    """Return the matrix that a tensor belongs to, and "a" or "b"."""
    found = _TENSOR.fullmatch(name)
    if found is not None and found[3]:
        return "lm_head", found[4]
    if found is None or found[2] not in _IN_LAYER:
        raise target.refuse(
            f"the adapter's tensor {name!r}", "no matrix of the model is known by it"
        )
    return f"model.layers.{int(found[1])}.{_IN_LAYER[found[2]]}", found[4]


def _numbers(file: BinaryIO, tensor: Tensor, path: str, target: Target) -> FloatArray:
    """Return a matrix as float32 [rows, columns]. What is stored in blocks is not read but Q8_0."""
    if tensor.kind not in _DECODERS:
        known = "F32, F16, BF16 and Q8_0"
        raise target.refuse(f"the type {tensor.kind} of {tensor.name!r}", f"give one of {known}")
    n_items, n_bytes, decode = _DECODERS[tensor.kind]
    n = math.prod(tensor.dims)
    if n % n_items:
        raise _wrong(path, f"{tensor.name!r} has {n} numbers, in blocks of {n_items}")
    size = n // n_items * n_bytes
    if tensor.offset + size > os.fstat(file.fileno()).st_size:
        raise _wrong(path, f"{tensor.name!r} goes beyond the end of the file")
    file.seek(tensor.offset)
    return decode(file.read(size)).reshape(tensor.dims[::-1])


def _f32(data: bytes) -> FloatArray:
    return np.frombuffer(data, "<f4").astype(np.float32)


def _f16(data: bytes) -> FloatArray:
    return np.frombuffer(data, "<f2").astype(np.float32)


def _bf16(data: bytes) -> FloatArray:
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(data: bytes) -> FloatArray:
    blocks = np.frombuffer(data, np.dtype([("scale", "<f2"), ("values", "i1", (32,))]))
    return blocks["values"].astype(np.float32) * blocks["scale"].astype(np.float32)[:, None]


_DECODERS: dict[int, tuple[int, int, Callable[[bytes], FloatArray]]] = {
    0: (1, 4, _f32),
    1: (1, 2, _f16),
    8: (32, 34, _q8_0),
    30: (1, 2, _bf16),
}
"""By enum ggml_type: numbers and bytes of a block, and what makes float32 of them."""


def _unturn(
    found: Mapping[str, dict[str, FloatArray]], architecture: str, target: Target, path: str
) -> None:
    """Put rows of B that are turned in pairs side by side into the halves of transformers."""
    for name, ends in found.items():
        setting = _TURNED.get(architecture, {}).get(".".join(name.split(".")[-2:]))
        if setting is None or "b" not in ends:
            continue
        b, known = ends["b"], target.config
        n_head = known.get(setting) or known.get("num_attention_heads")
        if b.ndim != 2 or not n_head or len(b) % (2 * n_head):  # noqa: PLR2004  (pairs)
            raise _wrong(path, f"B of {name} is {b.shape}, and there are {n_head} heads")
        pairs = b.reshape(n_head, len(b) // n_head // 2, 2, b.shape[1])
        ends["b"] = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(b.shape)
