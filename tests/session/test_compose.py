"""What a step is composed of, over any mix of sequences, without an engine."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infercore.session.compose import LENGTHS, Budget, StepPlan, compose, round_down

if TYPE_CHECKING:
    from collections.abc import Iterator


@attrs.define(eq=False)
class Seq:
    n_missing: int = 1
    n_held: int = 0
    n_limit: int | None = None
    is_prompt: bool = False
    age: int = 0
    served: int = -1


@attrs.frozen
class Costs:
    together: int = 99
    piece: int = 8
    learns: bool = True
    steps: Iterator[int] = attrs.field(factory=count, eq=False)

    def per_call(self, n_running: int) -> int:
        return min(self.together, n_running)

    def prompt_tokens(self, n_running: int, depth: int = 0) -> int:
        return self.piece

    def rounded(self, n_running: int, n_prompt: int, *, is_all: bool) -> int:
        if is_all and not self.learns:
            return n_prompt
        return max(1, round_down(n_running + n_prompt) - n_running)

    def wants_step(self) -> bool:
        return self.learns and next(self.steps) % 25 == 24


running = st.builds(
    Seq, n_missing=st.integers(1, 5), served=st.integers(-1, 50), n_held=st.integers(0, 40)
)
prompts = st.builds(
    Seq,
    n_missing=st.integers(1, 120),
    served=st.integers(-1, 50),
    n_held=st.integers(0, 40),
    n_limit=st.none() | st.integers(1, 50),
    is_prompt=st.just(True),
)
budgets = st.builds(
    Budget,
    n_tokens=st.integers(1, 300),
    n_sequences=st.integers(1, 12),
    multiple=st.none() | st.integers(1, 32),
)
costs = st.builds(Costs, together=st.integers(1, 12), piece=st.integers(1, 64))


@st.composite
def mixes(draw: st.DrawFn) -> list[Seq]:
    mix = draw(st.lists(st.one_of(running, prompts), max_size=12))
    for age, sequence in enumerate(draw(st.permutations(mix))):
        sequence.age = age
    return mix


def check(plan: StepPlan[Seq], mix: list[Seq], budget: Budget) -> None:
    """What every plan keeps."""
    chosen = [id(sequence) for sequence, _ in plan.parts]
    assert len(chosen) == len(set(chosen)) <= budget.n_sequences
    assert {*chosen} <= {id(sequence) for sequence in mix}
    assert plan.n_tokens <= budget.n_tokens
    assert plan.parts
    assert all(1 <= n <= sequence.n_missing for sequence, n in plan.parts)
    assert all(s.n_limit is None or n <= s.n_limit for s, n in plan.parts)
    assert plan.n_prompt == sum(n for sequence, n in plan.parts if sequence.is_prompt)
    assert plan.n_running == sum(not sequence.is_prompt for sequence, _ in plan.parts)


@given(mixes(), budgets, costs)
@settings(deadline=None)
def test_a_plan_keeps_the_budget_and_makes_progress(
    mix: list[Seq], budget: Budget, costs: Costs
) -> None:
    plan = compose(mix, budget, costs)
    if not mix:
        assert not plan.parts
        return
    check(plan, mix, budget)
    assert budget.multiple is None or len(plan.parts) == 1


@given(mixes(), budgets, costs)
@settings(deadline=None)
def test_each_running_one_gets_its_token_beside_a_prompt(
    mix: list[Seq], budget: Budget, costs: Costs
) -> None:
    waiting = [sequence for sequence in mix if sequence.is_prompt]
    n_running = len(mix) - len(waiting)
    n_most = min(budget.n_tokens, budget.n_sequences)
    if not waiting or not n_running or budget.multiple or n_running >= n_most or n_most == 1:
        return
    plan = compose(mix, budget, costs)
    assert plan.n_running == n_running
    first = min(waiting, key=lambda sequence: sequence.age)
    assert any(sequence is first for sequence, _ in plan.parts)
    assert plan.n_prompt <= max(1, costs.piece)


@given(mixes(), budgets, costs)
@settings(deadline=None, max_examples=40)
def test_every_sequence_ends_and_none_waits_long(
    mix: list[Seq], budget: Budget, costs: Costs
) -> None:
    """Played to the end: prompts are evaluated, then each sequence generates 5 tokens."""
    left = {id(sequence): 5 for sequence in mix}
    waited = dict.fromkeys(left, 0)
    n_most = min(budget.n_tokens, budget.n_sequences, costs.together)
    n_most = 1 if budget.multiple else n_most
    live, step = list(mix), 50
    while live:
        plan = compose(live, budget, costs)
        check(plan, live, budget)
        step += 1
        assert step < 20_000
        served = {id(sequence) for sequence, _ in plan.parts}
        for sequence in live:
            waits = not sequence.is_prompt and id(sequence) not in served
            waited[id(sequence)] = waited[id(sequence)] + 1 if waits else 0
            assert waited[id(sequence)] <= 1 + (len(mix) + 1) // n_most
        for sequence, n in plan.parts:
            sequence.served = step
            sequence.n_held += n
            sequence.n_missing -= n
            if sequence.n_missing and sequence.is_prompt:
                continue
            sequence.is_prompt, sequence.n_missing, sequence.n_limit = False, 1, None
            left[id(sequence)] -= 1
        live = [sequence for sequence in live if left[id(sequence)]]


@given(st.integers(1, 2000), st.integers(1, 512), costs)
def test_one_alone_is_split_as_the_budget_says_and_never_by_measuring(
    n_missing: int, n_tokens: int, costs: Costs
) -> None:
    alone = Seq(n_missing=n_missing, is_prompt=True)
    plan = compose([alone], Budget(n_tokens, 8), costs)
    assert plan.parts == ((alone, min(n_missing, n_tokens)),)


@given(st.integers(0, 100), st.integers(1, 500), st.integers(1, 64), st.integers(2, 6))
def test_pieces_end_at_absolute_multiples(
    n_held: int, n_missing: int, multiple: int, n_beside: int
) -> None:
    """So a prompt has the same pieces whatever of it was found, and whoever runs beside it."""
    prompt = Seq(n_missing=n_missing, n_held=n_held, is_prompt=True)
    beside = [Seq(age=-1, served=9) for _ in range(n_beside)]
    budget = Budget(512, 8, multiple)
    ends = set()
    while prompt.n_missing:
        ((_, n),) = compose([*beside, prompt], budget, Costs()).parts
        prompt.n_held += n
        prompt.n_missing -= n
        ends.add(prompt.n_held)
    assert all(end % multiple == 0 for end in ends - {n_held + n_missing})


def test_in_turns_a_prompt_has_one_turn_in_a_round() -> None:
    beside = [Seq(age=i) for i in range(3)]
    prompt = Seq(n_missing=1000, is_prompt=True, age=9)
    order = []
    for step in range(8):
        ((chosen, n),) = compose([*beside, prompt], Budget(64, 1), Costs(piece=8)).parts
        chosen.served = step
        order.append("prompt" if chosen is prompt else chosen.age)
        assert n == (8 if chosen is prompt else 1)
    assert order == [0, 1, 2, "prompt", 0, 1, 2, "prompt"]


def test_fewer_a_call_where_that_is_faster() -> None:
    mix = [Seq(age=i) for i in range(6)]
    for step in range(6):
        plan = compose(mix, Budget(64, 8), Costs(together=4))
        assert len(plan.parts) == 4
        for sequence, _ in plan.parts:
            sequence.served = step
    served = sorted(sequence.served for sequence in mix)
    assert served[0] >= 4


def test_guesses_take_what_is_left() -> None:
    mix = [Seq(n_missing=5, age=0), Seq(n_missing=5, age=1), Seq(age=2)]
    plan = compose(mix, Budget(9, 8), Costs())
    assert [n for _, n in plan.parts] == [5, 3, 1]
    beside = compose([*mix, Seq(n_missing=50, is_prompt=True, age=3)], Budget(9, 8), Costs())
    assert [n for _, n in beside.parts][:3] == [1, 1, 1]


def test_spare_room_goes_to_the_next_prompt() -> None:
    first, second = Seq(n_missing=3, is_prompt=True), Seq(n_missing=30, is_prompt=True, age=1)
    plan = compose([second, Seq(), first], Budget(64, 8), Costs(piece=8))
    assert [(n, sequence.age) for sequence, n in plan.parts[1:]] == [(3, 0), (5, 1)]


def test_mixed_calls_have_few_lengths() -> None:
    lengths = set()
    for n_running in range(1, 9):
        for n_missing in range(1, 200):
            mix = [Seq(age=i) for i in range(n_running)]
            mix.append(Seq(n_missing=n_missing, is_prompt=True, age=99))
            lengths.add(compose(mix, Budget(64, 16), Costs(piece=64)).n_tokens)
    assert lengths <= {*LENGTHS}


def test_a_prompt_that_fits_leaves_nothing_for_another_call() -> None:
    mix = [Seq(), Seq(n_missing=61, is_prompt=True, age=1)]
    fixed = Costs(piece=500, learns=False)
    assert compose(mix, Budget(512, 8), fixed).n_prompt == 61
    assert compose(mix, Budget(45, 8), fixed).n_prompt == 39  # it goes on in another call


@pytest.mark.parametrize("n", [1, 2, 16, 17, 23, 24, 100, 2048, 5000])
def test_round_down_gives_a_known_length(n: int) -> None:
    length = round_down(n)
    assert length <= n < 2 * length
    assert length in LENGTHS or length % LENGTHS[-1] == 0


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert compose([], Budget(8, 8), Costs()).parts == ()
    assert compose([Seq()], Budget(0, 8), Costs()).parts == ()


def test_prompts_of_which_none_generates_get_the_whole_call() -> None:
    mix = [Seq(n_missing=60, is_prompt=True, age=age) for age in range(3)]
    assert compose(mix, Budget(512, 8), Costs(piece=8)).n_prompt == 180
    assert compose([*mix, Seq()], Budget(512, 8), Costs(piece=8)).n_prompt == 8
