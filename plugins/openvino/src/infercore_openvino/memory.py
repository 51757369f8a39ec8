"""How many bytes a model and a context take, from the files alone.

Measured on models of a real shape (0.15 to 0.5 billion parameters; weights of 4, 8 and 16 bits):
beside the file's pages the engine keeps each matrix in a layout of its own, made at the first
step. Scales are widened to float32 and packed once more; weights of 16 bits are widened whole
where it computes in float32. The file's pages stay only where the layout is made from them.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infercore import MemoryPlan, ModelNotFoundError, OutOfMemoryError, free_bytes, read_regular
from infercore.weight_files import lora
from infercore_openvino.facts import whole
from infercore_openvino.files import MAX_GRAPH_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infercore import AdapterSpec
    from infercore_openvino.files import ModelFiles
    from infercore_openvino.settings import Settings

_BLOCK_SIZE = 32
_TYPE_BYTES = {"f32": 4, "u8": 1}
_DEFAULT_TYPE_BYTES = 2
_ROUNDED_HEAD_BYTES = 8  # scale and zero point of each head of a token in 8 bits
_FLOAT_BYTES = 4
_LIVE_ACTIVATIONS = 4  # arrays [n_ubatch, width] that exist at the same time, roughly
_LIVE_CACHES = 3  # copies of one layer's keys and values in float32 that a step makes, roughly
_SCALE_BYTES = 2 * _FLOAT_BYTES
_ZERO_POINT_BYTES = {"u8": 1 + _FLOAT_BYTES, "i8": 1 + _FLOAT_BYTES, "u4": 1, "i4": 1}
_OF_TOKENIZER = 20  # bytes in memory for a byte of tokenizer.json, which is read twice
_OF_GRAPH = 4

_CONSTANT = re.compile(rb'<data element_type="(\w+)"[^>]*?shape="([\d, ]*)"[^>]*?size="(\d+)"')
_CODES = ("u8", "i8", "u4", "i4")
_FLOATS = ("f32", "f16", "bf16")
_BITS = {"u8": 8, "i8": 8, "u4": 4, "i4": 4, "f32": 32, "f16": 16, "bf16": 16}


def plan(files: ModelFiles, settings: Settings) -> MemoryPlan:
    """Return the plan for a context of ``settings``, with its window full.

    ``compute_bytes`` are the engine's layout of the weights, what it reads them with, and the
    arrays of a step; estimates, within a few percent of the whole.
    """
    state = _FLOAT_BYTES * files.n_state * settings.n_seq_max
    kinds = {"full": _cache_bytes(files, settings), "recurrent": state}
    kv = sum(kinds.values())
    weights = files.weights_bytes + sum(map(_adapter_bytes, settings.adapters))
    n_streams = settings.properties.get("NUM_STREAMS", 1)
    held = _weights_held(files, settings.inference, n_streams)
    step = _step_bytes(files.config, settings.n_ubatch)
    of_layer = 2 * files.numbers_per_token // max(1, len(files.keys)) * _FLOAT_BYTES
    compute = (
        max(0, held - files.weights_bytes) + step + _n_cells(settings) * of_layer * _LIVE_CACHES
    )
    total = weights + kv + compute
    return MemoryPlan(
        weights_bytes=weights,
        kv_bytes=kv,
        compute_bytes=compute,
        peak_bytes=total,  # nothing is held while loading that is not held in the end
        n_ctx=settings.n_ctx,
        kv_bytes_by_kind={kind: n_bytes for kind, n_bytes in kinds.items() if n_bytes},
    )


def _adapter_bytes(adapter: AdapterSpec) -> int:
    path = adapter.path
    try:
        return os.path.getsize(os.path.join(path, lora.TENSORS) if os.path.isdir(path) else path)
    except OSError as error:
        raise ModelNotFoundError(f"there is no adapter at {path}", path=path) from error


def check_cache_fits(files: ModelFiles, settings: Settings) -> None:
    """Raise `OutOfMemoryError` for a cache that free memory has no room for once it is full.

    The system grants it at first, and ends the process when it is filled.
    """
    n_bytes, free = _cache_bytes(files, settings), free_bytes(address_space=False)
    if n_bytes > free:
        raise OutOfMemoryError(
            f"a KV cache of n_ctx={settings.n_ctx} takes {n_bytes:,} bytes and {free:,} are free; "
            "give a smaller n_ctx or type_k and type_v"
        )


def _n_cells(settings: Settings) -> int:
    return (-(-settings.n_ctx // _BLOCK_SIZE) + settings.n_seq_max + 1) * _BLOCK_SIZE


def _cache_bytes(files: ModelFiles, settings: Settings) -> int:
    n_bytes = files.numbers_per_token * _TYPE_BYTES.get(settings.kv_type, _DEFAULT_TYPE_BYTES)
    if settings.kv_type == "u8":
        n_bytes += sum(math.prod(sizes[:-1]) for sizes in files.keys if sizes) * _ROUNDED_HEAD_BYTES
    return _n_cells(settings) * n_bytes


def _step_bytes(model: dict[str, Any], n_ubatch: int) -> int:
    width = max(whole(model, "intermediate_size"), whole(model, "hidden_size"))
    return (n_ubatch * width * _LIVE_ACTIVATIONS + whole(model, "vocab_size")) * _FLOAT_BYTES


# -- the weights -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Constant:
    kind: str
    rows: int
    is_narrow: bool  # its last dimension is 1: a number for each row or group
    n: int

    @property
    def n_bytes(self) -> int:
        return self.n * _BITS[self.kind] // 8


def _constants(xml: str) -> Iterator[_Constant]:
    graph = read_regular(xml, MAX_GRAPH_BYTES)
    for found in _CONSTANT.finditer(graph):
        kind, shape = found[1].decode(), [int(d) for d in found[2].split(b",") if d.strip()]
        if kind in _BITS and len(shape) > 1:
            n = int(found[3]) * 8 // _BITS[kind]
            yield _Constant(kind, shape[0], shape[-1] == 1, n)


def _weights_held(files: ModelFiles, precision: str, n_streams: int) -> int:
    """Return the bytes of weights in memory, the file's pages among them, and of the tokenizer.

    Each stream has scales and zero points of its own, unpacked.
    """
    constants = list(_constants(files.xml))
    codes = [c for c in constants if c.kind in _CODES and not c.is_narrow]
    compressed = bool(codes)
    narrow = [c for c in constants if c.is_narrow and compressed]
    floats = [c for c in constants if c.kind in _FLOATS and not (compressed and c.is_narrow)]
    read = sum(c.n_bytes for c in codes) - _looked_up(codes, files)
    held = 2 * read  # in the file's pages, and packed
    held += n_streams * sum(_SCALE_BYTES * c.n for c in narrow if c.kind in _FLOATS)
    held += n_streams * sum(_ZERO_POINT_BYTES[c.kind] * c.n for c in narrow if c.kind in _CODES)
    held += _floats_held(floats, files, precision)
    return held + _read_bytes(files)


def _floats_held(floats: list[_Constant], files: ModelFiles, precision: str) -> int:
    """Return the bytes of weights that are numbers: as they were read, and packed.

    Tables of the vocabulary's size are used as they are.
    """
    n_vocab = files.config.get("vocab_size")
    packed = _FLOAT_BYTES if precision == "f32" else _DEFAULT_TYPE_BYTES
    as_read = sum(_FLOAT_BYTES * c.n for c in floats)
    return as_read + sum(packed * c.n for c in floats if c.rows != n_vocab)


def _looked_up(codes: list[_Constant], files: ModelFiles) -> int:
    """Return the bytes of the table that tokens are looked up in, where nothing else uses it."""
    n_vocab = files.config.get("vocab_size")
    tables = [c.n_bytes for c in codes if c.rows == n_vocab]
    return tables[0] if len(tables) > 1 else 0


def _read_bytes(files: ModelFiles) -> int:
    """Return the bytes that the tokenizer and the graph take, once they are read."""
    tokenizer = files.tokenizer_json
    size = os.path.getsize(tokenizer) if os.path.isfile(tokenizer) else 0
    return _OF_TOKENIZER * size + _OF_GRAPH * os.path.getsize(files.xml)
