"""Rotary positions: moving cached keys to other positions by exact rotation.

Keys are cached after their rotation, in the half-split layout of Hugging Face models: element i
turns with element i + r, where r is the number of frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from infercore import ContextConfig

    Floats = npt.NDArray[np.float32]
    Exact = npt.NDArray[np.float64]


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


def frequencies(config: Mapping[str, Any], n: int) -> Exact | None:
    """Return the ``n`` inverse frequencies, None for a scaling not known here.

    Source of the formulas: ``modeling_rope_utils`` of transformers (default, linear, llama3).
    """
    rope = parameters(config)
    theta = rope["rope_theta"]
    if theta is None:
        return None
    plain = 1.0 / float(theta) ** (np.arange(n) / n)
    kind = rope["rope_type"]
    if kind == "linear":
        return np.asarray(plain / float(rope["factor"]))
    if kind == "llama3":
        return _llama3(plain, rope)
    return plain if kind == "default" else None


def _llama3(plain: Exact, rope: Mapping[str, Any]) -> Exact:
    factor, low, high = (float(rope[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(rope["original_max_position_embeddings"])
    turns = original * plain / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(plain * (share + (1 - share) / factor))


# -- frequencies that a context asks for -------------------------------------------------------

FIELDS = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)
_YARN = {
    "yarn_ext_factor": 0.0,
    "yarn_attn_factor": 1.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
}
_OF_THE_MIX = ("yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx")
_NO_ZERO = frozenset({"rope_freq_base", "rope_freq_scale", "yarn_orig_ctx"})
OWN_KINDS = ("default", "linear")
"""The scalings of a model whose frequencies can be computed anew."""


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies in place of the graph's own, and what cosines and sines are times.

    ``named`` is the field of a context that asks for them. Source of the formulas: ``rope_yarn``
    and ``ggml_rope_yarn_corr_dims`` of llama.cpp.
    """

    base: float
    scale: float
    ext_factor: float
    attn_factor: float
    beta_fast: float
    beta_slow: float
    orig_ctx: int
    named: str = field(compare=False)

    def frequencies(self, n: int) -> Exact:
        """Return ``n`` frequencies, each between the scaled and the plain one."""
        plain = 1.0 / self.base ** (np.arange(n) / n)
        share = self._share(n) * self.ext_factor if self.ext_factor else 0.0
        return np.asarray(plain * (self.scale * (1 - share) + share))

    def _share(self, n: int) -> Exact:
        """Return how much of the plain frequency stands: all of fast turns, none of slow ones."""
        low = max(0, math.floor(self._turning(self.beta_fast, n)))
        high = min(2 * n - 1, math.ceil(self._turning(self.beta_slow, n)))
        ramp = (np.arange(n) - low) / max(0.001, high - low)
        return 1 - np.clip(ramp, 0.0, 1.0)

    def _turning(self, n_turns: float, n: int) -> float:
        """Return the index of the frequency that turns so often over the trained window."""
        return n * math.log(self.orig_ctx / (n_turns * 2 * math.pi)) / math.log(self.base)

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied with."""
        grows = 0.1 * math.log(1 / self.scale) if self.ext_factor else 0.0
        return self.attn_factor * (1 + grows)


def in_force(
    config: ContextConfig, model_config: Mapping[str, Any], n_ctx_train: int
) -> tuple[dict[str, Any], Rope | None]:
    """Return the value of each rope field in force, and the frequencies, None for the graph's own.

    As in llama.cpp, 0 or less leaves a number to the model, and "none" undoes its scaling.
    """
    own = parameters(model_config)
    kind, theta = own["rope_type"], own["rope_theta"]
    is_linear = kind == "linear"
    told: dict[str, Any] = {
        "rope_scaling_type": "none" if kind == "default" else kind,
        "rope_freq_base": theta,
        "rope_freq_scale": 1.0 / float(own["factor"]) if is_linear else 1.0,
        **dict.fromkeys([*_YARN, "yarn_orig_ctx"]),
    }
    asked = asked_of(config)
    if all(value == told[name] or _is_idle(name, value, asked) for name, value in asked.items()):
        return {**told, **asked}, None
    found = {**told, **_YARN, "yarn_orig_ctx": n_ctx_train, **asked}
    if "rope_scaling_type" not in asked and found["rope_freq_scale"] != 1:
        found["rope_scaling_type"] = "linear"
    if found["rope_scaling_type"] == "yarn" and "yarn_ext_factor" not in asked:
        found["yarn_ext_factor"] = 1.0
    if found["rope_scaling_type"] == "none":
        found["rope_freq_scale"] = 1.0
    rope = Rope(
        base=float(found["rope_freq_base"] or 0),
        scale=float(found["rope_freq_scale"]),
        ext_factor=float(found["yarn_ext_factor"]),
        attn_factor=float(found["yarn_attn_factor"]),
        beta_fast=float(found["yarn_beta_fast"]),
        beta_slow=float(found["yarn_beta_slow"]),
        orig_ctx=int(found["yarn_orig_ctx"]),
        named=next(iter(asked)),
    )
    same = (rope.base, rope.scale) == (theta, told["rope_freq_scale"]) and rope.attn_factor == 1
    same = same and not rope.ext_factor and found["rope_scaling_type"] != "longrope"
    return found, None if same else rope


def asked_of(config: ContextConfig) -> dict[str, Any]:
    """Return the rope fields of ``config`` that are not left to the model."""
    return {name: value for name in FIELDS if (value := _asked(name, config)) is not None}


def unused(asked: Mapping[str, Any], fixed: Mapping[str, Any], n_ctx_train: int) -> str | None:
    """Return a field that YaRN alone uses, where it mixes no frequencies: None where none is."""
    is_scaled, ext_factor = fixed["rope_freq_scale"] != 1, fixed["yarn_ext_factor"]
    own = {**_YARN, "yarn_orig_ctx": n_ctx_train}
    if fixed["rope_scaling_type"] == "yarn":
        own["yarn_ext_factor"] = 1.0
    idle = [] if is_scaled or not ext_factor else ["yarn_ext_factor"]
    if not (is_scaled and ext_factor):
        idle += _OF_THE_MIX
    return next((name for name in idle if asked.get(name, own[name]) != own[name]), None)


def _asked(name: str, config: ContextConfig) -> Any:
    value = getattr(config, name)
    if value is None or isinstance(value, str):
        return value
    return None if value < 0 or (value == 0 and name in _NO_ZERO) else value


def _is_idle(name: str, value: Any, asked: Mapping[str, Any]) -> bool:
    """Return whether a value of YaRN changes nothing: its default, or without an ext_factor."""
    mixes = asked.get("rope_scaling_type") == "yarn" or asked.get("yarn_ext_factor")
    if name in _OF_THE_MIX:
        return not mixes
    return name in _YARN and bool(value == _YARN[name]) and not mixes
