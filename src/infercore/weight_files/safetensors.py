"""Reads a safetensors file: a JSON header with its length before it, then raw numbers.

Source of the format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.errors import ModelFormatError
from infercore.values.files import open_regular

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infercore.protocols.spi import FloatArray

_LENGTH_BYTES = 8
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def read(path: str) -> dict[str, FloatArray]:
    """Return every tensor of the file as float32, by name. Raises `ModelFormatError`."""
    with open_regular(path) as file:
        data = file.read()
    try:
        size = int.from_bytes(data[:_LENGTH_BYTES], "little")
        header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + size])
        body = memoryview(data)[_LENGTH_BYTES + size :]
        return {
            name: _tensor(entry, body) for name, entry in header.items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFormatError(
            f"{path} is not a complete safetensors file ({error}); fetch it again", path=path
        ) from error


def take(
    tensors: Mapping[str, FloatArray], name: str, shape: tuple[int, ...], path: str
) -> FloatArray:
    """Return a tensor that must be there in this shape. Raises `ModelFormatError`."""
    tensor = tensors.get(name)
    if tensor is None or tensor.shape != shape:
        found = "is missing" if tensor is None else f"has shape {tensor.shape}, not {shape}"
        raise ModelFormatError(f"{path}: tensor {name} {found}", path=path)
    return tensor


def _tensor(entry: Mapping[str, Any], body: memoryview) -> FloatArray:
    start, end = entry["data_offsets"]
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    expected = math.prod(entry["shape"]) * dtype.itemsize
    if not 0 <= start <= end <= len(body) or end - start != expected:
        raise ValueError(f"a tensor at {start}..{end} does not fit {len(body)} bytes")
    numbers = np.frombuffer(body[start:end], dtype=dtype).reshape(entry["shape"])
    if entry["dtype"] == "BF16":  # the upper half of a float32
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)
