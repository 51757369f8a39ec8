"""A pool whose idle sessions have host memory to go to, and conversations that change places."""

from __future__ import annotations

from typing import Any

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
