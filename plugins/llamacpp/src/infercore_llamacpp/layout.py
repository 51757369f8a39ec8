"""In which layout weights lie: the engine's choice for this CPU, where that can be trusted.

The engine tries every layout that there is, or none. Where its kernels for the matrix unit crash
(`amx`), none is left, and without the one that interleaves the rows of quantised matrices for AVX
prompts and many sequences at once take a third longer. So that one is asked for by name, for
matrices that are multiplied with and nothing else. The engine is asked whether it can, with
matrices of the same type made up here: what a file says never reaches its assertions.

Source of the names: ``LLM_TENSOR_INFOS`` in ``src/llama-arch.cpp`` of llama.cpp; of the types that
have such a layout: ``ggml/src/ggml-cpu/repack.cpp``.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infercore.weight_files import gguf as headers
from infercore_llamacpp import amx, gguf
from infercore_llamacpp.library import bind
from infercore_llamacpp.soundness import MAX_LAYERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infercore.weight_files.gguf import Tensor

_BUFFER = b"CPU_REPACK"
_CPU = 0  # among the types of devices
_F32, _I32 = 0, 26
_BLOCKS = {2: 32, 8: 32, 20: 32, 39: 32, 10: 256, 12: 256, 13: 256, 14: 256}
"""Numbers of a row that are kept together, by type: Q4_0, Q8_0, IQ4_NL, MXFP4, Q2_K to Q6_K."""
_ROWS = 64  # rows go by some power of two below
_OVERHEAD = 2**14  # bytes that the descriptions of some tensors take
_EXPERTS, _MATRIX = 3, 2  # dimensions
_OUTPUT, _TABLE = "output.weight", "token_embd.weight"
_MULTIPLIED = re.compile(
    r"blk\.(?P<layer>[0-9]{1,3})\.(?P<name>"
    r"attn_(?:q|k|v|qkv|gate|output)|ffn_(?:gate|up|down)(?:_exps|_shexp)?|ffn_gate_up_exps|"
    r"ssm_(?:in|out)|shortconv\.(?:in|out)_proj)\.weight"
)
_OF_EXPERTS = "_exps.weight"

row_bytes = bind("ggml_row_size", ctypes.c_size_t, ctypes.c_int, ctypes.c_int64)


class _Override(ctypes.Structure):
    """Which tensors lie in which buffer; ``llama_model_tensor_buft_override`` of llama.h."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


