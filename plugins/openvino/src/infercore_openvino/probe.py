"""Finds out whether the cached keys of this model can be moved by rotation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from infercore_openvino import rope
from infercore_openvino.cache import SCRATCH_BLOCK

if TYPE_CHECKING:
    from infercore_openvino.cache import KvCache
    from infercore_openvino.paged_request import PagedRequest
    from infercore_openvino.rope import Floats

_DISTANCE = 37
_TOLERANCES = {"f32": 1e-4, "f16": 4e-3, "bf16": 4e-2}


def keys_rotate(cache: KvCache, request: PagedRequest, inv_freq: Floats | None) -> bool:
    """Run one token at two positions and compare: the keys must be rotations of each other.

    A single token attends to itself alone, so nothing but the rotation may differ, in any layer.
    """
    if inv_freq is None or cache.arrays[0].type_name == "u8":  # turning would round once more
        return False
    near, far = _keys_at(cache, request, 0), _keys_at(cache, request, _DISTANCE)
    delta = np.array(_DISTANCE)
    tolerance = _TOLERANCES[cache.arrays[0].type_name]
    return all(
        2 * len(inv_freq) <= a.shape[1]
        and np.allclose(rope.rotate(a, delta, inv_freq), b, atol=tolerance * np.abs(b).max())
        for a, b in zip(near, far, strict=True)
    )


def _keys_at(cache: KvCache, request: PagedRequest, position: int) -> list[Floats]:
    request.run([1], [position], [0], [1], [[SCRATCH_BLOCK]], ([], []))
    return [a.to_float(a.data[SCRATCH_BLOCK, :, 0]) for a in cache.arrays if a.is_key]
