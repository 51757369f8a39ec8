"""What a token's way through Python is kept short by, where no clock is needed to see it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import infercore as ic
from infercore.sampling.factory import new_portable_sampler
from infercore.values.session import text_chunk

IN_PLACE = 30
"""Python keeps so many attributes in an object, and more of them in a dictionary beside it."""


def test_what_a_token_reads_lies_in_its_objects(new_session: Any) -> None:
    session = new_session()
    session.ensure_prefix("Once upon a time")
    with session.decode(max_tokens=3, temperature=0) as stream:
        next(stream)
        context, generation = session.context, stream._generation
        parts = [
            session, stream, generation, generation._sampler, session.resident, session.parts,
            context, context._inner, context._cells, context._outputs, context._appending,
        ]  # fmt: skip
        n_attributes = {type(part).__name__: len(getattr(part, "__dict__", ())) for part in parts}
    assert not {name: n for name, n in n_attributes.items() if n > IN_PLACE}


def test_a_greedy_token_copies_no_row(new_session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`numpy.argmax` copies a row that is read-only, which for a large vocabulary takes longest."""
    session = new_session()
    if session.context.capabilities.logits != "full":
        pytest.skip("rows of the likeliest are made in Python")
    session.ensure_prefix("Once upon a time")
    monkeypatch.setattr(session.context, "logits", None)
    inner = session.context._inner
    chunks = list(session.decode(max_tokens=4, temperature=0, ignore_eos=True))
    assert chunks[-1].usage.completion_tokens == 4
    row = inner.logits(0)
    assert isinstance(row, np.ndarray)
    assert row.flags.writeable


def test_a_sampler_finds_a_greedy_token_without_a_row(
    new_context: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = new_context()
    context.decode(model.tokenizer.encode("Once upon a time"))
    best = int(context.logits().argmax())
    monkeypatch.setattr(context, "logits", None)
    assert model.new_sampler(temperature=0).sample(context) == best


def test_a_chunk_of_text_is_as_any_other() -> None:
    made, built = text_chunk("a", (1,)), ic.StreamChunk(text="a", tokens=(1,))
    assert made == built
    assert (hash(made), repr(made)) == (hash(built), repr(built))
    assert (made.finish_reason, made.usage, made.tool_calls) == (None, None, ())
    for twin in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):  # noqa: S301
        assert twin == built
    with pytest.raises(AttributeError):
        made.text = "b"  # type: ignore[misc]


def test_a_sampler_refuses_the_rows_of_another_vocabulary(new_context: Any, model: Any) -> None:
    context = new_context()
    context.decode(model.tokenizer.encode("Once upon a time"))
    other = new_portable_sampler(
        ic.SamplingConfig(temperature=0), model.tokenizer, model.tokenizer.n_vocab + 1
    )
    with pytest.raises(ic.InvalidInputError):
        other.sample(context)
