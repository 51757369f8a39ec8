"""The report that a session gives of itself at any time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infercore.session.segments import manifest_of
from infercore.values.session import ContextReport

if TYPE_CHECKING:
    from infercore.errors import SessionFatalError
    from infercore.session.parts import Parts
    from infercore.session.resident import Resident
    from infercore.values.manifest import ContextManifest


def context_report(
    *,
    state: str,
    parts: Parts,
    resident: Resident,
    identity: ContextManifest,
    tokenizer: Any,
    fatal: SessionFatalError | None,
) -> ContextReport:
    """Return the report; it takes no lock and calls no engine."""
    tape = resident.tape
    if resident.page is not None:  # the logical context, held by the engine now or not
        tokens, missing, held = resident.wanted(), 0, resident.page.held_tokens
    else:
        tokens, missing, held = tape.tokens(0, tape.logical), len(resident.owed), len(tape)
    logical = len(tokens)
    prefix = min(parts.n_prefix, logical)
    generated = min(max(0, parts.n_generated - missing), logical - prefix)
    return ContextReport(
        state=state,
        resident_tokens=logical,
        prefix_tokens=prefix,
        suffix_tokens=logical - prefix - generated,
        generated_tokens=generated,
        warm_tail_tokens=max(0, held - logical),
        pending_tokens=resident.n_pending,
        held_tokens=held,
        n_ctx=resident.context.n_ctx_seq,
        cuts=_cuts(resident),
        available_tokens=max(0, resident.available()),
        stable_byte_hash=parts.byte_hash,
        stable_token_hash=parts.token_hash,
        manifest_digest=identity.digest,
        manifest=manifest_of(identity, parts, tokens, generated, tokenizer),
        closed=state == "CLOSED",
        fatal_cause=None if fatal is None else str(fatal.cause),
    )


def _cuts(resident: Resident) -> tuple[int, ...]:
    """Return where tokens are gone that those behind it were computed with."""
    page, tape = resident.page, resident.tape
    cut = tape.cut if page is None else page.cut
    return () if cut is None or cut >= resident.n_wanted else (cut,)
