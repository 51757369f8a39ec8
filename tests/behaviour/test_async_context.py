"""A context under asyncio: its calls in order, cancelled by their task."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = "Once upon a time there was a baker named Mira"


def test_it_gives_what_the_context_gives(
    model: Any, exact: dict[str, Any], new_context: Callable[..., Any]
) -> None:
    ids = model.tokenizer.encode(PROMPT)
    context = new_context(n_seq_max=2)
    context.decode(ids, logits="all")
    rows = context.logits_all().copy()
    context.decode_one(ids[1])
    last = context.logits().copy()

    async def main() -> None:
        async with ic.aopen_context(model, n_ctx=1024, n_seq_max=2, **exact) as other:
            await other.decode(ids, logits="all")
            given = await other.logits_all()
            assert np.array_equal(given, rows)
            await other.decode_one(ids[1])
            assert np.array_equal(given, rows), "rows are the caller's own"
            assert np.array_equal(await other.logits(), last)
            assert await other.tokens() == [*ids, ids[1]]
            assert (other.n_ctx, other.n_seq_max, other.n_outputs) == (1024, 2, 1)
            sampler = model.new_sampler(temperature=0)
            assert await other.sample(sampler) == int(last.argmax())
            saved = await other.save_sequence(0)
            await other.load_sequence(1, saved)
            assert await other.n_past(1) == len(ids) + 1
        assert other.closed
        await other.close()
        with pytest.raises(ic.SessionClosedError):
            await other.decode(ids)

    asyncio.run(main())


def test_errors_are_those_of_the_context(model: Any, exact: dict[str, Any]) -> None:
    async def main() -> None:
        async with ic.aopen_context(model, n_ctx=64, **exact) as context:
            with pytest.raises(ic.ContextOverflowError):
                await context.decode([1] * 65)
            with pytest.raises(ic.InvalidTokenError):
                await context.decode([-1])
            with pytest.raises(ic.OutputNotAvailableError):
                await context.logits()
            assert await context.n_past() == 0

    asyncio.run(main())
    with pytest.raises(ic.InvalidInputError):
        ic.aopen_context("model.gguf")  # type: ignore[arg-type]


def test_a_path_is_refused_with_what_is_taken() -> None:
    with pytest.raises(ic.InvalidInputError) as caught:
        ic.aopen_context("model.gguf")  # type: ignore[arg-type]
    assert (caught.value.field, caught.value.value) == ("model", "model.gguf")
    assert "load_model" in str(caught.value)


def test_it_has_every_call_of_a_context() -> None:
    public = {name for name in vars(ic.Context) if not name.startswith("_")}
    assert public <= set(vars(ic.AsyncContext)) | {"native_handle"}
    for name in public - {"abort"}:
        call = getattr(ic.Context, name)
        if inspect.isfunction(call):
            wanted = list(inspect.signature(call).parameters.values())
            given = list(inspect.signature(getattr(ic.AsyncContext, name)).parameters.values())
            assert [(p.name, p.kind, p.default) for p in given] == [
                (p.name, p.kind, p.default) for p in wanted
            ], name
