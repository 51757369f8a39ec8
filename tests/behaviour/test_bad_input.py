"""Arrays and numbers of NumPy are taken as what they are, or refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("odd", [np.zeros(3), np.array(["a", "b"]), [np.zeros(2)]], ids=repr)
def test_arrays_whose_truth_is_none(model: Any, odd: Any) -> None:
    """An array answers `==`, `in` and `if` with an array, or not at all."""
    tokenizer, user = model.tokenizer, [{"role": "user", "content": "Hi"}]
    with model.new_session(n_ctx=64) as session, model.new_context(n_ctx=64) as context:
        session.ensure_prefix("a")
        context.decode([5])
        sampler = model.new_sampler(seed=1)
        calls: tuple[Callable[[], object], ...] = (
            lambda: ic.free_bytes(address_space=odd),
            lambda: tokenizer.encode_many(["a"], truncation=odd),
            lambda: tokenizer.apply_chat_template(user, tools=odd),
            lambda: tokenizer.apply_chat_template(user, add_generation_prompt=odd),
            lambda: tokenizer.apply_chat_template([{**user[0], "images": odd}]),
            lambda: tokenizer.apply_chat_template([{**user[0], "function_call": odd}]),
            lambda: tokenizer.apply_chat_template([{**user[0], "tool_calls": odd}]),
            lambda: list(session.chat(user, tools=[{"name": "f", "parameters": {"type": odd}}])),
            lambda: context.save_sequence(0, note={"a": odd}),
            lambda: context.save_sequence(0, note=odd),
            lambda: sampler.observe([5], constrained=odd),
            lambda: list(session.chat(user, template_variables=odd)),
            lambda: list(session.decode(response_format={"type": odd})),
            lambda: list(session.decode(response_format={"type": odd, "pattern": "a"})),
        )
        for call in calls:
            with pytest.raises(ic.InferCoreError):
                call()
        assert list(session.decode(max_tokens=2))


def test_a_timeout_may_be_a_number_of_numpys(session: Any) -> None:
    session.ensure_prefix("Once upon a time", timeout=np.float32(100))  # a thread would complain
    assert list(session.decode(max_tokens=2, timeout=np.float32(100)))
