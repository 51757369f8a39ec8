"""A pool whose idle sessions have host memory to go to, and conversations that change places."""

from __future__ import annotations

from typing import Any

import infercore as ic

SYSTEM = "You are a teller of short tales about Mira, Oskar and the old mill by the river."
ROOM = {"n_ctx": 256, "n_parallel": 2}


def ask(session: Any, messages: list[dict[str, str]], text: str) -> Any:
    """Add a turn and its answer; return the answer's usage."""
    messages.append({"role": "user", "content": text})
    chunks = list(session.chat(messages, max_tokens=6, temperature=0))
    messages.append({"role": "assistant", "content": "".join(chunk.text for chunk in chunks)})
    return chunks[-1].usage


def test_conversations_beyond_the_places_come_back_from_memory(
    model: Any, exact: dict[str, Any]
) -> None:
    def talk(**fields: Any) -> tuple[list[list[dict[str, str]]], list[int]]:
        chats = [[{"role": "system", "content": SYSTEM}] for _ in range(4)]
        missing: list[int] = []
        with model.new_pool(**ROOM, **exact, **fields) as pool:
            sessions = [pool.open_session() for _ in chats]
            for turn in range(2):
                for number, (session, chat) in enumerate(zip(sessions, chats, strict=True)):
                    usage = ask(session, chat, f"Tale {number}, part {turn}?")
                    missing.append(usage.prompt_tokens - usage.cached_tokens)
            assert pool.effective["kv_unified"] is not (
                bool(fields) and model.capabilities.scans_cells
            )
        return chats, missing

    chats, (first, *later) = talk(cache_bytes=2**28)
    assert all(n < first / 2 for n in later)
    assert chats == talk()[0]


def test_a_pool_shares_its_cells_where_that_was_asked_for(
    model: Any, exact: dict[str, Any]
) -> None:
    for fields in ({"n_cells": 300}, {"kv_unified": True}):
        with model.new_pool(**ROOM, **exact, **fields, cache_bytes=2**20) as pool:
            assert pool.effective["kv_unified"] is True


def test_a_window_of_ones_own_is_counted_without_what_is_given_up(
    model: Any, exact: dict[str, Any], story: str
) -> None:
    ids = model.tokenizer.encode(story)[:58]
    fields = {"n_ctx": 128, "n_seq_max": 2, "kv_unified": False, **exact}
    with model.new_session(**fields) as session:
        session.ensure_prefix(ids)
        with session.fork():
            first = next(iter(session.decode(max_tokens=1, temperature=0, prompt_logprobs=1)))
    assert len(first.prompt_logprobs) == len(ids) - 1


def test_guesses_in_a_window_that_moves(model: Any, exact: dict[str, Any]) -> None:
    found = []
    with model.new_pool(n_ctx=64, n_parallel=2, kv_unified=False, **exact) as pool:
        for guesses in (None, ic.SpeculativeConfig(n_gram=1, n_draft=8)):
            with pool.open_session(overflow="shift") as session:
                session.ensure_prefix("One two three. One two three. One two three. Mira was very")
                asked = {"max_tokens": 90, "temperature": 0, "ignore_eos": True}
                chunks = list(session.decode(**asked, speculative=guesses))
                tokens = [token for chunk in chunks for token in chunk.tokens]
                found.append((tokens, chunks[-1].finish_reason))
    assert found[0] == found[1]
    assert found[0][1] == "length"


def test_a_token_of_several_sequences(model: Any, exact: dict[str, Any], story: str) -> None:
    ids = model.tokenizer.encode(story)[:6]
    with model.new_context(n_ctx=64, **exact) as alone:
        alone.decode(ids[:5])
        wanted = alone.logits().copy()
    fields = {"n_ctx": 128, "n_seq_max": 4, "kv_unified": False, **exact}
    with model.new_context(**fields) as context:
        last = len(ids) - 2
        context.decode_batch([(id_, [0, 3, 1], i == last) for i, id_ in enumerate(ids[:5])])
        assert abs(context.logits() - wanted).max() <= context.tolerance
        for seq_id in (0, 1, 3):
            assert context.tokens(seq_id) == ids[:5]
            context.decode(ids[5:], seq_id=seq_id)
