"""The number formats that a KV cache can be kept in.

Each turns float32 [..., head_dim] into what is kept, [..., head_dim / block], and back.
Source of the 16-bit and 8-bit formats: ``ggml`` of llama.cpp.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from infercore.protocols.spi import FloatArray

    Kept = npt.NDArray[Any]

BLOCK = 32
_Q8_0 = np.dtype([("scale", "<f2"), ("steps", "i1", (BLOCK,))])
_LARGEST = np.iinfo(np.int8).max


@attrs.frozen(kw_only=True, eq=False)
class KvFormat:
    """One entry of ``dtype`` holds ``block`` values; ``tolerance`` is that of the logits."""

    dtype: np.dtype[Any]
    pack: Callable[[FloatArray], Kept]
    unpack: Callable[[Kept], FloatArray]
    tolerance: float
    block: int = 1

    def n_bytes(self, n_values: int) -> int:
        """Return the bytes that ``n_values`` values take."""
        return n_values // self.block * self.dtype.itemsize


def _floats(kept: Kept) -> FloatArray:
    return kept.astype(np.float32)


def _pack_bf16(values: FloatArray) -> Kept:
    """The upper half of a float32, rounded to nearest."""
    return ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def _unpack_bf16(kept: Kept) -> FloatArray:
    return (kept.astype(np.uint32) << 16).view(np.float32)


def _pack_q8_0(values: FloatArray) -> Kept:
    """Blocks of 32: whole steps from -127 to 127, and the size of a step."""
    blocks = values.reshape(*values.shape[:-1], values.shape[-1] // BLOCK, BLOCK)
    kept = np.empty(blocks.shape[:-1], _Q8_0)
    size = np.abs(blocks).max(axis=-1) / _LARGEST
    kept["scale"] = size
    kept["steps"] = np.rint(blocks / np.maximum(size, np.finfo(np.float32).tiny)[..., None])
    return kept


def _unpack_q8_0(kept: Kept) -> FloatArray:
    blocks: FloatArray = kept["steps"] * kept["scale"].astype(np.float32)[..., None]
    return blocks.reshape(*kept.shape[:-1], kept.shape[-1] * BLOCK)


KV_FORMATS: Mapping[str, KvFormat] = MappingProxyType(
    {
        "f32": KvFormat(
            dtype=np.dtype("<f4"), pack=lambda values: values, unpack=_floats, tolerance=1e-4
        ),
        "f16": KvFormat(
            dtype=np.dtype("<f2"),
            pack=lambda values: values.astype(np.float16),
            unpack=_floats,
            tolerance=5e-2,
        ),
        "bf16": KvFormat(
            dtype=np.dtype("<u2"), pack=_pack_bf16, unpack=_unpack_bf16, tolerance=0.5
        ),
        "q8_0": KvFormat(
            dtype=_Q8_0, pack=_pack_q8_0, unpack=_unpack_q8_0, tolerance=0.5, block=BLOCK
        ),
    }
)
