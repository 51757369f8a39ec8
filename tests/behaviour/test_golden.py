"""Both engines give what transformers gives, from the same float32 weights."""

from __future__ import annotations

from typing import Any


def test_greedy_tokens(session: Any, golden: Any) -> None:
    n_compared = 0
    for prompt in golden.prompts:
        session.ensure_prefix(prompt.text)
        chunks = list(session.decode(max_tokens=len(prompt.greedy) + 1, temperature=0))
        tokens = [token for chunk in chunks for token in chunk.tokens]
        assert tokens[: len(prompt.greedy)] == list(prompt.greedy)
        assert chunks[-1].finish_reason == ("eos" if prompt.ended else "length")
        n_compared += len(prompt.greedy)
    assert n_compared >= 400
    assert max(len(prompt.greedy) for prompt in golden.prompts) >= 200
