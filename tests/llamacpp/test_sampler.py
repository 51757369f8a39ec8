"""The engine's own sampler."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

import infercore as ic


@pytest.fixture
def ready(context, prompt):
    context.decode(prompt, seq_id=0, logits="all")
    return context, len(prompt) - 1


@pytest.fixture
def sampler_of(story):
    made = []

    def make(**fields):
        made.append(story.new_sampler(ic.SamplingConfig(**fields)))
        return made[-1]

    yield make
    for sampler in made:
        sampler.close()


def test_temperature_zero_is_argmax(ready, sampler_of):
    context, row = ready
    best = int(context.logits(row).argmax())
    sampler = sampler_of(temperature=0, xtc_probability=1.0, xtc_threshold=0.0)
    assert {sampler.sample(context, row) for _ in range(5)} == {best}


def test_top_k_stays_among_the_best(ready, sampler_of):
    context, row = ready
    best = set(np.argsort(context.logits(row))[-3:].tolist())
    drawn = {
        sampler_of(top_k=3, top_p=1, min_p=0, temperature=5, seed=s).sample(context, row)
        for s in range(40)
    }
    assert drawn <= best
    assert len(drawn) > 1


def test_the_distribution_is_the_softmax(ready, sampler_of):
    context, row = ready
    sampler = sampler_of(top_k=4, top_p=1, min_p=0, temperature=3, seed=1)
    drawn = Counter(sampler.sample(context, row) for _ in range(4000))
    logits = context.logits(row)
    best = np.argsort(logits)[-4:]
    expected = np.exp((logits[best] - logits[best].max()) / 3)
    expected /= expected.sum()
    for token, share in zip(best.tolist(), expected, strict=True):
        assert abs(drawn[token] / 4000 - share) < 0.04


@pytest.mark.parametrize(
    "fields",
    [
        {"mirostat": 1},
        {"mirostat": 2},
        {"mirostat": 1, "top_k": 1},
        {"top_n_sigma": 1.0},
        {"typical_p": 0.5},
        {"typical_p": 0.0, "top_p": 0.0, "min_p": 1.0, "min_keep": 0},
        {"xtc_probability": 1.0, "xtc_threshold": 0.01},
        {"dynatemp_range": 0.5},
        {"dry_multiplier": 1.0, "penalty_last_n": -1, "repeat_penalty": 1.3},
        {"top_k": 0, "top_p": 1, "min_p": 0},
        {"ignore_eos": True},
    ],
)
def test_seed_reset_and_clone(ready, sampler_of, fields):
    context, row = ready
    sampler = sampler_of(seed=11, temperature=2.0, **fields)
    first = [sampler.sample(context, row) for _ in range(12)]
    assert all(0 <= token < 1024 for token in first)
    copy = sampler.clone()
    assert [copy.sample(context, row) for _ in range(8)] == [
        sampler.sample(context, row) for _ in range(8)
    ]
    copy.close()
    sampler.reset()
    assert [sampler.sample(context, row) for _ in range(12)] == first
    assert sampler.seed == 11


def test_a_seed_is_drawn_and_reported(sampler_of):
    seeds = {sampler_of().seed for _ in range(5)}
    assert len(seeds) > 1
    assert all(0 <= seed < 2**32 - 1 for seed in seeds)


def test_sampling_accepts_once_and_observing_counts(ready, sampler_of):
    context, row = ready
    fields = {"temperature": 0, "frequency_penalty": 100.0, "penalty_last_n": 3}
    sampler = sampler_of(**fields)
    drawn = [sampler.sample(context, row) for _ in range(5)]
    assert len(set(drawn[:4])) == 4
    assert drawn[4] == drawn[0]  # forgotten after three others
    other = sampler_of(**fields)
    other.observe(drawn[:2])
    assert other.sample(context, row) == drawn[2]


def test_bias_and_end_tokens(ready, sampler_of):
    context, row = ready
    assert sampler_of(temperature=0, logit_bias={77: 100.0}).sample(context, row) == 77
    best = int(context.logits(row).argmax())
    barred = sampler_of(temperature=0, logit_bias={best: -math.inf})
    assert barred.sample(context, row) != best
    ends = sampler_of(temperature=0, logit_bias={1: 200.0, 3: 100.0}, ignore_eos=True)
    assert ends.sample(context, row) == best


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"logit_bias": dict.fromkeys(range(1024), -math.inf)}, ic.InvalidInputError),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": ["a\0b"]}, ic.UnsupportedFeatureError),
    ],
)
def test_what_the_engine_would_drop_or_die_of_is_refused(sampler_of, fields, error):
    with pytest.raises(error):
        sampler_of(**fields)


def test_a_window_of_minus_one_is_longer_than_the_trained_one(ready, story, sampler_of):
    context, row = ready
    best = int(context.logits(row).argmax())
    other = [(best + 7) % story.info.n_vocab] * (story.info.n_ctx_train + 10)
    penalised = sampler_of(temperature=0, presence_penalty=1e4, penalty_last_n=-1)
    penalised.observe([best, *other])
    fields = {"dry_multiplier": 1e4, "dry_allowed_length": 1, "dry_sequence_breakers": ()}
    dry = sampler_of(temperature=0, dry_penalty_last_n=-1, **fields)
    dry.observe([8, 9, best, *other, 8, 9])
    assert best not in (penalised.sample(context, row), dry.sample(context, row))


def test_a_row_that_is_not_there_never_reaches_the_engine(context, prompt, sampler_of):
    """Which would end the process; the core asks for none."""
    sampler = sampler_of()
    with pytest.raises(IndexError):
        sampler.sample(context, 0)
    context.decode(prompt, seq_id=0, logits="none")
    with pytest.raises(IndexError):
        sampler.sample(context, 0)


def test_closing_twice(story):
    sampler = story.new_sampler(ic.SamplingConfig())
    sampler.close()
    sampler.close()