class _Room(ctypes.Structure):
    """Where tensors are described; ``ggml_init_params`` of ggml.h."""

    _fields_ = (("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("bare", ctypes.c_bool))


_ADDRESS, _SIZE, _KIND = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_device = bind("ggml_backend_dev_by_type", _ADDRESS, _KIND)
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


@dataclass(frozen=True)
class Interleaved:
    """What was asked for by name: ``n_bytes`` of matrices will be copied.

    ``patterns`` are the engine's to read: they must live until the model is loaded.
    """

    patterns: Any
    n_bytes: int


def choose(params: Any, path: str, *, has_gpu: bool) -> Interleaved | None:
    """Let ``params`` have the layouts that suit this CPU, without those that crash here.

    Returns what was asked for by name, None where nothing was. Where a GPU is used, nothing is:
    named layouts would take matrices from it.
    """
    params.use_extra_bufts = amx.is_sound()
    if params.use_extra_bufts or has_gpu:
        return None
    device = _device(_CPU)
    buffer_type = _interleaving(device)
    if buffer_type is None:
        return None
    try:
        tensors = gguf.tensors(path)
    except (headers.MalformedError, OSError):
        return None  # what is wrong with the file, or that it is gone, the engine says
    chosen = _multiplied(tensors, lambda kind: _rows_by(device, buffer_type, *kind))
    patterns = _patterns(chosen, tensors)
    asked = (_Override * (len(patterns) + 1))()  # ends with NULL
    for entry, pattern in zip(asked, patterns, strict=False):
        entry.pattern, entry.buffer_type = pattern.encode(), buffer_type
    params.tensor_buft_overrides = ctypes.addressof(asked)
    return Interleaved(asked, sum(map(n_bytes, chosen)))


def n_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's numbers."""
    return math.prod(tensor.dims[1:]) * int(row_bytes(tensor.kind, tensor.dims[0]))


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


def _multiplied(
    tensors: Sequence[Tensor], rows_by: Callable[[tuple[int, int]], int]
) -> list[Tensor]:
    """Return the matrices that are multiplied with alone, and whose rows go into the layout.

    ``rows_by`` returns of how many rows of a type, in so many dimensions, it takes multiples; 0
    where it takes none. Where a file has no table of tokens, the output's is read as one.
    """
    has_table = any(each.name == _TABLE for each in tensors)
    known: dict[tuple[int, int], int] = {}
    chosen = []
    for each in tensors:
        found = _MULTIPLIED.fullmatch(each.name)
        if found is None and not (each.name == _OUTPUT and has_table):
            continue
        if found is not None and int(found["layer"]) >= MAX_LAYERS:
            continue
        n_dims = _EXPERTS if each.name.endswith(_OF_EXPERTS) else _MATRIX
        block = _BLOCKS.get(each.kind)
        if block is None or len(each.dims) != n_dims or min(each.dims) < 1 or each.dims[0] % block:
            continue
        if each.dims[2:] == (1,):  # the only expert's matrix is flat for the engine
            continue
        kind = (each.kind, n_dims)
        if kind not in known:
            known[kind] = rows_by(kind)
        if known[kind] and not each.dims[1] % known[kind]:
            chosen.append(each)
    return chosen


def _patterns(chosen: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[str]:
    """Return few regular expressions that find those chosen of ``tensors``, and no others.

    The engine compiles each of them for each tensor.
    """
    layers, every = _layers(chosen), _layers(tensors)
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name, of_name in layers.items():
        is_whole = len(of_name) == len(every[name])
        alike["[0-9]+" if is_whole else "|".join(of_name)].append(re.escape(name))
    patterns = [rf"^blk\.({which})\.({'|'.join(names)})\.weight$" for which, names in alike.items()]
    if any(each.name == _OUTPUT for each in chosen):
        patterns.append(r"^output\.weight$")
    return patterns


def _layers(tensors: Sequence[Tensor]) -> dict[str, list[str]]:
    """Return the layers of matrices of each name."""
    layers: defaultdict[str, list[str]] = defaultdict(list)
    for each in tensors:
        found = _MULTIPLIED.fullmatch(each.name)
        if found is not None:
            layers[found["name"]].append(found["layer"])
    return layers


def _rows_by(device: int, buffer_type: int, kind: int, n_dims: int) -> int:
    """Return the least number of rows of such matrices that the layout takes, 0 for none."""
    n = 1
    while n <= _ROWS:
        if _is_multiplied(device, buffer_type, kind, n, n_dims):
            return n
        n *= 2
    return 0


def _is_multiplied(device: int, buffer_type: int, kind: int, n_rows: int, n_dims: int) -> bool:
    """Return whether the CPU multiplies with a matrix of so many rows in the layout."""
    weights, rest = (_begin(_Room(_OVERHEAD, None, True)) for _ in range(2))
    buffer, n = None, _BLOCKS[kind]
    try:
        if n_dims == _EXPERTS:
            matrices = _matrices(weights, kind, n, n_rows, 2)
            row, expert = _matrices(rest, _F32, n, 1, 1), _matrix(rest, _I32, 1, 1)
            product = _products(rest, matrices, row, expert)
        else:
            matrix = _matrix(weights, kind, n, n_rows)
            product = _product(rest, matrix, _matrix(rest, _F32, n, 1))
        buffer = _allocate(weights, buffer_type)
        return bool(buffer and _supports(device, product))
    finally:
        _free_buffer(buffer)
        _end(weights)
        _end(rest)
