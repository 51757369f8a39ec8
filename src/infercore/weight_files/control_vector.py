"""Control vectors: GGUF files as llama.cpp's ``cvector-generator`` and repeng write them.

A tensor ``direction.N`` has the numbers that are added to what layer N puts out. Source: Vogel
2024, "Representation Engineering Mistral-7B an Acid Trip"; ``common_control_vector_load`` in
``common/common.cpp`` of llama.cpp.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import numpy as np

from infercore.errors import ModelFormatError, ModelNotFoundError
from infercore.values.files import open_regular
from infercore.weight_files import gguf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO

    import numpy.typing as npt

    from infercore.values.config import AdapterSpec

    FloatArray = npt.NDArray[np.float32]

_ARCHITECTURE, _F32 = "controlvector", 0
_TENSOR = re.compile(r"direction\.([1-9][0-9]{0,8})")


def read(specs: Sequence[AdapterSpec], n_layer: int, n_embd: int) -> FloatArray:
    """Return what the files add to the layers of a model, [n_layer, n_embd], scaled and summed.

    Raises `ModelNotFoundError`, and `ModelFormatError` for a file that holds something else, is
    cut short, or belongs to a model of another width or of more layers.
    """
    total = np.zeros((n_layer, n_embd), dtype=np.float32)
    for spec in specs:
        with np.errstate(over="ignore", invalid="ignore"):
            total += _of_file(spec.path, n_layer, n_embd) * np.float32(spec.scale)
        if not np.isfinite(total).all():
            raise _wrong(spec.path, f"scaled by {spec.scale} it is beyond what float32 holds")
    return total


def _of_file(path: str, n_layer: int, n_embd: int) -> FloatArray:
    if not os.path.exists(path):
        raise ModelNotFoundError(f"there is no control vector at {path}", path=path)
    try:
        with open_regular(path) as file:
            if file.read(len(gguf.MAGIC)) != gguf.MAGIC:
                raise _wrong(path, "it is not a GGUF file")
            return _directions(file, gguf.read(path), path, (n_layer, n_embd))
    except (gguf.MalformedError, gguf.ImplausibleError) as error:
        raise _wrong(path, str(error)) from error
    except OSError as error:
        if isinstance(error, ModelFormatError):
            raise
        raise _wrong(path, f"it cannot be read ({error})") from error


def _directions(
    file: BinaryIO, header: gguf.Header, path: str, shape: tuple[int, int]
) -> FloatArray:
    if header.architecture != _ARCHITECTURE:
        raise _wrong(path, f"it says of itself that it is a {header.architecture!r}")
    if not header.tensors:
        raise _wrong(path, "it holds no directions")
    found = np.zeros(shape, dtype=np.float32)
    n_layer, n_embd = shape
    for tensor in header.tensors.values():
        name = _TENSOR.fullmatch(tensor.name)
        if name is None:
            raise _wrong(
                path, f"its tensor {tensor.name!r} is not a direction of a layer, from 1 on"
            )
        if int(name[1]) >= n_layer:
            raise _wrong(
                path, f"it has {tensor.name!r}, and the model's last layer is {n_layer - 1}"
            )
        if tensor.kind != _F32 or tensor.dims[:1] != (n_embd,) or set(tensor.dims[1:]) - {1}:
            what = f"of shape {tensor.dims} and type {tensor.kind}"
            raise _wrong(path, f"{tensor.name!r} is {what}, not {n_embd} numbers in float32")
        found[int(name[1])] = _numbers(file, tensor, n_embd, path)
    return found


def _numbers(file: BinaryIO, tensor: gguf.Tensor, n: int, path: str) -> FloatArray:
    size = np.dtype(np.float32).itemsize * n
    data = b""
    if tensor.offset + size <= os.fstat(file.fileno()).st_size:
        file.seek(tensor.offset)
        data = file.read(size)
    if len(data) < size:
        raise _wrong(path, f"{tensor.name!r} goes beyond the end of the file")
    numbers = np.frombuffer(data, "<f4").astype(np.float32)
    if not np.isfinite(numbers).all():
        raise _wrong(path, f"{tensor.name!r} has numbers that are none")
    return numbers


def _wrong(path: str, why: str) -> ModelFormatError:
    return ModelFormatError(f"{path} is not a control vector for this model: {why}", path=path)
