"""RoPE and YaRN: which values are in force, from the config or the model's own metadata.

Source of the rules: the constructor of ``llama_context`` in llama.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infercore import UnsupportedFeatureError
from infercore_llamacpp.library import api
from infercore_llamacpp.traits import ROPE_SCALING

if TYPE_CHECKING:
    from infercore import ContextConfig
    from infercore_llamacpp.traits import Traits

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
_ATTN = "yarn_attn_factor"
_OF_THE_MIX = ("yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx")
_FROM_MODEL = ("rope_freq_base", "rope_freq_scale", "yarn_orig_ctx")
# Of these architectures the engine reads the header's own numbers, of others it does not.
_READ = {
    "grok": ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"),
    "mistral3": ("yarn_beta_fast", "yarn_beta_slow"),
}


def resolve(config: ContextConfig, traits: Traits) -> dict[str, Any]:
    """Return the rope fields of ``config``; None where the model's own value holds.

    A value that means "from the model" in llama.cpp (0, or below 0) counts as None.
    """
    asked = {field: _asked(field, getattr(config, field)) for field in FIELDS}
    named = [field for field, value in asked.items() if value is not None]
    if named and traits.rope_type == api.LLAMA_ROPE_TYPE_NONE:
        raise UnsupportedFeatureError(
            feature=named[0], backend="llamacpp", hint="this model has no rotary positions"
        )
    own = traits.own("rope.scaling.type")
    if asked["rope_scaling_type"] == "longrope" and own != "longrope":
        raise UnsupportedFeatureError(
            feature="rope_scaling_type='longrope'",
            backend="llamacpp",
            hint="it needs factors that only a model trained with it has",
        )
    _check_used(asked, traits)
    _check_attn_factor(asked, traits)
    return asked


def _check_used(asked: dict[str, Any], traits: Traits) -> None:
    """Refuse what YaRN alone uses where it mixes no frequencies: scaled ones with the plain."""
    found = in_force(asked, traits)
    is_scaled, ext_factor = found["rope_freq_scale"] != 1.0, found["yarn_ext_factor"]
    idle = [] if is_scaled or not ext_factor else ["yarn_ext_factor"]
    if not (is_scaled and ext_factor):
        idle += _OF_THE_MIX
    own = in_force({**asked, **dict.fromkeys(idle)}, traits)
    for field in idle:
        if found[field] != own[field]:
            raise UnsupportedFeatureError(
                feature=f"{field}={found[field]}",
                backend="llamacpp",
                hint="it has no effect where YaRN mixes no frequencies; give "
                "rope_scaling_type='yarn' and a rope_freq_scale below 1 too",
            )


def _check_attn_factor(asked: dict[str, Any], traits: Traits) -> None:
    """Refuse a factor without effect: where YaRN mixes frequencies, the engine has its own."""
    factor = asked[_ATTN]
    if factor is None or not in_force(asked, traits)["yarn_ext_factor"]:
        return
    if factor not in (1.0, in_force({**asked, _ATTN: None}, traits)[_ATTN]):
        raise UnsupportedFeatureError(
            feature=f"{_ATTN}={factor}",
            backend="llamacpp",
            hint="the engine puts its own in its place where yarn_ext_factor is not 0; leave it "
            "out, or give yarn_ext_factor=0",
        )


def _asked(field: str, value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    return None if value < 0 or (value == 0 and field in _FROM_MODEL) else value


def fill(params: Any, chosen: dict[str, Any]) -> None:
    """Write the rope fields that are set into the engine's parameter struct."""
    for field in FIELDS:
        value = chosen[field]
        if value is not None:
            setattr(params, field, ROPE_SCALING.index(value) if isinstance(value, str) else value)


def in_force(chosen: dict[str, Any], traits: Traits) -> dict[str, Any]:
    """Return the rope fields with the model's own values filled in, as the engine does."""
    if traits.rope_type == api.LLAMA_ROPE_TYPE_NONE:
        return dict.fromkeys(FIELDS)
    scaling = chosen["rope_scaling_type"] or traits.own("rope.scaling.type") or "linear"
    own = {
        "rope_scaling_type": scaling,
        "rope_freq_base": traits.own_number("rope.freq_base", 10000.0),
        "rope_freq_scale": _trained_scale(traits),
        **_of_yarn(scaling, traits),
        "yarn_orig_ctx": _orig_ctx(traits),
    }
    found = {field: own[field] if chosen[field] is None else chosen[field] for field in FIELDS}
    if scaling == "none":
        found["rope_freq_scale"] = 1.0
    return found


def _trained_scale(traits: Traits) -> float:
    """Return the scale of positions that the model was trained with."""
    factor = traits.own_number("rope.scaling.factor", traits.own_number("rope.scale_linear", 1.0))
    return 1.0 / factor if factor else 1.0


def _of_yarn(scaling: str, traits: Traits) -> dict[str, float]:
    kind = traits.info.architecture
    found = {
        "yarn_ext_factor": float(scaling == "yarn"),
        "yarn_attn_factor": 1.0,
        "yarn_beta_fast": 8.0 if kind == "grok" else 32.0,
        "yarn_beta_slow": 1.0,
    }
    for field in _READ.get(kind, ()):
        found[field] = traits.own_number(f"rope.scaling.{field}", found[field])
    if found["yarn_ext_factor"] < 0:  # which says that the scaling decides
        found["yarn_ext_factor"] = float(scaling == "yarn")
    return found


def _orig_ctx(traits: Traits) -> int:
    own = int(traits.own_number("rope.scaling.original_context_length", 0))
    return own or traits.info.n_ctx_train
