"""Rotary positions: moving cached keys to other positions by exact rotation.

Keys are cached after their rotation, in the half-split layout of Hugging Face models: element i
turns with element i + r, where r is the number of frequencies.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]


def rotate(keys: Floats, deltas: npt.NDArray[np.int64], inv_freq: Floats) -> Floats:
    """Return ``keys`` [..., head size] moved by ``deltas`` [...] positions."""
    r = len(inv_freq)
    angle = deltas[..., None].astype(np.float64) * inv_freq.astype(np.float64)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    low, high = keys[..., :r], keys[..., r : 2 * r]
    moved = keys.copy()
    moved[..., :r] = low * cos - high * sin
    moved[..., r : 2 * r] = high * cos + low * sin
    return moved


def parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rope_type``, ``rope_theta`` ``factor`` and more, as the config has them."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = dict(found) if isinstance(found, dict) else {}
    scaling["rope_type"] = scaling.get("rope_type") or scaling.get("type") or "default"
    scaling.setdefault("rope_theta", config.get("rope_theta"))
    return scaling


def frequencies(config: Mapping[str, Any], n: int) -> Floats | None:
    """Return the ``n`` inverse frequencies in float32, None for a scaling not known here.

    Source of the formulas: ``modeling_rope_utils`` of transformers (default, linear, llama3).
    """
    rope = parameters(config)
    theta = rope["rope_theta"]
    if theta is None:
        return None
    plain = 1.0 / float(theta) ** (np.arange(n, dtype=np.float64) / n)
    kind = rope["rope_type"]
    if kind == "linear":
        return np.asarray(plain / float(rope["factor"]), dtype=np.float32)
    if kind == "llama3":
        return _llama3(plain, rope)
    return plain.astype(np.float32) if kind == "default" else None


def _llama3(plain: npt.NDArray[np.float64], rope: Mapping[str, Any]) -> Floats:
    factor, low, high = (float(rope[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(rope["original_max_position_embeddings"])
    turns = original * plain / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(plain * (share + (1 - share) / factor), dtype=np.float32)
