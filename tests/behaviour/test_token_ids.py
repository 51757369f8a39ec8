"""Token ids in place of a text, in sessions of every engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
from infercore.values.manifest import hash_token_ids

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX, SUFFIX = "Once upon a time", " there was a baker"


@pytest.fixture(scope="module")
def ids(model: Any) -> tuple[list[int], list[int]]:
    encode = model.tokenizer.encode
    return encode(PREFIX), encode(SUFFIX, add_special=False)


def greedy(session: Any, n: int = 8) -> list[int]:
    return [t for c in session.decode(max_tokens=n, temperature=0) for t in c.tokens]


def test_ids_give_what_the_text_gives(new_session: Callable[..., Any], ids: Any) -> None:
    prefix, suffix = ids
    of_text, of_ids = new_session(), new_session()
    of_text.ensure_prefix(PREFIX)
    of_text.prefill_suffix(ic.SuffixInput(text=SUFFIX, boundary="split"))
    status = of_ids.ensure_prefix(np.array(prefix))
    assert status.stable_token_hash == hash_token_ids(prefix)
    assert of_ids.prefill_suffix(tuple(suffix)).suffix_tokens == len(suffix)
    assert greedy(of_ids) == greedy(of_text)
    again = of_ids.ensure_prefix(PREFIX)  # the same tokens, whichever way they were given
    assert again.reused_tokens == len(prefix)


def test_generate_puts_nothing_in_front(new_session: Callable[..., Any], model: Any) -> None:
    session = new_session()
    ids = model.tokenizer.encode("Nadia lives", add_special=False)
    text = session.generate(ids, max_tokens=6, temperature=0)
    assert session.context.tokens()[: len(ids)] == ids
    with_bos = new_session().generate(
        model.tokenizer.encode("Nadia lives"), max_tokens=6, temperature=0
    )
    assert with_bos == new_session().generate("Nadia lives", max_tokens=6, temperature=0)
    assert isinstance(text, str)


def test_in_a_pool_and_awaited(model: Any, exact: Any, ids: Any) -> None:
    prefix, suffix = ids
    with model.new_pool(n_ctx=128, n_parallel=2, **exact) as pool:
        first, second = pool.open_session(), pool.open_session()
        first.ensure_prefix(prefix)
        assert second.ensure_prefix(prefix).reused_tokens >= len(prefix) - 1
        one = first.generate(suffix, max_tokens=6, temperature=0)

        async def awaited() -> str:
            async with await pool.aopen_session() as session:
                await session.ensure_prefix(prefix)
                await session.prefill_suffix(ic.SuffixInput(tokens=suffix))
                return "".join([c.text async for c in session.decode(max_tokens=6, temperature=0)])

        assert asyncio.run(awaited()) == one
