"""A seeded sample of random pools; ``tools/random_pools.py`` runs as many as one likes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))

import pool_cases


@pytest.mark.parametrize("seed", [3, 6, 20])
def test_lives_in_a_pool_are_lives_alone(reference: Any, seed: int) -> None:
    pool_cases.check(reference, seed)


def test_batch_invariant_lives_are_bit_for_bit_those_alone(reference: Any) -> None:
    pool_cases.check(reference, 3, invariant=True)


def test_a_near_tie_of_a_fork_is_looked_for_where_the_fork_was(reference: Any) -> None:
    call = pool_cases.Call("prefix", "Once upon a time", 2, {"temperature": 0}, then="fork")
    with reference.new_session(n_ctx=64) as session:
        _, told = pool_cases.live(session, [call])
    moved = pool_cases._Moved(3)
    with reference.new_session(n_ctx=64) as session:
        again = pool_cases._again(session, call, 4, moved, forked=True)
    assert again.tokens == told.tokens
    assert moved.row.argmax() == told.tokens[3]
