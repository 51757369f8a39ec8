"""How many turns of a long conversation go."""

from __future__ import annotations

import random

import pytest

from infercore.chat.history import n_to_drop


@pytest.mark.parametrize("seed", range(20))
def test_a_long_one_is_looked_at_from_its_end_with_the_same_answer(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.randint(1, 30) for _ in range(chance.randint(0, 80))]
    room = chance.randint(0, 400)

    def fits(n: int) -> bool:
        return sum(sizes[n:]) <= room

    asked: list[int] = []

    def counted(n: int) -> bool:
        asked.append(n)
        return fits(n)

    n = n_to_drop(len(sizes), counted, is_long=True)
    assert n == n_to_drop(len(sizes), fits)
    assert n == len(sizes) or fits(n)
    if n:
        assert 0 not in asked or not fits(0)
