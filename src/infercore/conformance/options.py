"""Options and calls that a backend may refuse, each with what must be taken where it is honoured.

A law takes a refusal for an answer, so a plugin that begins to refuse what it used to honour would
stay green. A rig names in ``require`` what it honours: then that is a failure.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from infercore.conformance.expect import NotApplicable
from infercore.errors import (
    BackendUnavailableError,
    InvalidInputError,
    UnsupportedFeatureError,
)
from infercore.values.config import ContextConfig, SamplingConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infercore.conformance.rig import Rig
    from infercore.values.info import Capabilities

    Fields = Mapping[str, Any]

REFUSALS = (UnsupportedFeatureError, InvalidInputError, BackendUnavailableError)
NATIVE = "native."
"""Before the name of a field of `SamplingConfig`: the engine's own sampler honours it."""
_YARN: Fields = {"rope_scaling_type": "yarn", "rope_freq_scale": 0.25}
_OF_CONTEXTS: dict[str, tuple[Fields, ...]] = {
    "n_batch": ({"n_batch": 24},),
    "n_ubatch": ({"n_batch": 64, "n_ubatch": 8}, {"n_batch": 48, "n_ubatch": 7}),
    "n_seq_max": ({"n_seq_max": 2}, {"n_seq_max": 6, "n_ctx": 384}),
    "kv_unified": ({"n_seq_max": 2, "n_ctx": 128, "kv_unified": True},),
    "n_threads": ({"n_threads": 1}, {"n_threads_batch": 1}),
    "rope_freq_base": ({"rope_freq_base": 5000.0},),
    "rope_freq_scale": ({"rope_scaling_type": "linear", "rope_freq_scale": 0.5},),
    "yarn": (
        {
            **_YARN,
            "yarn_orig_ctx": 64,
            "yarn_beta_fast": 8.0,
            "yarn_beta_slow": 0.5,
            "yarn_ext_factor": 0.5,
        },
        {**_YARN, "yarn_ext_factor": 0.0, "yarn_attn_factor": 1.5},
    ),
    "attention_type": ({"attention_type": "non-causal"},),
    "flash_attn": ({"flash_attn": "on"}, {"flash_attn": "off"}),
    "precision": ({"precision": "default"}, {"precision": "accurate"}),
    "pooling_type": tuple({"pooling_type": kind} for kind in ("none", "mean", "cls", "last")),
    "type_k": ({"type_k": "f16", "type_v": "f32"},),
    "type_v": ({"type_k": "f32", "type_v": "f16"},),
    "f16": ({"type_k": "f16", "type_v": "f16"},),
    "q8_0": ({"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"},),
    "swa_full": ({"swa_full": True},),
}
_OF_SAMPLERS: dict[str, tuple[Fields, ...]] = {
    "seed": ({"seed": 7},),
    "temperature": ({"temperature": 0.7},),
    "dynatemp_range": ({"dynatemp_range": 0.3, "dynatemp_exponent": 2.0},),
    "top_k": ({"top_k": 5},),
    "top_p": ({"top_p": 0.7, "min_keep": 2},),
    "min_p": ({"min_p": 0.05},),
    "typical_p": ({"typical_p": 0.7},),
    "top_n_sigma": ({"top_n_sigma": 1.5},),
    "xtc_probability": ({"xtc_probability": 0.5, "xtc_threshold": 0.1},),
    "repeat_penalty": ({"repeat_penalty": 1.3}, {"repeat_penalty": 1.3, "penalty_last_n": -1}),
    "frequency_penalty": ({"frequency_penalty": 0.5},),
    "presence_penalty": ({"presence_penalty": 0.5},),
    "dry_multiplier": ({"dry_multiplier": 1.0, "dry_sequence_breakers": ("\n",)},),
    "mirostat": ({"mirostat": 1}, {"mirostat": 2}),
    "logit_bias": ({"logit_bias": {5: 1.5}},),
    "ignore_eos": ({"ignore_eos": True},),
}


def _open(rig: Rig, every: tuple[Fields, ...]) -> None:
    for fields in every:
        rig.context(**{"n_ctx": 64, **fields}).close()


def _sample(rig: Rig, every: tuple[Fields, ...]) -> None:
    for fields in every:
        rig.sampler(**{"temperature": 0.8, **fields}, implementation="native").close()


def _held(rig: Rig) -> Any:
    context = rig.context(n_ctx=64)
    context.decode(rig.tokens(4))
    return context


def _steered(rig: Rig) -> None:
    info = rig.model.info
    rig.context(n_ctx=64).set_control_vector({info.n_layer - 1: np.ones(info.n_embd, np.float32)})


def _rows(rig: Rig) -> None:
    rows = np.ones((3, rig.model.info.n_embd), np.float32)
    rig.context(n_ctx=64).decode_spans([(0, rows, "last")])


