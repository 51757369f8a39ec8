"""A full window is an error unless dropping was asked for; then every token dropped is told."""

from __future__ import annotations

from typing import Any

import pytest

import infercore as ic

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


def test_a_generate_without_a_place_left_changes_nothing(new_session: Any) -> None:
    session = new_session(n_ctx=64)
    session.ensure_prefix([5] * 30)
    session.prefill_suffix([7, 8])
    before = session.explain_context()
    with pytest.raises(ic.ContextOverflowError) as caught:
        session.generate([6] * 34, max_tokens=1)
    assert (caught.value.stage, caught.value.state_after) == ("decode", "unchanged")
    assert session.explain_context() == before
    session.generate([6] * 33, max_tokens=1)
