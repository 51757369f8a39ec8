"""Rows of numbers in place of tokens, on kinds of models that the pack lacks."""

from __future__ import annotations

import numpy as np
import pytest

import infercore as ic
from llamacpp import random_gguf

IDS = np.array([5, 9, 2, 7, 7, 3, 11], dtype=np.int32)


def columns(start, n):
    positions = np.arange(start, start + n, dtype=np.int32)
    return positions, np.zeros(n, np.int32), np.zeros(n, np.bool_)


@pytest.mark.parametrize(("kind", "factor"), [("mrope", 1), ("recurrent", 1), ("sliding", 8)])
def test_rows_of_the_table_are_its_tokens(tiny, open_context, kind, factor):
    """With M-RoPE a row has a place in time, height and width; gemma scales what it looks up."""
    _, tensors = getattr(random_gguf, f"_{kind}")(np.random.default_rng(7))
    table = tensors["token_embd.weight"] * np.float32(factor)
    assert factor in (1, np.sqrt(table.shape[1]))
    plain, given = open_context(tiny(kind)), open_context(tiny(kind))
    plain.decode(IDS, seq_id=0, logits="last")
    given.decode(IDS[:2], seq_id=0, logits="none")
    given.decode_vectors(np.ascontiguousarray(table[IDS[2:5]]), *columns(2, 3))
    given.decode(IDS[5:], seq_id=0, logits="last")
    assert np.abs(given.logits(0) - plain.logits(0)).max() < 1e-4
    assert given.n_past(0) == len(IDS)


def test_models_that_take_other_rows_are_refused(tiny, open_context, monkeypatch):
    context = open_context(tiny("mrope"))
    rows = np.zeros((2, context.model.info.n_embd), np.float32)
    object.__setattr__(context.model.traits, "n_embd_inp", 2 * rows.shape[1])
    try:
        with pytest.raises(ic.UnsupportedFeatureError, match="numbers a row"):
            context.decode_vectors(rows, *columns(0, 2))
    finally:
        object.__setattr__(context.model.traits, "n_embd_inp", rows.shape[1])
    monkeypatch.setattr(
        "infercore_llamacpp.decoding._NEEDS_IDS", (context.model.info.architecture,)
    )
    with pytest.raises(ic.UnsupportedFeatureError, match="by token"):
        context.decode_vectors(rows, *columns(0, 2))
    assert context.n_past(0) == 0
