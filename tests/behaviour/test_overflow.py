"""A full window is an error unless dropping was asked for; then every token dropped is told."""

from __future__ import annotations

from typing import Any

PROMPT = "Once upon a time there was a baker named Mira"


def test_what_was_moved_is_not_taken_for_a_cold_run(new_session: Any) -> None:
    session = new_session(n_ctx=64, overflow="shift")
    session.ensure_prefix(PROMPT)
    list(session.decode(max_tokens=80, temperature=0, ignore_eos=True))
    held = session.context.tokens()
    start = session.explain_context().prefix_tokens
    text = session.model.tokenizer.decode(held[start : start + 10])
    session.ensure_prefix(PROMPT)
    status = session.prefill_suffix(text)
    assert status.reused_tokens == 0
