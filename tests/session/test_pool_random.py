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
