"""Taking tokens out of the middle of a session's context."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import attrs

from infercore.session.parts import PREFIXED, READY
from infercore.session.resident import Outcome
from infercore.session.segments import bytes_of
from infercore.values import checks
from infercore.values.manifest import hash_bytes, hash_token_ids
from infercore.values.session import PrefixInput

if TYPE_CHECKING:
    from infercore.session.parts import Parts
    from infercore.session.session import CoreSession


def evict(session: CoreSession, start: object, end: object) -> Outcome:
    """Take the tokens in [start, end) out of a session that is held; return what that took.

    Raises `InvalidInputError` for a range that is none, *unchanged*.
    """
    resident = session.resident
    first, last = _range(start, end, resident.n_wanted)
    session.make_whole()
    tokens = resident.wanted()
    kept = tokens[:first] + tokens[last:]
    kinds = resident.context.capabilities
    moves = kinds.kv_remove == "any" and kinds.kv_shift
    before = session.state, session.parts
    parts, state = _without(session, tokens, first, last), session.state
    if moves and state == PREFIXED:  # so that what was moved is gone on from, as it is
        state = READY
    try:
        if moves and resident.cut_out(first, last):
            outcome = Outcome(reused=len(kept), prefilled=0, dropped=last - first)
        else:
            outcome = resident.hold(kept, need_logits=False)
            outcome = attrs.evolve(outcome, dropped=last - first)
        session.enter(state, parts)
    except BaseException:
        session.stay(*before, tokens)
        raise
    resident.checkpoint()
    return outcome


def _range(start: Any, end: Any, n: int) -> tuple[int, int]:
    for field, value in (("start", start), ("end", end)):
        if not checks.is_integer(value) or not 0 <= operator.index(value) <= n:
            raise checks.refuse(field, value, f"a place in the context, from 0 to {n}")
    first, last = operator.index(start), operator.index(end)
    if first >= last:
        raise checks.refuse("end", end, f"a place behind start, {first}")
    return first, last


def _without(session: CoreSession, tokens: list[int], start: int, end: int) -> Parts:
    """Return the parts of the session once [start, end) of its ``tokens`` are gone."""
    parts = session.parts.copy()
    n_generated = parts.n_generated
    if (gone := min(end, parts.n_prefix) - start) > 0:
        ids = tokens[:start] + tokens[min(end, parts.n_prefix) : parts.n_prefix]
        parts.n_prefix -= gone
        parts.prefix_ids = ids
        parts.prefix = PrefixInput(tokens=tuple(ids))
        parts.byte_hash = hash_bytes(bytes_of(ids, session.model.tokenizer))
        parts.token_hash = hash_token_ids(ids)
    parts.n_generated -= max(0, end - max(start, len(tokens) - n_generated))
    parts.plain = parts.merges = False
    return parts
