"""The tape: longest common prefix, lazy truncation, warm tail."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infercore.session.tape import Tape, common_prefix

token_lists = st.lists(st.integers(0, 3), max_size=40)


def naive_common_prefix(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@given(token_lists, token_lists)
def test_common_prefix_equals_counting_one_by_one(a: list[int], b: list[int]) -> None:
    assert common_prefix(a, b) == naive_common_prefix(a, b)


@given(token_lists, token_lists)
def test_common_prefix_of_extensions(shared: list[int], tail: list[int]) -> None:
    assert common_prefix(shared + tail, shared) == len(shared)


@given(token_lists, token_lists, st.booleans())
def test_a_plan_turns_the_tape_into_the_target(
    held: list[int], target: list[int], last_again: bool
) -> None:
    tape = Tape()
    tape.extend(held)
    plan = tape.plan(target, last_again=last_again)
    if plan.tokens:
        assert held[: plan.keep] + plan.tokens == target
        assert plan.drop == len(held) - plan.keep
    else:
        assert held[: len(target)] == target
        assert plan.drop == 0
    assert not (last_again and target and not plan.tokens)


def test_what_lies_beyond_the_logical_context_is_the_warm_tail() -> None:
    tape = Tape()
    tape.extend([1, 2, 3, 4])
    tape.logical = 1
    assert tape.warm_tail == 3
    assert tape.plan([1, 2, 3, 9]).keep == 3
    tape.truncate(2)
    assert (len(tape), tape.logical, tape.warm_tail) == (2, 1, 1)
    tape.truncate(0)
    assert tape.logical == 0
