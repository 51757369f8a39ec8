"""Tries a grammar for constraints; it is run in the process with limits."""

from __future__ import annotations

import json

import llguidance

from infercore.limited.schema_place import place_of_error
from infercore.limited.wire import REFUSED, TEXT


def verdict(grammar: str) -> tuple[bytes, str]:
    """Return `TEXT` where llguidance can compile ``grammar``, else `REFUSED` and its error."""
    error = str(llguidance.LLMatcher.validate_grammar(grammar))
    return (REFUSED, error) if error else (TEXT, "")


def place(schema: str, error: str) -> tuple[bytes, str]:
    """Return `TEXT` and where in ``schema``, which is JSON, ``error`` sits."""
    matcher = llguidance.LLMatcher

    def check(part: object) -> str:
        grammar = matcher.grammar_from_json_schema(part, {"whitespace_flexible": False})
        return str(matcher.validate_grammar(grammar))

    return TEXT, place_of_error(json.loads(schema), error, check)
