"""The reference's own sampler and the portable one: written apart, the same in the end."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from infercore.errors import InvalidStateError, UnsupportedFeatureError
from infercore.sampling.candidates import softmax
from infercore.sampling.portable import PortableSampler
from infercore.testing.reference_sampler import ReferenceSampler
from infercore.testing.toy import ToyTokenizer
from infercore.testing.truncation import probabilities
from infercore.values.config import SamplingConfig

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
N_VOCAB = ToyTokenizer.n_vocab
HISTORY = [97, 98, 99, 120, 97, 98, 99, 10, 97, 98, 99, 121, 97, 98]
ACROSS = [120, 98, 98, 10, 97, 99, 120, 98, 98, 10, 97]  # what is repeated has a breaker in it
CASES = [
    {},
    {"top_k": 7},
    {"top_p": 0.6}, {"top_p": 0.6, "min_keep": 30}, {"top_p": 0.0},
    {"min_p": 0.3}, {"min_p": 0.3, "min_keep": 9}, {"min_p": 1.0},
    {"typical_p": 0.5}, {"typical_p": 0.2, "min_keep": 5},
    {"top_n_sigma": 1.0}, {"top_n_sigma": 0.2, "top_k": 3},
    {"temperature": 0.3}, {"temperature": 3.0, "top_k": 20},
    {"temperature": 0.8, "dynatemp_range": 0.5}, {"temperature": 0.5, "dynatemp_range": 2.0},
    {"dynatemp_range": 0.9, "dynatemp_exponent": 2.5, "top_k": 12},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02, "min_keep": 200},
    {"repeat_penalty": 1.8}, {"repeat_penalty": 0.7, "penalty_last_n": 4},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4, "penalty_last_n": -1},
    {"presence_penalty": 5.0, "penalty_last_n": 0},
    {"dry_multiplier": 2.0}, {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    {"dry_multiplier": 1.0, "dry_base": 3.0, "dry_sequence_breakers": ()},
    {"dry_multiplier": 1.0, "dry_sequence_breakers": ("x",), "dry_penalty_last_n": 6},
    {"dry_multiplier": 1.0, "dry_base": 0.5},
    {"logit_bias": {97: 4.0, 98: -np.inf}}, {"ignore_eos": True},
    {"temperature": 0.0}, {"temperature": 0.0, "xtc_probability": 1.0},
    {"typical_p": 0.9, "top_p": 0.8, "min_p": 0.05, "temperature": 1.4, "repeat_penalty": 1.2},
]  # fmt: skip


def row(seed):
    random = np.random.default_rng(seed)
    return random.normal(0, 2.5, N_VOCAB).astype(np.float32)


class Context:
    """One output row, as an engine's context has it."""

    def __init__(self, logits):
        self.rows = logits

    def logits(self, _):
        return self.rows


def native(**fields):
    return ReferenceSampler(SamplingConfig(**{**OFF, **fields}), ToyTokenizer())


def portable(**fields):
    config = SamplingConfig(**{**OFF, **fields})
    return PortableSampler(config, tokenizer=ToyTokenizer(), n_vocab=N_VOCAB)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fields", CASES, ids=str)
def test_both_leave_the_same_candidates_with_the_same_probabilities(fields, seed):
    mine, specified = native(seed=1, **fields), portable(seed=1, **fields)
    for sampler in (mine, specified):
        sampler.observe(ACROSS if seed else HISTORY)
    left = mine.candidates(row(seed).tolist())
    found = dict(zip([token for token, _ in left], probabilities(left), strict=True))
    ids, expected = specified.distribution(row(seed))
    assert set(found) == set(ids.tolist())
    for token, p in zip(ids.tolist(), expected.tolist(), strict=True):
        assert found[token] == pytest.approx(p, abs=1e-5)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_draws_what_the_portable_one_does(version):
    fields = {"mirostat": version, "mirostat_tau": 3.0, "mirostat_eta": 0.2}
    logits, n = row(4), 4000
    counts = []
    for sampler in (native(seed=3, **fields), portable(seed=3, **fields)):
        take = getattr(sampler, "sample_logits", None) or (
            lambda x, s=sampler: s.sample(Context(x), 0)
        )
        counts.append(Counter(take(logits) for _ in range(n)))
    p = softmax(logits.astype(np.float64))
    for token in np.argsort(-p)[:8].tolist():
        shares = [count[token] / n for count in counts]
        assert abs(shares[0] - shares[1]) < 6 * np.sqrt(2 * max(shares) / n) + 2 / n


def test_draws_follow_the_probabilities():
    sampler, logits, n = native(seed=9, top_k=6), row(5), 3000
    counts = Counter(sampler.sample(Context(logits), 0) for _ in range(n))
    left = sampler.candidates(logits.tolist())
    for (token, _), p in zip(left, probabilities(left), strict=True):
        assert abs(counts[token] - n * p) < 5 * np.sqrt(n * p * (1 - p)) + 1


def test_xtc_happens_as_often_as_it_should():
    sampler = native(seed=2, xtc_probability=0.3, xtc_threshold=0.02)
    whole = N_VOCAB
    cut = sum(len(sampler.candidates(row(1).tolist())) < whole for _ in range(500))
    assert 100 < cut < 200


def test_seed_clone_and_reset():
    sampler, context = native(seed=5, frequency_penalty=0.5), Context(row(6))
    first = [sampler.sample(context, 0) for _ in range(6)]
    twin = sampler.clone()
    expected = [sampler.sample(context, 0) for _ in range(6)]
    assert [twin.sample(context, 0) for _ in range(6)] == expected
    sampler.reset()
    assert [sampler.sample(context, 0) for _ in range(6)] == first
    assert 0 <= native().seed < 2**32 - 1


def test_what_it_cannot_do_is_refused():
    with pytest.raises(UnsupportedFeatureError, match="dry_sequence_breakers"):
        native(dry_multiplier=1.0, dry_sequence_breakers=("\n\n",))
    with pytest.raises(InvalidStateError, match="forbid every token"):
        native(logit_bias=dict.fromkeys(range(N_VOCAB), -np.inf)).candidates([0.0] * N_VOCAB)
