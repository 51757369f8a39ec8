"""What a context can do: from the model's traits, the settings in force, and the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infercore import Capabilities
from infercore_llamacpp.library import api
from infercore_llamacpp.traits import PLAIN_KV_TYPES, SHIFTED_KV_TYPES

if TYPE_CHECKING:
    from infercore_llamacpp.traits import Traits

_PLAIN_WEIGHTS = (0, 1, 32)  # LLAMA_FTYPE: all F32, mostly F16, mostly BF16
_SHALLOW = 4  # layers of the model on which the bounds were measured
_GUESSED = 1024  # a flag beside the number, where the file does not say


def of_context(traits: Traits, effective: dict[str, Any], memory: int | None) -> Capabilities:
    """Return what a context with the settings in force can do."""
    holds = traits.has_memory
    moves = (
        traits.moves_positions
        and effective["type_k"] in SHIFTED_KV_TYPES
        and bool(api.llama_memory_can_shift(memory))
    )
    return _common(
        traits,
        kv_remove=_removal(traits, swa_full=effective["swa_full"]),
        max_rollback=_rollback(traits, effective),
        kv_copy=_copying(traits, effective) if holds else "none",
        kv_shift=moves,
        kv_divide=moves,
    )


def of_model(traits: Traits) -> Capabilities:
    """Return what a context with the default settings can do."""
    return _common(
        traits,
        kv_remove=_removal(traits, swa_full=True),
        max_rollback=0,
        kv_copy=_copying(traits, {"n_seq_max": 1}) if traits.has_memory else "none",
        kv_shift=traits.moves_positions,
        kv_divide=traits.moves_positions,
    )


def _common(traits: Traits, **given: Any) -> Capabilities:
    holds = traits.has_memory
    return Capabilities(
        multi_sequence=True,
        scans_cells=holds and traits.has_attention and not traits.is_recurrent,
        state=holds,
        sequence_state=holds,
        logits_all=holds,
        embeddings=True,
        pooling=traits.poolings,
        encoder=traits.info.has_encoder,
        # A GPU is never asked whether to stop; a recurrent state would be left half changed.
        abort=not (traits.has_gpu or traits.is_recurrent),
        live_threads=True,
        kv_types=traits.kv_types,
        flash_attention=("auto", "on", "off") if traits.has_attention else ("auto", "off"),
        gpu_offload=traits.has_gpu,
        lora=True,
        native_sampler=holds,
        **given,
    )


def _removal(traits: Traits, *, swa_full: bool) -> str:
    if not traits.has_memory or traits.is_recurrent:
        return "none"
    return "rollback" if traits.info.sliding_window and not swa_full else "any"


def _rollback(traits: Traits, effective: dict[str, Any]) -> int:
    """Tokens that can be removed behind the furthest position that was reached.

    The sliding layers have room for the window and one compute step, rounded up.
    """
    if _removal(traits, swa_full=effective["swa_full"]) != "rollback":
        return 0
    return int(effective["n_ubatch"])


def _copying(traits: Traits, effective: dict[str, Any]) -> str:
    """Streams are copied whole, and so is a recurrent state; one pool of cells copies any part.

    Where the sliding layers keep their window alone, a part lacks what they had before its end.
    The engine puts copies between streams off, and what makes it carry them out cannot be taken
    back from a recurrent state: a model that has both does not copy.
    """
    streams = effective["n_seq_max"] > 1 and not effective.get("kv_unified")
    if streams and traits.info.is_hybrid:
        return "none"
    narrow = traits.info.sliding_window is not None and not effective.get("swa_full", True)
    return "full" if streams or narrow or traits.is_recurrent else "any"


def tolerance(traits: Traits, effective: dict[str, Any]) -> float:
    """Return how far logits may move when the same tokens come in another split.

    Measured on a model whose logits span 28, in steps of 1 to 300 tokens, then rounded up:
    1.0e-5 with f32 throughout, but 7e-4 where an activation comes from a table of f16 (GELU);
    2.7e-3 with f16; 1.3e-2 with flash attention or a quantised cache; 0.22 with quantised weights.
    What a cache rounds is read by the next layer: with 32 random layers f16 gave 5.7e-2 and flash
    attention 5.8e-2, so these bounds grow with the depth.
    """
    ftype = traits.ftype & ~_GUESSED
    if ftype not in _PLAIN_WEIGHTS:
        return 0.5
    types = {effective["type_k"], effective["type_v"]}
    if effective["flash_attn"] != "off" or not types <= set(PLAIN_KV_TYPES):
        return 5e-2 * _depth(traits)
    return 5e-3 if types == {"f32"} and ftype == 0 else 1e-2 * _depth(traits)


def _depth(traits: Traits) -> float:
    return max(1.0, traits.info.n_layer / _SHALLOW)
