"""The identity that a session computes of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infercore.values.manifest import ContextManifest, hash_json, hash_text, kv_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def runtime_digest(effective: Mapping[str, Any], runtime: Mapping[str, Any]) -> str:
    """Return the digest over the options in force that change KV values.

    ``effective`` are a context's, ``runtime`` what the plugin adds (device kind, precision).
    """
    own = {name: str(value) for name, value in runtime.items()}
    return hash_json({"options": kv_options(effective), "runtime": own})


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
