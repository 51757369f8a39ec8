"""Tries a grammar for constraints; it is run in the process with limits."""

from __future__ import annotations

import llguidance

from infercore.limited.wire import REFUSED, TEXT


def verdict(grammar: str) -> tuple[bytes, str]:
    """Return `TEXT` where llguidance can compile ``grammar``, else `REFUSED` and its error."""
    error = str(llguidance.LLMatcher.validate_grammar(grammar))
    return (REFUSED, error) if error else (TEXT, "")
