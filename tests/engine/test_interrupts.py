"""A Ctrl-C at any point of what runs once a token: nothing stays locked, the books stay true."""

from __future__ import annotations

import os

import pytest

from engine.interrupts import interrupt
from infercore.engine import gate
from infercore.testing import engine_of

IDS = [5, 6, 7, 8]
GUARD = os.path.dirname(gate.__file__)
MOST = 500


@pytest.mark.parametrize(
    "call", [lambda c: c.decode_one(9), lambda c: c.logits()], ids=["decode_one", "logits"]
)
def test_an_interruption_anywhere_leaves_the_context_usable(reference_model, call):
    with reference_model.new_context(n_ctx=64) as context:
        for n in range(1, MOST):
            context.clear()
            context.decode(IDS)
            if not interrupt(n, lambda: call(context), GUARD):
                break
            held = context.tokens()
            assert held in (IDS, [*IDS, 9])
            assert held == engine_of(context).sequences[0].tokens.tolist()
            assert context.n_past() == len(held)
            context.decode_one(3)
            assert context.logits().shape == (context._n_vocab,)
    assert 3 < n < MOST