def _stopped(rig: Rig) -> None:
    if not rig.context(n_ctx=64).capabilities.abort:
        raise UnsupportedFeatureError(feature="abort", backend=rig.backend)


def _adapted(rig: Rig) -> None:
    rig.context(n_ctx=64, adapters=rig.adapters_at(0.5)).close()


OPTIONS: dict[str, Callable[[Rig], object]] = {
    **{name: partial(_open, every=every) for name, every in _OF_CONTEXTS.items()},
    "abort": _stopped,
    "adapters": _adapted,
    "decode_vectors": _rows,
    "set_control_vector": _steered,
    "set_causal_attention": lambda rig: _held(rig).set_causal_attention(False),
    "warmup": lambda rig: rig.context(n_ctx=64).warmup(),
    **{NATIVE + name: partial(_sample, every=every) for name, every in _OF_SAMPLERS.items()},
}
"""By name, what raises one of `REFUSALS` where it is not honoured."""
_FIELDS = frozenset(attrs.fields_dict(ContextConfig))
_SAMPLED = frozenset(attrs.fields_dict(SamplingConfig)) - {"implementation"}


def refusal(rig: Rig, name: str) -> str | None:
    """Return why the backend does not honour the option ``name``, None where it does."""
    rig.begin(f"option {name}", 0)
    try:
        OPTIONS[name](rig)
    except REFUSALS as error:
        return str(error)
    except NotApplicable as left:
        return f"it cannot be tried: {left}"
    except Exception as error:  # noqa: BLE001  (whatever a backend raises: it honours nothing)
        return f"{type(error).__name__}: {error}"
    finally:
        rig.tidy()
    return None


def refused(rig: Rig) -> tuple[str, ...]:
    """Return the names of all options that the backend refuses.

    Those of a sampler of its own are left out where it declares none, and adapters where the rig
    has none.
    """
    native = rig.model.capabilities.native_sampler
    names = (name for name in OPTIONS if native or not name.startswith(NATIVE))
    if rig.adapter is None:
        names = (name for name in names if name != "adapters")
    return tuple(name for name in names if refusal(rig, name) is not None)


def option_of(error: BaseException | None, asked: set[str]) -> str | None:
    """Return the option that ``error`` refuses, one of those ``asked`` for; None for none.

    Only what can be required counts: else nobody could say that it must not be lost. A field of a
    sampler counts where ``asked`` has it with the prefix of the engine's own.
    """
    if isinstance(error, UnsupportedFeatureError):
        said = error.feature.split("=")[0].split(" ")[0]
    elif isinstance(error, InvalidInputError):
        said = str(error.field)
    else:
        return None
    for name in (said, NATIVE + said):
        known = _FIELDS if name == said else {NATIVE + field for field in _SAMPLED}
        if name in asked and name in known and name in OPTIONS:
            return name
    return None


def is_kept(rig: Rig, name: str, *, of_encoder: bool) -> bool:
    """Whether the backend takes of the option ``name`` what its capabilities rest on.

    A backend may limit an option, but not so far that nothing is left of what it declares: one
    that decodes several sequences takes two.
    """
    try:
        opens = rig.encoder_context if of_encoder else partial(_quietly, rig)
        kinds = opens().capabilities
        if name.startswith(NATIVE):
            opens = partial(rig.sampler, implementation="native")
        for fields in _least(rig, name, kinds):
            opens(**fields).close()
    except Exception:  # noqa: BLE001  (whatever a backend raises: it does not take it)
        return False
    finally:
        rig.tidy()
    return True


def _quietly(rig: Rig, **fields: Any) -> Any:
    """Open a context that is none of the law's own."""
    return rig.opened(rig.model.new_context(**rig.fields(**fields)))


def _least(rig: Rig, name: str, kinds: Capabilities) -> tuple[Fields, ...]:
    """Return what must be taken of the option ``name`` by a backend with these capabilities."""
    two: Fields = {"n_seq_max": 2, "n_ctx": 128}
    several = kinds.multi_sequence or kinds.kv_copy != "none"
    pooled = kinds.pooling if kinds.embeddings or kinds.encoder else ()
    every: dict[str, tuple[Fields, ...]] = {
        "n_seq_max": (two,) if several else (),
        "kv_unified": ({**two, "kv_unified": True},) if kinds.scans_cells else (),
        "pooling_type": tuple({"pooling_type": kind} for kind in pooled if kind != "rank"),
        "n_threads": ({"n_threads": 1},) if kinds.live_threads else (),
    }
    if kinds.lora and rig.adapter is not None:
        every["adapters"] = ({"adapters": rig.adapters_at(1.0)},)
    if kinds.native_sampler:
        warm = ({"temperature": 0.8, "seed": 7},)
        every |= {NATIVE + "temperature": warm, NATIVE + "seed": warm}
    return every.get(name, ())
