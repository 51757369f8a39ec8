"""What activations, products and sums are computed in: what is asked for, and what comes of it.

The engine takes any setting, and says afterwards that it has it, also where this processor or
these weights make it do without. So whether it really rounds activations is tried out: one matrix
of each kind in the model is multiplied with the rounding and without, and the bits are compared.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

from infercore import InvalidInputError, UnsupportedFeatureError
from infercore_openvino import cpu
from infercore_openvino.engine import BACKEND, shared_core

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infercore import ContextConfig

KV_TYPES = {"f32": ("f32", "f16", "u8"), "bf16": ("bf16", "u8"), "f16": ("f16", "bf16", "u8")}
"""The types of keys and values that go with each number format of products and sums."""
_CAPABILITIES = {"f32": "FP32", "bf16": "BF16", "f16": "FP16"}
GROUP_SIZE = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
_HINT = "INFERENCE_PRECISION_HINT"
_CODES = {"u8", "i8", "u4", "i4", "u2", "nf4"}
_N_ROWS = (1, 16)  # a token, and a prompt: they may have kernels of their own
_PASSED = {"Convert", "Multiply", "Subtract", "Reshape", "Transpose"}


@dataclass(frozen=True)
class Arithmetic:
    """``inference`` is the number format of products and sums.

    ``group_size`` activations share a scale where they are rounded to 8 bits; 0 = they are not,
    None = as the engine does with this model.
    """

    inference: str
    group_size: int | None

    def properties(self) -> dict[str, Any]:
        """Return the engine's properties for it."""
        group = {} if self.group_size is None else {GROUP_SIZE: str(self.group_size)}
        return {_HINT: self.inference, **group}


def asked(config: ContextConfig, device: str, *, n_threads: int | None) -> Arithmetic:
    """Return the arithmetic that ``config`` asks for on ``device``.

    Raises `UnsupportedFeatureError` for "fast", `InvalidInputError` for options of the engine that
    "accurate" excludes.
    """
    chosen = config.backend_options
    inference = chosen.get("inference_precision")
    group_size = chosen.get("dynamic_quantization_group_size")
    if config.precision == "fast":
        hint = "the engine's default is the fastest arithmetic that it has; leave precision out"
        raise UnsupportedFeatureError(
            f"precision='fast' is not supported on backend {BACKEND!r}; {hint}",
            feature="precision",
            backend=BACKEND,
            hint=hint,
        )
    if config.precision == "accurate":
        _check_excluded("inference_precision", inference, "f32")
        _check_excluded("dynamic_quantization_group_size", group_size, 0)
        return Arithmetic("f32", 0)
    if inference is None:
        inference = default_inference(device)
        unable = cpu.divides_by_zero(inference, n_threads, chosen.get("num_streams"))
        if unable or _needs_f32(config, inference):
            inference = "f32"
    return Arithmetic(inference, group_size)


def kv_types(config: ContextConfig, inference: str) -> tuple[str, ...]:
    """Return the types of keys and values that ``config`` may ask for, with its other fields.

    Where the number format is the engine's to choose, a type that does not go with its choice
    makes it float32.
    """
    own = KV_TYPES[inference]
    if config.precision or config.backend_options.get("inference_precision"):
        return own
    return tuple(dict.fromkeys((*own, *KV_TYPES["f32"])))


def _needs_f32(config: ContextConfig, inference: str) -> bool:
    """Return whether a type of keys or values was asked for that ``inference`` excludes."""
    return bool({config.type_k, config.type_v} - {None, *KV_TYPES[inference]})


def check_offered(inference: str, device: str) -> None:
    """Raise `UnsupportedFeatureError` for a number format that ``device`` does not compute in."""
    offered = shared_core().get_property(device, "OPTIMIZATION_CAPABILITIES")
    if _CAPABILITIES[inference] in offered:
        return
    hint = f"{device} has no arithmetic in it here; leave inference_precision out"
    raise UnsupportedFeatureError(
        f"inference_precision={inference!r} is not supported on backend {BACKEND!r}; {hint}",
        feature="inference_precision",
        backend=BACKEND,
        hint=hint,
    )


def _check_excluded(name: str, value: Any, accurate: Any) -> None:
    if value not in {None, accurate}:
        raise InvalidInputError(
            f"backend_options[{name!r}]={value!r} contradicts precision='accurate'; give one of "
            "them",
            field=name,
            value=value,
            allowed=f"{accurate!r}, or precision None",
        )


@functools.cache
def default_inference(device: str) -> str:
    """Return the number format that the engine computes in on ``device``, if nobody asks."""
    found = shared_core().get_property(device, _HINT).to_string()
    return found if found in _CAPABILITIES else "f32"


def default_group_size(core: Any, device: str, model: Any) -> int:
    """Return the group size for ``model`` if nobody asks: its file's, or else the engine's."""
    key = ["runtime_options", GROUP_SIZE]
    try:
        if model.has_rt_info(key):
            return int(model.get_rt_info(key).astype(str))
        return int(core.get_property(device, GROUP_SIZE))
    except (RuntimeError, TypeError, ValueError):  # a device that does not know the property
        return 0


def rounds(core: Any, device: str, model: Any, inference: str, group_size: int) -> bool:
    """Return whether ``group_size`` changes any product of ``model`` with compressed weights."""
    return any(
        not _same(core, device, part, inference, group_size) for part in _one_of_each_kind(model)
    )


def _same(core: Any, device: str, part: Any, inference: str, group_size: int) -> bool:
    plain, rounded = (
        core.compile_model(part, device, Arithmetic(inference, size).properties())
        for size in (0, group_size)
    )
    width = part.inputs[0].get_partial_shape()[-1].get_length()
    rank = part.inputs[0].get_partial_shape().rank.get_length()
    rng = np.random.default_rng(0)
    for n_rows in _N_ROWS:
        rows = rng.standard_normal((n_rows, *(1,) * (rank - 2), width)).astype(np.float32)
        if not np.array_equal(plain(rows)[0], rounded(rows)[0]):
            return False
    return True


def _one_of_each_kind(model: Any) -> Iterator[Any]:
    """Cut out the smallest product for each kind of compressed weights."""
    smallest: dict[tuple[Any, ...], Any] = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "MatMul" and (codes := _codes_of(node)) is not None:
            shape = list(codes.get_output_shape(0))
            kind = (codes.get_element_type().to_string(), len(shape), *shape[2:])
            n = math.prod(shape)
            if kind not in smallest or n < smallest[kind][0]:
                smallest[kind] = n, node
    for _, product in smallest.values():
        yield _alone(product)


def _codes_of(product: Any) -> Any:
    """Return the constant of codes that the weights of ``product`` are worked out from, if any."""
    node = product.input_value(1).get_node()
    while node.get_type_name() in _PASSED:
        node = node.input_value(0).get_node()
    compressed = (
        node.get_type_name() == "Constant" and node.get_element_type().to_string() in _CODES
    )
    return node if compressed else None


def _alone(product: Any) -> Any:
    """Return a graph of the same product, with activations as its input and the same weights."""
    weights = product.input_value(1)
    transposed = product.get_attributes()["transpose_b"]
    width = weights.get_partial_shape()[-1 if transposed else -2].get_length()
    rank = product.input_value(0).get_partial_shape().rank.get_length()
    rows = op.parameter([-1, *(1,) * (rank - 2), width], np.float32)
    return ov.Model([op.result(op.matmul(rows, weights, False, transposed))], [rows])
