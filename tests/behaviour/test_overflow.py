"""A full window is an error unless dropping was asked for; then every token dropped is told."""

from __future__ import annotations

from typing import Any

PROMPT = "Once upon a time there was a baker named Mira"


def test_truncate_drops_the_oldest_of_the_suffix(new_session: Any, story: str) -> None:
    session = new_session(n_ctx=128, overflow="truncate")
    prefix = session.ensure_prefix(PROMPT)
    ids = session.model.tokenizer.encode(PROMPT + " " + story)
    status = session.prefill_suffix(" " + story)
    dropped = list(status.truncated_tokens)
    stands = status.prefix_tokens
    assert stands <= prefix.prefix_tokens
    assert status.resident_tokens == 127
    assert ids[:stands] + dropped + session.context.tokens()[stands:] == ids
    assert status.reused_tokens + status.prefilled_tokens == status.suffix_tokens
    assert len(list(session.decode(max_tokens=1, temperature=0))[-1].tokens) <= 1


def test_shift_goes_on_and_tells_what_went(new_session: Any) -> None:
    session = new_session(n_ctx=64, overflow="shift")
    status = session.ensure_prefix(PROMPT)
    chunks = list(session.decode(max_tokens=150, temperature=0, ignore_eos=True))
    tokens = [token for chunk in chunks for token in chunk.tokens]
    gone = [token for chunk in chunks for token in chunk.shifted_out]
    assert chunks[-1].finish_reason == "length"
    assert len(tokens) == 150
    held = session.context.tokens()
    prefix = held[: status.prefix_tokens]
    assert prefix == session.model.tokenizer.encode(PROMPT)
    assert gone + held[status.prefix_tokens :] == tokens
    assert session.context.n_past() == len(held) <= 64


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


def test_without_asking_the_window_is_an_end(new_session: Any) -> None:
    session = new_session(n_ctx=64)
    session.ensure_prefix(PROMPT)
    chunks = list(session.decode(max_tokens=150, temperature=0, ignore_eos=True))
    assert chunks[-1].finish_reason == "context"
    assert all(chunk.shifted_out == () for chunk in chunks)
