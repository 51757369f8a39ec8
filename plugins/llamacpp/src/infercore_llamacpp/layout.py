"""Weights laid out anew for this CPU's vectors, where its matrix unit cannot be used (`amx`).

The engine tries every layout there is or none. Without AMX, the one that interleaves the rows of
quantised matrices for AVX would go as well, and with it a quarter of the speed (Q4_0 and Q4_K). So
that one is asked for by name, for matrices that are multiplied with and nothing else; of each kind
and shape the engine is asked whether it can.

Source of the names: ``LLM_TENSOR_INFOS`` in ``src/llama-arch.cpp`` of llama.cpp.
"""

from __future__ import annotations

import ctypes
import re
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

from infercore.weight_files import gguf as headers
from infercore_llamacpp import gguf
from infercore_llamacpp.library import bind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from infercore.weight_files.gguf import Tensor

_BUFFER = b"CPU_REPACK"
_CPU = 0  # among the types of devices
_F32, _I32 = 0, 26
_OVERHEAD = 2**14  # bytes that the descriptions of some tensors take
_EXPERTS, _MATRIX = 3, 2  # dimensions
_MULTIPLIED = re.compile(
    r"output\.weight|blk\.(?P<layer>\d+)\.(?P<name>"
    r"attn_(?:q|k|v|qkv|gate|output)|ffn_(?:gate|up|down)(?:_exps|_shexp)?|ffn_gate_up_exps|"
    r"ssm_(?:in|out)|shortconv\.(?:in|out)_proj)\.weight"
)


class _Override(ctypes.Structure):
    """Which tensors lie in which buffer; ``llama_model_tensor_buft_override`` of llama.h."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


class _Room(ctypes.Structure):
    """Where tensors are described; ``ggml_init_params`` of ggml.h."""

    _fields_ = (("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("bare", ctypes.c_bool))


_ADDRESS, _SIZE, _KIND = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_cpu = bind("ggml_backend_dev_by_type", _ADDRESS, _KIND)
_registry = bind("ggml_backend_dev_backend_reg", _ADDRESS, _ADDRESS)
_function = bind("ggml_backend_reg_get_proc_address", _ADDRESS, _ADDRESS, ctypes.c_char_p)
_name = bind("ggml_backend_buft_name", ctypes.c_char_p, _ADDRESS)
_supports = bind("ggml_backend_dev_supports_op", ctypes.c_bool, _ADDRESS, _ADDRESS)
_allocate = bind("ggml_backend_alloc_ctx_tensors_from_buft", _ADDRESS, _ADDRESS, _ADDRESS)
_free_buffer = bind("ggml_backend_buffer_free", None, _ADDRESS)
_begin = bind("ggml_init", _ADDRESS, _Room)
_end = bind("ggml_free", None, _ADDRESS)
_matrix = bind("ggml_new_tensor_2d", _ADDRESS, _ADDRESS, _KIND, _SIZE, _SIZE)
_matrices = bind("ggml_new_tensor_3d", _ADDRESS, _ADDRESS, _KIND, _SIZE, _SIZE, _SIZE)
_product = bind("ggml_mul_mat", _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS)
_products = bind("ggml_mul_mat_id", _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS)


def interleave(params: Any, path: str) -> object:
    """Ask in ``params`` for interleaved rows where the CPU multiplies with the file's matrices.

    Returns what must live until the model is loaded. Nothing is asked for where this build has no
    such layout.
    """
    device = _cpu(_CPU)
    buffer_type = _interleaving(device)
    if buffer_type is None:
        return None
    try:
        tensors = gguf.tensors(path)
    except headers.MalformedError:
        return None  # what is wrong with the file the engine says
    patterns = _patterns(tensors, partial(_is_multiplied, device, buffer_type))
    asked = (_Override * (len(patterns) + 1))()  # ends with NULL
    for entry, pattern in zip(asked, patterns, strict=False):
        entry.pattern, entry.buffer_type = pattern.encode(), buffer_type
    params.tensor_buft_overrides = ctypes.addressof(asked)
    return asked


def _interleaving(device: int) -> int | None:
    """Return the engine's handle of the layout, None where there is none."""
    found = _function(_registry(device), b"ggml_backend_dev_get_extra_bufts")
    if not found:
        return None
    listed = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(found)(device)
    index = 0
    while listed and listed[index]:  # ends with NULL
        if _name(listed[index]) == _BUFFER:
            return int(listed[index])
        index += 1
    return None


def _patterns(tensors: Iterable[Tensor], fits: Callable[[Tensor], bool]) -> list[str]:
    """Return few regular expressions for the tensors that are multiplied with, and fit.

    The engine compiles each one for each tensor.
    """
    known: dict[tuple[object, ...], bool] = {}
    layers: defaultdict[str, dict[str, bool]] = defaultdict(dict)
    patterns = []
    for each in tensors:
        found = _MULTIPLIED.fullmatch(each.name)
        if found is None:
            continue
        alike = (each.kind, each.dims, each.name.endswith("_exps.weight"))
        if alike not in known:
            known[alike] = fits(each)
        if found["name"] is not None:
            layers[re.escape(found["name"])][found["layer"]] = known[alike]
        elif known[alike]:
            patterns.append(r"^output\.weight$")
    whole = [name for name, of_layer in layers.items() if all(of_layer.values())]
    if whole:
        patterns.append(rf"^blk\.[0-9]+\.({'|'.join(whole)})\.weight$")
    for name, of_layer in layers.items():
        some = [layer for layer, is_fit in of_layer.items() if is_fit]
        if some and name not in whole:
            patterns.append(rf"^blk\.({'|'.join(some)})\.{name}\.weight$")
    return patterns


def _is_multiplied(device: int, buffer_type: int, tensor: Tensor) -> bool:
    """Return whether the CPU can multiply with such a matrix in the layout, as the engine says."""
    takes_ids = tensor.name.endswith("_exps.weight")  # one expert's matrix lies flat in a file
    if len(tensor.dims) != (_EXPERTS if takes_ids else _MATRIX):
        return False
    weights, rest = (_begin(_Room(_OVERHEAD, None, True)) for _ in range(2))
    buffer = None
    try:
        n = tensor.dims[0]
        if takes_ids:
            matrices = _matrices(weights, tensor.kind, *tensor.dims)
            row, expert = _matrices(rest, _F32, n, 1, 1), _matrix(rest, _I32, 1, 1)
            product = _products(rest, matrices, row, expert)
        else:
            matrix = _matrix(weights, tensor.kind, *tensor.dims)
            product = _product(rest, matrix, _matrix(rest, _F32, n, 1))
        buffer = _allocate(weights, buffer_type)  # of which nothing is written
        return bool(buffer and _supports(device, product))
    finally:
        _free_buffer(buffer)
        _end(weights)
        _end(rest)
