"""speculative="auto": guesses where they pay, from tokens and a stored constant alone."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

import infercore as ic
from infercore.session import guess_cost
from infercore.session.drafting import AutoLookup
from infercore.testing import load_reference_model

REFRAIN = [7, 9, 4, 12, 5, 8, 3, 11, 6, 2]


def steps_of(text: list[int], prompt: list[int], cost: float) -> tuple[float, list[int]]:
    """Return what decoding ``text`` takes, in plain steps, and the number of guesses of each."""
    drafter, held, took, guessed = AutoLookup(cost), list(prompt), 0.0, []
    at = 0
    while at < len(text):
        held.append(text[at])
        at += 1
        guesses = drafter.propose(held, len(text) - at)
        n_right = sum(
            1
            for _ in itertools.takewhile(
                lambda p: p[0] == p[1], zip(guesses, text[at:], strict=False)
            )
        )
        held += text[at : at + n_right]
        at += n_right
        took += 1 + cost * len(guesses)
        guessed.append(len(guesses))
    return took, guessed


@pytest.mark.parametrize("cost", [0.05, 0.2, 0.4])
def test_a_refrain_takes_fewer_steps(cost: float) -> None:
    text = REFRAIN * 20
    took, _ = steps_of(text, REFRAIN * 2, cost)
    assert len(text) / took > (1.2 if cost > 0.3 else 1.8)


def misleading(seed: int, n: int = 2000) -> list[int]:
    """Return a text whose pairs come again and again, each time followed by something else."""
    rng = random.Random(seed)
    text: list[int] = []
    while len(text) < n:
        text += [*rng.choice([(1, 2, 3), (4, 5, 6), (1, 5, 2)]), 100 + len(text), 7000 + len(text)]
    return text


def ends_badly(seed: int) -> list[int]:
    """Return a refrain that earns trust, and then a text that betrays it."""
    return REFRAIN * 5 + misleading(seed)


@pytest.mark.parametrize("make", [misleading, ends_badly])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cost", [0.01, 0.1, 0.3, 0.9])
def test_no_text_takes_more_than_a_fiftieth_longer(make: Any, seed: int, cost: float) -> None:
    text = make(seed)
    took, guessed = steps_of(text, REFRAIN, cost)
    assert took / len(text) <= 1.02
    assert cost > 0.5 or sum(guessed) > 0  # it does try


@pytest.mark.parametrize("cost", [0.05, 0.2, 0.4, 0.7])
def test_not_even_one_that_knows_when_it_guesses(cost: float) -> None:
    """The text goes as looked up until that is guessed, and then otherwise."""
    drafter, lookup, took = AutoLookup(cost), AutoLookup(1.0), 0.0
    held, fresh = REFRAIN * 3, itertools.count(1000)
    for _ in range(3000):
        lookup.propose(held, 16)
        looked_up = lookup._expected
        guesses = drafter.propose(held, 16)
        took += 1 + cost * len(guesses)
        held.append(next(fresh) if guesses or not looked_up else looked_up[0])
        if guesses:
            held += REFRAIN
            took += len(REFRAIN)
    assert took / (len(held) - 3 * len(REFRAIN)) <= 1.02


def test_a_guess_that_costs_a_step_is_never_made() -> None:
    assert sum(steps_of(REFRAIN * 20, REFRAIN * 2, 1.0)[1]) == 0


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    monkeypatch.setenv("INFERCORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(guess_cost, "_memory", {})
    with load_reference_model() as model, model.new_session(n_ctx=512) as opened:
        yield opened


def told(session: Any, **fields: Any) -> tuple[list[int], Any]:
    session.ensure_prefix("The sun and the hare. " * 6)
    bias = dict.fromkeys(
        session.model.tokenizer.encode("The sun and the hare.", add_special=False), 9.0
    )
    chunks = list(session.decode(max_tokens=60, ignore_eos=True, logit_bias=bias, **fields))
    return [token for chunk in chunks for token in chunk.tokens], chunks[-1].usage


def test_the_text_is_that_without_guesses(monkeypatch: pytest.MonkeyPatch, session: Any) -> None:
    monkeypatch.setattr(guess_cost, "_measured", lambda *_: 0.1)
    plain, _ = told(session, temperature=0)
    guessed, usage = told(session, temperature=0, speculative="auto")
    assert guessed == plain
    assert usage.drafted_tokens >= usage.accepted_tokens > 0
    assert (
        told(session, temperature=0, speculative="auto")[1].drafted_tokens == usage.drafted_tokens
    )


def test_a_seed_turns_it_off_and_a_name_does_not(
    monkeypatch: pytest.MonkeyPatch, session: Any
) -> None:
    monkeypatch.setattr(guess_cost, "_measured", lambda *_: 0.1)
    assert told(session, seed=1, speculative="auto")[1].drafted_tokens == 0
    assert told(session, seed=1, speculative=ic.SpeculativeConfig())[1].drafted_tokens > 0


def test_the_cost_is_measured_once_and_kept(
    monkeypatch: pytest.MonkeyPatch, session: Any, tmp_path: Any
) -> None:
    told(session, temperature=0, speculative="auto")
    kept = json.loads((tmp_path / guess_cost.FILE).read_text())
    (cost,) = kept.values()
    assert 0.01 <= float(cost) <= 1
    monkeypatch.setattr(guess_cost, "_memory", {})
    monkeypatch.setattr(guess_cost, "_measured", lambda *_: pytest.fail("measured again"))
    assert guess_cost.guess_cost(session.model, session.context) == float(cost)


@pytest.mark.parametrize("value", ["on", "Auto", "", 1, True])
def test_other_words_are_refused(value: Any) -> None:
    with pytest.raises(ic.InvalidInputError):
        ic.DecodeConfig(speculative=value)
