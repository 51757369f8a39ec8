"""The identity that a session computes of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infercore.values.manifest import ContextManifest, hash_json, hash_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What changes the values in the KV cache; thread counts and batch sizes do not.
RUNTIME_FIELDS = (
    "type_k",
    "type_v",
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
    "attention_type",
    "flash_attn",
    "swa_full",
    "offload_kqv",
)


def runtime_digest(effective: Mapping[str, Any], runtime: Mapping[str, Any]) -> str:
    """Return the digest over the options in force that change KV values.

    ``effective`` are a context's, ``runtime`` what the plugin adds (device kind, precision).
    """
    options = {name: effective.get(name) for name in RUNTIME_FIELDS}
    return hash_json({"options": options, "runtime": {k: str(v) for k, v in runtime.items()}})


def identity(
    model: Any,
    effective: Mapping[str, Any],
    *,
    add_bos: bool,
    profile_id: str | None,
    prompt_format: str | None,
    adapters: Sequence[str],
) -> ContextManifest:
    """Return the identity of a session on ``model`` with these context options."""
    template = model.tokenizer.chat_template
    return ContextManifest(
        profile_id=profile_id,
        backend=model.backend,
        backend_version=model.backend_version,
        model_digest=model.digest,
        tokenizer_digest=model.tokenizer.digest,
        prompt_format=prompt_format,
        prompt_template_digest=hash_text(template) if template else None,
        runtime_digest=runtime_digest(effective, model.runtime),
        add_bos=add_bos,
        adapters=tuple(adapters),
    )
