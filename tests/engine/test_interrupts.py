"""A Ctrl-C at any point of what runs once a token: nothing stays locked, the books stay true."""

from __future__ import annotations

import itertools
import os
import sys

import pytest

from infercore.engine import gate
from infercore.testing import engine_of

IDS = [5, 6, 7, 8]
GUARD = os.path.dirname(gate.__file__)
MOST = 500


def interrupt(n, call):
    """Run ``call`` with a Ctrl-C at the ``n``-th place of the guard where Python looks for one.

    Those are the starts of functions and what comes behind a call of C. Return whether there was
    such a place.
    """
    places = itertools.count(1)

    def look(frame, event, _):
        ours = event in {"call", "c_return"} and frame.f_code.co_filename.startswith(GUARD)
        if ours and next(places) == n:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize(
    "call", [lambda c: c.decode_one(9), lambda c: c.logits()], ids=["decode_one", "logits"]
)
def test_an_interruption_anywhere_leaves_the_context_usable(reference_model, call):
    with reference_model.new_context(n_ctx=64) as context:
        for n in range(1, MOST):
            context.clear()
            context.decode(IDS)
            if not interrupt(n, lambda: call(context)):
                break
            held = context.tokens()
            assert held in (IDS, [*IDS, 9])
            assert held == engine_of(context).sequences[0].tokens.tolist()
            assert context.n_past() == len(held)
            context.decode_one(3)
            assert context.logits().shape == (context._n_vocab,)
    assert 3 < n < MOST
