"""Both engines give what transformers gives, from the same float32 weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

TOLERANCE = 1e-3


def test_tokenizer_gives_the_golden_ids(model: Any, golden: Any) -> None:
    for prompt in golden.prompts:
        assert model.tokenizer.encode(prompt.text) == list(prompt.tokens)


def test_logits_of_every_prompt_position(new_context: Callable[..., Any], golden: Any) -> None:
    context = new_context()
    for prompt in golden.prompts:
        context.clear()
        context.decode(prompt.tokens, logits="all")
        difference = np.abs(context.logits_all() - prompt.logits).max()
        assert difference < TOLERANCE


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


def test_greedy_tokens_one_by_one(new_context: Callable[..., Any], golden: Any) -> None:
    prompt = golden.prompts[0]
    context = new_context()
    context.decode(prompt.tokens)
    for expected in prompt.greedy[:200]:
        token = int(np.argmax(context.logits()))
        assert token == expected
        context.decode_one(token)
