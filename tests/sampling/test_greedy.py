"""Greedy sampling takes a shorter way where no step can change what it comes to."""

from __future__ import annotations

import math

import numpy as np
import pytest

from infercore.errors import InvalidStateError


@pytest.mark.parametrize("bias", [{}, {2: -math.inf}, {2: -1.0, 5: -math.inf}, {2: 1.0}])
def test_greedy_in_one_pass_is_what_all_steps_come_to(make, bias):
    """The largest logit of the row as it came is taken at once where nothing can change that."""
    fields = {"temperature": 0, "logit_bias": bias}
    short, whole = make(8, **fields), make(8, **fields, own={"processors": [_Same()]})
    random = np.random.default_rng(4)
    for _ in range(300):
        row = random.integers(-2, 3, 8).astype(np.float32)
        row[random.random(8) < 0.2] = -np.inf
        if random.random() < 0.2:
            row[int(random.integers(8))] = random.choice([np.nan, np.inf])
        assert outcome(short, row) == outcome(whole, row)


class _Same:
    """A processor that changes nothing, so that every step is taken."""

    def apply(self, row):
        return row


def outcome(sampler, row):
    try:
        token = sampler.sample_logits(row)
    except InvalidStateError as error:
        return error.state
    return token, sampler.last_logprobs(3, processed=True)


def test_an_error_leaves_what_was_sampled_before(make):
    sampler = make(2, temperature=0, logit_bias={0: -math.inf}, own={"logprobs": True})
    row = np.array([1, 2], np.float32)
    assert sampler.sample_logits(row) == 1
    before = sampler.last_logprobs(2)
    for bad in ([3, -np.inf], [np.nan, 1], [np.inf, 1]):
        with pytest.raises(InvalidStateError):
            sampler.sample_logits(np.array(bad, np.float32))
        assert sampler.last_logprobs(2) == before
