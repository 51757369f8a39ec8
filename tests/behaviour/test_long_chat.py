"""A conversation far longer than its window of 512 tokens, on every engine.

80 turns here; INFERCORE_CHAT_TURNS=500 for more.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

N_TURNS = int(os.environ.get("INFERCORE_CHAT_TURNS", "80"))
SYSTEM = {"role": "system", "content": "You are a storyteller."}


def ask(session: Any, history: list[Any], number: int) -> tuple[Any, tuple[int, ...]]:
    """Add a turn and its answer; return the usage and which messages were left out."""
    history.append({"role": "user", "content": f"Where does Nadia live, question {number}?"})
    chunks = list(session.chat(history, max_tokens=2, temperature=0))
    history.append({"role": "assistant", "content": "".join(chunk.text for chunk in chunks)})
    assert chunks[-1].finish_reason in ("length", "eos")
    return chunks[-1].usage, chunks[0].dropped_messages


@pytest.mark.timeout(600)
def test_many_turns_in_a_window_of_512(new_session: Callable[..., Any], model: Any) -> None:
    session = new_session(n_ctx=512, overflow="truncate")
    history: list[Any] = [SYSTEM]
    n_prompt = n_cached = n_kept = 0
    for number in range(N_TURNS):
        usage, dropped = ask(session, history, number)
        assert usage.prompt_tokens < 512
        assert dropped == tuple(range(1, len(dropped) + 1))  # oldest first; the system stays
        assert len(dropped) % 2 == 0  # whole turns
        kept = [SYSTEM, *history[1 + len(dropped) : -1]]
        text = model.tokenizer.apply_chat_template(kept, add_generation_prompt=True)
        assert usage.prompt_tokens == len(model.tokenizer.encode(text))
        n_prompt += usage.prompt_tokens
        n_cached += usage.cached_tokens
        n_kept = len(kept)
    assert n_kept > 6
    assert n_cached > n_prompt // 2
