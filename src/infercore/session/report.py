"""The report that a session gives of itself at any time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from infercore.values.session import ContextReport

if TYPE_CHECKING:
    from infercore.errors import SessionFatalError
    from infercore.session.tape import Tape
    from infercore.values.manifest import ContextManifest


def context_report(
    *,
    state: str,
    parts: Any,
    tape: Tape,
    n_ctx: int,
    identity: ContextManifest,
    fatal: SessionFatalError | None,
) -> ContextReport:
    """Return the report; it takes no lock and calls no engine."""
    logical = tape.logical
    prefix = min(parts.n_prefix, logical)
    generated = min(parts.n_generated, logical - prefix)
    return ContextReport(
        state=state,
        resident_tokens=logical,
        prefix_tokens=prefix,
        suffix_tokens=logical - prefix - generated,
        generated_tokens=generated,
        warm_tail_tokens=max(0, tape.warm_tail),
        n_ctx=n_ctx,
        available_tokens=max(0, n_ctx - logical),
        stable_byte_hash=parts.byte_hash,
        stable_token_hash=parts.token_hash,
        manifest_digest=identity.digest,
        manifest=attrs.evolve(
            identity, stable_byte_hash=parts.byte_hash, stable_token_hash=parts.token_hash
        ),
        closed=state == "CLOSED",
        fatal_cause=None if fatal is None else str(fatal.cause),
    )
