"""The cost model follows what it is told: machines of several kinds, played without a clock."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest

from infercore.session.compose import LENGTHS
from infercore.session.cost_model import N_FIRST, STALE, CostModel

if TYPE_CHECKING:
    from collections.abc import Callable

Q8_0 = {1: 14.3, 2: 55.0, 3: 68.0, 4: 76.0, 6: 101.0, 8: 84.7, 12: 106.0, 16: 123.0}
"""ms a call on a machine where 2 to 6 sequences are slower than turns."""
Q4_0 = {1: 7.8, 2: 13.4, 4: 14.4, 6: 25.0, 8: 25.0, 16: 39.1}
OPENVINO = {1: 14.1, 2: 15.5, 4: 17.6, 8: 21.8, 16: 29.0}


def time_of(machine: dict[int, float], n: int) -> float:
    if n in machine:
        return machine[n]
    low = max(size for size in machine if size < n)
    high = min(size for size in machine if size > n)
    return machine[low] + (n - low) / (high - low) * (machine[high] - machine[low])


def play(model: CostModel, machine: dict[int, float], n_running: int, n_calls: int = 64) -> float:
    """Let the model choose; return the ms a token of the later half of the calls."""
    spent, n_tokens = 0.0, 0
    for call in range(n_calls):
        n = model.per_call(n_running)
        assert 1 <= n <= n_running
        took = time_of(machine, n) * random.Random(call).uniform(0.97, 1.03)
        model.record(n, 0, took)
        if call >= n_calls // 2:
            spent, n_tokens = spent + took, n_tokens + n
    return spent / n_tokens


@pytest.mark.parametrize("machine", [Q8_0, Q4_0, OPENVINO], ids=["q8_0", "q4_0", "openvino"])
@pytest.mark.parametrize("n_running", [2, 3, 4, 5, 6, 8, 12, 16])
def test_auto_comes_close_to_the_best_number_a_call(
    machine: dict[int, float], n_running: int
) -> None:
    best = min(time_of(machine, n) / n for n in range(1, n_running + 1))
    assert play(CostModel(), machine, n_running) <= 1.05 * best


def test_on_q8_0_a_few_take_turns_and_eight_do_not() -> None:
    model = CostModel()
    for n_running in (8, 6, 4, 2):
        play(model, Q8_0, n_running)
    assert [model.per_call(n) for n in (2, 4, 6)] == [1, 1, 1]
    assert model.takes_turns
    play(model, Q8_0, 8)
    assert model.per_call(8) == 8
    assert not model.takes_turns
    assert model.per_call(9) in (8, 9)


@pytest.mark.parametrize(("batching", "expected"), [("always", 6), ("never", 1)])
def test_what_was_asked_for_is_not_measured(batching: str, expected: int) -> None:
    model = CostModel(batching=batching)
    play(model, Q8_0, 6)
    assert model.per_call(6) == expected


def test_it_follows_a_machine_that_changes() -> None:
    model = CostModel()
    play(model, Q8_0, 4)
    assert model.per_call(4) == 1
    play(model, OPENVINO, 4, 3 * STALE)
    assert model.per_call(4) == 4


def test_a_stall_is_not_believed() -> None:
    model = CostModel()
    play(model, OPENVINO, 8)
    model.record(8, 0, 10_000.0)
    assert model.step_ms(8) == pytest.approx(OPENVINO[8], rel=0.5)
    play(model, OPENVINO, 8, 32)
    assert model.per_call(8) == 8


def test_the_first_call_of_a_shape_does_not_count_for_long() -> None:
    model = CostModel()
    model.record(4, 0, 150.0)
    model.record(4, 0, 17.0)
    assert model.step_ms(4) == 17.0


def mixed(machine: dict[int, float], n_running: int, n_prompt: int, token_ms: float) -> float:
    return time_of(machine, n_running) + token_ms * n_prompt


@pytest.mark.parametrize(("n_running", "token_ms"), [(1, 0.9), (8, 0.9), (8, 4.0), (1, 4.0)])
def test_a_piece_keeps_the_step_near_the_step_without(n_running: int, token_ms: float) -> None:
    model = CostModel(batching="always")
    for _ in range(N_FIRST):
        model.record(n_running, 0, OPENVINO[n_running])
    for _ in range(40):
        n = model.prompt_tokens(n_running)
        model.record(n_running, n, mixed(OPENVINO, n_running, n, token_ms))
    step = mixed(OPENVINO, n_running, n, token_ms)
    assert step <= 2.5 * OPENVINO[n_running]
    larger = min(length for length in LENGTHS if length > n)
    assert mixed(OPENVINO, n_running, larger, token_ms) > 2.0 * OPENVINO[n_running]


def test_steps_beside_several_are_kept_shorter_than_beside_one() -> None:
    pieces = []
    for n_running in (1, 2):
        model = CostModel(batching="always")
        for _ in range(40):
            model.record(n_running, 0, 50.0)
            n = model.prompt_tokens(n_running)
            model.record(n_running, n, 50.0 + 0.9 * (n_running + n))
        pieces.append(n_running + n)
    assert pieces[1] < pieces[0]


def test_a_piece_has_a_token_at_least() -> None:
    slow = CostModel(batching="always")
    for _ in range(N_FIRST):
        slow.record(2, 0, 900.0)
        slow.record(2, 1, 1900.0)
    assert slow.prompt_tokens(2) == 1


@pytest.mark.parametrize("n_running", [1, 8])
def test_the_longest_step_may_be_given(n_running: int) -> None:
    model = CostModel(batching="always", max_step_ms=100.0)
    for _ in range(N_FIRST):
        model.record(n_running, 0, 20.0)
    for _ in range(60):
        n = model.prompt_tokens(n_running)
        model.record(n_running, 0, 20.0)
        model.record(n_running, n, 20.0 + 0.9 * n)
    assert 75.0 <= 20.0 + 0.9 * n <= 100.0
    for _ in range(4 * N_FIRST):
        model.record(n_running, 0, 200.0)  # a machine that is too slow for it: prompts go on
    assert model.prompt_tokens(n_running) >= 1


def test_where_cells_are_each_one_s_own_the_rest_of_a_piece_is_a_round_number() -> None:
    model = CostModel(batching="always", max_step_ms=450.0)
    model.has_own_cells = True
    for n_running in (7, 3, 5):
        for _ in range(N_FIRST):
            model.record(n_running, 0, 12.0 * n_running)
    for n_running in (7, 3, 5) * 40:
        n = model.rounded(n_running, model.prompt_tokens(n_running), is_all=False)
        assert n - 1 in (0, *LENGTHS)
        model.record(n_running, n, 12.0 * n_running + 7.0 * (n - 1))
    for n_running, rest in ((7, 48), (3, 56), (5, 48)):  # known from the others too
        assert model.prompt_tokens(n_running) == 1 + rest
    assert model.rounded(5, 61, is_all=False) == 57
    assert model.rounded(5, 61, is_all=True) == 61
    assert model.rounded(5, 1, is_all=False) == 1


def test_a_step_that_was_asked_for_is_not_made_smaller() -> None:
    model = CostModel(step_tokens=64)
    for _ in range(N_FIRST):
        model.record(2, 0, 1.0)
        model.record(2, 62, 900.0)
    assert (model.prompt_tokens(2), model.prompt_tokens(70)) == (62, 1)


def amx(n_tokens: int) -> float:
    """ms a call where more than four tokens are a jump, and more than that cost little."""
    points = [(1, 36.0), (4, 43.0), (6, 66.0), (16, 73.0), (32, 87.0), (128, 122.0), (512, 425.0)]
    for (low, low_ms), (high, high_ms) in itertools.pairwise(points):
        if n_tokens <= high:
            return low_ms + (n_tokens - low) / (high - low) * (high_ms - low_ms)
    return 0.83 * n_tokens


@pytest.mark.parametrize(("n_running", "n_least", "n_most"), [(1, 15, 23), (8, 88, 184)])
def test_a_jump_in_the_cost_is_no_end(n_running: int, n_least: int, n_most: int) -> None:
    """Few tokens beside one that generates cost much each: many more are hardly more."""
    model = CostModel(batching="always")
    for _ in range(N_FIRST):
        model.record(n_running, 0, amx(n_running))
    steps = []
    for _ in range(60):
        n = model.prompt_tokens(n_running)
        steps.append(amx(n_running + n))
        model.record(n_running, n, steps[-1])
    assert n_least <= n <= n_most
    assert max(steps) <= 3.0 * amx(n_running)
    assert max(steps[-20:]) <= 2.5 * amx(n_running)
    assert sum(step > 2.5 * amx(n_running) for step in steps) <= 2


def test_pieces_get_shorter_as_a_prompt_gets_longer() -> None:
    """A token that looks at more tokens costs more: so says what the calls before told."""
    model, rng, steps = CostModel(batching="always"), random.Random(1), []
    for _ in range(3):
        depth, pieces = 0, []
        for _ in range(N_FIRST):
            model.record(1, 0, amx(1))
        while depth < 2048:
            if model.wants_step():
                model.record(1, 0, amx(1))
            n = model.prompt_tokens(1, depth)
            took = (amx(1 + n) + 3e-4 * n * depth) * rng.uniform(0.98, 1.02)
            model.record(1, n, took, depth)
            depth += n
            pieces.append(n)
            steps.append(took / amx(1))
    assert pieces[0] >= 1.5 * pieces[-1]
    assert sum(step > 2.5 for step in steps) <= 1
    assert len(pieces) <= 140


def test_a_length_that_was_slow_once_is_tried_again() -> None:
    model = CostModel(batching="always")
    for _ in range(2 * STALE):
        n = model.prompt_tokens(8)
        model.record(8, 0, 20.0)
        model.record(8, n, 20.0 + 4.0 * n)
    for _ in range(2 * STALE):
        n = model.prompt_tokens(8)
        model.record(8, 0, 20.0)
        model.record(8, n, 20.0 + 0.5 * n)
    assert 20.0 + 0.5 * n >= 1.8 * 20.0


def prompts(
    model: CostModel, pace: Callable[[int], float], *, n_running: int, n_prompts: int
) -> list[float]:
    """Let prompts of 2,048 tokens come, one behind the other with steps without one between them.

    Return how long each step with a piece took, over what one without took at that moment.
    """
    steps, rng, now = [], random.Random(0), 0
    for _ in range(n_prompts):
        for _ in range(50):
            now += 1
            model.record(n_running, 0, 40.0 * pace(now) * rng.uniform(0.97, 1.03))
        left = 2048
        while left > 0:
            n = 0 if model.wants_step() else min(left, model.prompt_tokens(n_running))
            now, left = now + 1, left - n
            steps.append((40.0 + 3.0 * n) / 40.0 * rng.uniform(0.97, 1.03))
            model.record(n_running, n, 40.0 * steps[-1] * pace(now))
    return steps


def test_now_and_then_a_step_has_no_piece_to_compare_with() -> None:
    for model, n_least in ((CostModel(), 7), (CostModel(step_tokens=64), 0)):
        n_without = 0
        for _ in range(200):
            if model.wants_step():
                n_without += 1
                model.record(1, 0, 40.0)
            else:
                model.record(1, 8, 80.0)
        assert n_least <= n_without <= 1.3 * n_least


@pytest.mark.parametrize("n_running", [1, 8])
def test_hardly_any_gap_is_a_try_of_what_was_too_long(n_running: int) -> None:
    model = CostModel(batching="always")
    prompts(model, lambda _: 1.0, n_running=n_running, n_prompts=1)  # meets all lengths
    steps = prompts(model, lambda _: 1.0, n_running=n_running, n_prompts=20)
    assert sum(step > 2.5 for step in steps) <= 0.005 * len(steps)
    assert sum(steps) / len(steps) >= 1.85  # and what a step may take is used


@pytest.mark.parametrize("n_running", [1, 8])
@pytest.mark.parametrize("n_calls", [30, 200])
def test_a_machine_that_gets_slower_and_faster_changes_no_piece(
    n_running: int, n_calls: int
) -> None:
    model = CostModel(batching="always")

    def pace(now: int) -> float:
        return 1.8 if now // n_calls % 2 else 1.0

    prompts(model, pace, n_running=n_running, n_prompts=2)
    steps = prompts(model, pace, n_running=n_running, n_prompts=20)
    assert sum(step > 2.5 for step in steps) <= 0.03 * len(steps)
    assert sum(steps) / len(steps) >= 1.7
