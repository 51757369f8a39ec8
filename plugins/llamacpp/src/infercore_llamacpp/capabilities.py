"""What a context can do: from the model's traits, the settings in force, and the engine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from infercore import Capabilities
from infercore_llamacpp import rope
from infercore_llamacpp.library import api
from infercore_llamacpp.traits import SHIFTED_KV_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infercore_llamacpp.traits import Traits

_SHALLOW = 4  # layers of the models that the bounds below are for
_GROWTH = 0.75  # of the bounds, a power of the number of layers
_EXACT = 5e-3  # f32 throughout; an activation may still come from a table of f16 (GELU)
_CACHE = {"f32": 0.02, "f16": 0.02, "bf16": 0.05, "q8_0": 0.2, "q5_0": 0.5, "q5_1": 0.5}
_COARSE = 1.5  # a cache of 4 bits; 1.2 was seen without AVX-512
_FLASH = 0.2
_QUANTIZED = 1.5  # weights, and with them the activations that meet them


def of_context(traits: Traits, effective: dict[str, Any], memory: int | None) -> Capabilities:
    """Return what a context with the settings in force can do."""
    removal = _removal(traits, swa_full=effective["swa_full"])
    is_split = effective["n_seq_max"] > 1 and not effective["kv_unified"]
    moves = (
        traits.moves_positions
        and effective["type_k"] in SHIFTED_KV_TYPES
        and api.llama_memory_can_shift(memory)
        and _turns_alone(traits, effective)
    )
    return _common(
        traits,
        kv_remove=removal,
        # Sliding layers have room for the window and one compute step, rounded up.
        max_rollback=effective["n_ubatch"] if removal == "rollback" else 0,
        kv_copy=_copying(traits, removal, is_split=is_split),
        kv_shift=moves,
        kv_divide=moves,
    )


def of_model(traits: Traits) -> Capabilities:
    """Return what a context with the default settings can do."""
    removal = _removal(traits, swa_full=True)
    moves = traits.moves_positions and _turns_alone(
        traits, rope.in_force(dict.fromkeys(rope.FIELDS), traits)
    )
    return _common(
        traits,
        kv_remove=removal,
        max_rollback=0,
        kv_copy=_copying(traits, removal, is_split=False),
        kv_shift=moves,
        kv_divide=moves,
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


def _turns_alone(traits: Traits, rope_in_force: Mapping[str, Any]) -> bool:
    """Whether rope turns keys and no more: a factor would be applied again at each move.

    Source: ``llama_context::llama_context`` and ``build_rope_shift`` in llama.cpp.
    """
    return not rope_in_force["yarn_ext_factor"] and {
        rope_in_force["yarn_attn_factor"] or 1.0,
        traits.own_number("rope.scaling.attn_factor", 1.0),
    } == {1.0}


def _removal(traits: Traits, *, swa_full: bool) -> str:
    if not traits.has_memory or traits.is_recurrent:
        return "none"
    return "rollback" if traits.info.sliding_window and not swa_full else "any"


def _copying(traits: Traits, removal: str, *, is_split: bool) -> str:
    """Streams are copied whole, and so is a recurrent state; one pool of cells copies any part.

    Where the sliding layers keep their window alone, a part lacks what they had before its end.
    The engine puts copies between streams off, and what makes it carry them out cannot be taken
    back from a recurrent state: a model that has both does not copy.
    """
    if not traits.has_memory or (is_split and traits.info.is_hybrid):
        return "none"
    return "full" if is_split or removal != "any" else "any"


def tolerance(traits: Traits, effective: dict[str, Any]) -> float:
    """Return how far logits may move when the same tokens come in another split.

    Kernels for one row and for many sum in another order. That moves logits by 1e-5, until a value
    at the edge between two steps of a narrow type is rounded the other way: rarely, and then by a
    step, which the next layer reads. Measured as the largest of some hundred random texts in
    random cuts, on logits that span 20 to 35, over trained models of 4 layers and random ones of
    4, 16 and 32: f16 0.012, 0.018, 0.057; bf16 0.016, 0.058, 0.12; flash attention 0.11, 0.35,
    0.54; q8_0 0.056, 0.21, 0.52; 5 bits 0.23, 0.83, 1.4; 4 bits 0.68, 1.8, 2.7; quantised weights
    1.2, -, 4.6.
    """
    types = {effective["type_k"], effective["type_v"]}
    flash = effective["flash_attn"] != "off"
    if types == {"f32"} and traits.activations == "f32" and not flash:
        return _EXACT
    bounds = [_CACHE.get(kind, _COARSE) for kind in types]
    bounds += [_FLASH] if flash else []
    bounds += [_QUANTIZED] if traits.activations == "q8" else []
    return max(bounds) * math.pow(max(1.0, traits.info.n_layer / _SHALLOW), _GROWTH)
