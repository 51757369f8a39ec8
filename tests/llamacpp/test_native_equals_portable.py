"""The engine's sampler leaves what the portable one leaves, and draws as often.

Documented exceptions: which of exactly equal logits stay at a boundary is the engine's choice
(the portable sampler keeps those of the lowest ids), and the engine goes on listing tokens of
logit -inf, with a probability of 0. Random numbers are each implementation's own, so xtc is
compared where it acts always or never, and by its frequency.
"""

from __future__ import annotations

import ctypes
import json
import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
from infercore.sampling import PortableSampler
from llamacpp.chain import apply, chain_of, chi_square, chi_square_limit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}
HISTORY = [5, 9, 7, 200, 5, 9, 7, 31, 5, 9, 7]  # dry sees a repetition that 200 or 31 prolongs
N_DRAWS = 20_000

STEPS = {
    "nothing": {},
    "temperature": {"temperature": 0.3},
    "hot": {"temperature": 40.0},
    "dynatemp": {"dynatemp_range": 0.7, "dynatemp_exponent": 1.7},
    "dynatemp to zero": {"dynatemp_range": 3.0, "temperature": 0.5},
    "top_k": {"top_k": 17},
    "top_k of one": {"top_k": 1},
    "top_k beyond": {"top_k": 5000},
    "top_p": {"top_p": 0.7},
    "top_p zero": {"top_p": 0.0},
    "top_p min_keep": {"top_p": 0.1, "min_keep": 9},
    "min_p": {"min_p": 0.1},
    "min_p one": {"min_p": 1.0},
    "min_p min_keep": {"min_p": 0.9, "min_keep": 6},
    "typical": {"typical_p": 0.6},
    "typical zero": {"typical_p": 0.0},
    "typical min_keep": {"typical_p": 0.1, "min_keep": 12},
    "top_n_sigma": {"top_n_sigma": 1.5},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    "xtc min_keep": {"xtc_probability": 1.0, "xtc_threshold": 0.0, "min_keep": 3},
    "xtc without effect": {"xtc_probability": 1.0, "xtc_threshold": 0.51},
    "bias": {"logit_bias": {3: 7.5, 800: -4.0, 9: -math.inf}},
    "ignore_eos": {"ignore_eos": True},
    "repeat": {"repeat_penalty": 1.6},
    "repeat reward": {"repeat_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.9},
    "presence": {"presence_penalty": 1.3},
    "penalties window": {"frequency_penalty": 1.1, "penalty_last_n": 3},
    "penalties all": {"frequency_penalty": -1.1, "penalty_last_n": -1},
    "dry": {"dry_multiplier": 2.0, "dry_sequence_breakers": ()},
    "dry short": {"dry_multiplier": 1.0, "dry_allowed_length": 1, "dry_sequence_breakers": ()},
    "dry window": {"dry_multiplier": 1.0, "dry_penalty_last_n": 5, "dry_sequence_breakers": ()},
    "dry breakers": {"dry_multiplier": 1.0},
    "top_k beyond 32 bits": {"top_k": 2**32 + 5},
    "min_keep beyond 64 bits": {"top_p": 0.5, "min_keep": 2**64 + 1},
    "typical, some forbidden": {"typical_p": 0.5, "ignore_eos": True},
    "typical, some hopeless": {"typical_p": 0.5, "logit_bias": {7: -200.0}},
    "typical, some dropped": {"typical_p": 0.5, "top_n_sigma": 2.0},
    "dynatemp, some forbidden": {"dynatemp_range": 0.9, "logit_bias": {8: -math.inf}},
    "dynatemp, some dropped": {"dynatemp_range": 0.9, "top_n_sigma": 2.0},
    "xtc, some dropped": {
        "xtc_probability": 1.0, "xtc_threshold": 0.01, "top_n_sigma": 1.0, "min_keep": 4,
    },
}  # fmt: skip


def row_of(seed: int, n_vocab: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n_vocab) * 2.5).astype(np.float32)


def both(model: Any, **fields: Any) -> tuple[Any, PortableSampler]:
    from infercore_llamacpp.sampler import LlamaSampler

    config = ic.SamplingConfig(**fields)
    portable = PortableSampler(config, tokenizer=model.tokenizer, n_vocab=model.info.n_vocab)
    return LlamaSampler.build(model, config), portable


def check_same(model: Any, row: np.ndarray, fields: dict[str, Any], history: list[int]) -> None:
    native, portable = both(model, **fields)
    native.observe(history)
    portable.observe(history)
    left = apply(native._chain, row)
    ids, probabilities = portable.distribution(row)
    native.close()
    if fields["temperature"] == 0:  # the engine's argmax leaves its list as it is
        assert [left.chosen] == ids.tolist()
        return
    likely = np.isin(left.ids, ids)  # the portable one drops what underflows to nothing
    assert left.probabilities[~likely].max(initial=0) < 1e-30
    assert left.ids[likely].tolist() == ids.tolist()
    assert np.abs(left.probabilities[likely] - probabilities).max() < 1e-5
    assert left.chosen in ids


@pytest.mark.parametrize("name", STEPS)
def test_each_step_alone(story: Any, name: str) -> None:
    for seed in range(4):
        row = row_of(seed, story.info.n_vocab)
        check_same(story, row, {**OFF, **STEPS[name]}, HISTORY)


def random_config(random: np.random.Generator) -> dict[str, Any]:
    """Return a config with about half of all steps on, at values over their whole range."""
    fields: dict[str, Any] = {**OFF, "min_keep": int(random.integers(0, 6))}
    choices: dict[str, Callable[[], dict[str, Any]]] = {
        "temperature": lambda: {"temperature": float(random.choice([0, 0.2, 0.9, 1.5, 6]))},
        "dynatemp": lambda: {"dynatemp_range": random.uniform(0, 1.5)},
        "top_k": lambda: {"top_k": int(random.integers(1, 200))},
        "top_p": lambda: {"top_p": random.uniform(0, 1)},
        "min_p": lambda: {"min_p": random.uniform(0, 0.3)},
        "typical": lambda: {"typical_p": random.uniform(0, 1)},
        "sigma": lambda: {"top_n_sigma": random.uniform(0.2, 4)},
        "xtc": lambda: {"xtc_probability": 1.0, "xtc_threshold": random.uniform(0, 0.3)},
        "repeat": lambda: {"repeat_penalty": random.uniform(0.5, 2)},
        "frequency": lambda: {"frequency_penalty": random.uniform(-2, 2)},
        "presence": lambda: {"presence_penalty": random.uniform(-2, 2)},
        "window": lambda: {"penalty_last_n": int(random.integers(-1, 12))},
        "dry": lambda: {
            "dry_multiplier": random.uniform(0, 3),
            "dry_allowed_length": int(random.integers(1, 4)),
            "dry_base": random.uniform(1, 3),
        },
        "bias": lambda: {
            "logit_bias": {
                int(token): float(random.choice([-math.inf, -5, 2, 8]))
                for token in random.integers(0, 1024, size=5)
            }
        },
        "eos": lambda: {"ignore_eos": True},
    }
    for choose in choices.values():
        if random.random() < 0.45:
            fields |= choose()
    return fields


@pytest.mark.parametrize("block", range(12))
def test_combinations(story: Any, block: int) -> None:
    for seed in range(25):
        random = np.random.default_rng([block, seed])
        fields = random_config(random)
        row = row_of(1000 * block + seed, story.info.n_vocab) * np.float32(random.uniform(0.3, 4))
        history = random.integers(0, 12, size=random.integers(0, 80)).tolist()
        check_same(story, row, fields, history)


@pytest.mark.parametrize("mirostat", [1, 2])
@pytest.mark.parametrize("tau", [0.5, 3.0, 5.0])
def test_mirostat_cuts_at_the_same_place(story: Any, mirostat: int, tau: float) -> None:
    for seed in range(8):
        row = row_of(seed, story.info.n_vocab)
        native, portable = both(story, **{**OFF, "mirostat": mirostat, "mirostat_tau": tau})
        left = apply(native._chain, row)
        portable.sample_logits(row)
        told = portable.last_logprobs(story.info.n_vocab, processed=True)
        expected = dict(told.top)
        native.close()
        assert left.ids.tolist() == sorted(expected)
        logprobs = np.array([expected[token] for token in left.ids.tolist()])
        assert np.abs(left.probabilities - np.exp(logprobs)).max() < 1e-5


# --- the exceptions -----------------------------------------------------------------------


def test_of_exact_ties_either_may_stay(story: Any) -> None:
    row = np.zeros(story.info.n_vocab, dtype=np.float32)
    row[[10, 20, 30, 40]] = 5
    row[50] = 6
    native, portable = both(story, **{**OFF, "top_k": 3})
    left, (ids, probabilities) = apply(native._chain, row), portable.distribution(row)
    native.close()
    assert ids.tolist() == [10, 20, 50]
    assert left.ids.size == 3
    assert 50 in left.ids
    assert set(left.ids.tolist()) <= {10, 20, 30, 40, 50}
    assert np.allclose(np.sort(left.probabilities), np.sort(probabilities), atol=1e-5)


def test_forbidden_tokens_stay_listed_and_are_never_chosen(story: Any) -> None:
    barred = dict.fromkeys(range(4, story.info.n_vocab), -math.inf)
    row = row_of(1, story.info.n_vocab)
    for fields in ({"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.01}, {"typical_p": 0.9}, {}):
        for seed in range(10):
            config = {**OFF, **fields, "seed": seed, "logit_bias": barred}
            check_same(story, row, config, [])


def test_xtc_acts_as_often_as_asked(story: Any) -> None:
    row = row_of(2, story.info.n_vocab)
    fields = {**OFF, "top_k": 5, "xtc_probability": 0.3, "xtc_threshold": 0.05}
    native, portable = both(story, **fields)
    n_native = sum(apply(native._chain, row).ids.size < 5 for _ in range(4000))
    n_portable = 0
    for _ in range(4000):
        n_portable += portable.distribution(row)[0].size < 5
        portable.sample_logits(row)
    native.close()
    assert n_native == pytest.approx(1200, abs=130)  # 4.5 standard deviations
    assert n_portable == pytest.approx(1200, abs=130)


# --- draws --------------------------------------------------------------------------------

ORDERED = {
    **OFF, "temperature": 1.8, "top_k": 30, "top_p": 0.85, "min_p": 0.02, "seed": 3,
}  # fmt: skip
PENALISED = {**OFF, "temperature": 2.0, "top_k": 12, "presence_penalty": 1.5, "seed": 3}


def draws(chain: Any, row: np.ndarray) -> np.ndarray:
    return np.array([apply(chain, row).chosen for _ in range(N_DRAWS)])


def ends_right(drawn: np.ndarray, ids: np.ndarray, probabilities: np.ndarray) -> bool:
    return chi_square(drawn, ids, probabilities) < chi_square_limit(ids.size)


def test_twenty_thousand_draws_through_the_context(
    story: Any, context: Any, prompt: np.ndarray
) -> None:
    context.decode(prompt, seq_id=0, logits="all")
    native, portable = both(story, **ORDERED)
    found = [portable.distribution(context.logits(i).copy()) for i in range(len(prompt))]
    widest = max(range(len(prompt)), key=lambda i: found[i][0].size)
    ids, probabilities = found[widest]
    assert ids.size > 4, "a distribution worth the test"
    drawn = np.array([native.sample(context, widest) for _ in range(N_DRAWS)])
    native.close()
    assert ends_right(drawn, ids, probabilities)


def test_draws_with_temperature_before_top_p_are_found_out(story: Any) -> None:
    from infercore_llamacpp.library import api

    row = row_of(7, story.info.n_vocab)
    native, portable = both(story, **ORDERED)
    ids, probabilities = portable.distribution(row)
    assert ends_right(draws(native._chain, row), ids, probabilities)
    native.close()
    wrong = (
        api.llama_sampler_init_top_k(30),
        api.llama_sampler_init_temp(1.8),
        api.llama_sampler_init_top_p(0.85, 1),
        api.llama_sampler_init_min_p(0.02, 1),
        api.llama_sampler_init_dist(3),
    )
    with chain_of(*wrong) as chain:
        assert chi_square(draws(chain, row), ids, probabilities) == math.inf


def test_draws_with_the_same_tokens_in_another_order_are_found_out(story: Any) -> None:
    """Temperature before the penalties leaves the same twelve tokens, otherwise likely."""
    from infercore_llamacpp.library import api

    row = row_of(8, story.info.n_vocab)
    best = int(row.argmax())
    row[best] += 3  # stays among the twelve, penalised or not
    native, portable = both(story, **PENALISED)
    native.observe([best])
    portable.observe([best])
    ids, probabilities = portable.distribution(row)
    assert ends_right(draws(native._chain, row), ids, probabilities)
    native.close()
    penalties = api.llama_sampler_init_penalties(story.info.n_vocab, 64, 1.0, 0.0, 1.5)
    api.llama_sampler_accept(penalties, best)
    wrong = (
        api.llama_sampler_init_temp(2.0),
        penalties,
        api.llama_sampler_init_top_k(12),
        api.llama_sampler_init_dist(3),
    )
    with chain_of(*wrong) as chain:
        drawn = draws(chain, row)
        assert np.isin(drawn, ids).all()
        assert chi_square(drawn, ids, probabilities) > 2 * chi_square_limit(ids.size)


# --- no chain ends the process ------------------------------------------------------------

HUGE = 3.0e38
EXTREME: list[dict[str, Any]] = [
    {},
    {"temperature": 1e-45},
    {"temperature": 1e-300},
    {"temperature": HUGE},
    {"temperature": 1e300},
    {"temperature": 0, "mirostat": 1},
    {"temperature": 0, "mirostat": 2, "top_k": 1},
    {"top_k": 1, "top_p": 0, "min_p": 1, "typical_p": 0, "top_n_sigma": 1e-30, "min_keep": 0},
    {"top_k": 2**31 - 1},
    {"top_k": 2**40},
    {"min_keep": 2**31},
    {"min_keep": 2**64, "top_p": 0.5},
    {"top_n_sigma": HUGE},
    {"top_n_sigma": 1e300},
    {"xtc_probability": 1, "xtc_threshold": 0, "min_keep": 0},
    {"xtc_probability": 1, "xtc_threshold": 0, "top_k": 1},
    {"dynatemp_range": HUGE, "dynatemp_exponent": HUGE},
    {"dynatemp_range": 1e300, "dynatemp_exponent": 0},
    {"mirostat": 1, "mirostat_tau": 0, "mirostat_eta": HUGE},
    {"mirostat": 1, "mirostat_tau": 1e300},
    {"mirostat": 1, "top_k": 1},
    {"mirostat": 1, "top_k": 2, "top_p": 0},
    {"mirostat": 2, "mirostat_tau": 0, "mirostat_eta": 1e300},
    {"mirostat": 2, "mirostat_tau": HUGE, "top_k": 1},
    {"mirostat": 2, "logit_bias": -math.inf},
    {"mirostat": 1, "logit_bias": -math.inf},
    {"logit_bias": -math.inf},
    {"logit_bias": -math.inf, "top_p": 0.1, "typical_p": 0.1, "min_p": 0.5, "top_n_sigma": 0.1},
    {"logit_bias": -math.inf, "xtc_probability": 1, "xtc_threshold": 0, "temperature": 1e-45},
    {"logit_bias": HUGE},
    {"logit_bias": 1e300},
    {"logit_bias": -HUGE},
    {"repeat_penalty": 1e-6},
    {"repeat_penalty": HUGE},
    {"repeat_penalty": 1e300},
    {"frequency_penalty": HUGE, "presence_penalty": HUGE},
    {"frequency_penalty": -HUGE},
    {"presence_penalty": -1e300},
    {"repeat_penalty": 2, "penalty_last_n": 2**31 - 1},
    {"repeat_penalty": 2, "penalty_last_n": 2**40},
    {"dry_multiplier": HUGE, "dry_base": HUGE},
    {"dry_multiplier": 1e300, "dry_base": 1e300},
    {"dry_multiplier": 1, "dry_base": 0},
    {"dry_multiplier": 1, "dry_allowed_length": 0},
    {"dry_multiplier": 1, "dry_allowed_length": 2**31},
    {"dry_multiplier": 1, "dry_allowed_length": 2**40},
    {"dry_multiplier": 1, "dry_penalty_last_n": 2**31 - 1},
    {"dry_multiplier": 1, "dry_penalty_last_n": 2**40},
    {"dry_multiplier": 1, "dry_sequence_breakers": ["\U0001f600" * 10, "\n", "a" * 40]},
    {"dry_multiplier": 1, "dry_sequence_breakers": [""]},
    {"seed": 0},
    {"seed": 2**32 - 2},
]

CHILD = """
import json, sys
import infercore as ic

with ic.load_model(sys.argv[1], backend="llamacpp") as model:
    n_vocab = model.info.n_vocab
    with model.new_context(n_ctx=64, n_threads=1, n_threads_batch=1) as context:
        context.decode([1, 40, 50, 40, 50, 40, 50], logits="all")
        for place, fields in enumerate(json.loads(sys.argv[2])):
            if "logit_bias" in fields:
                fields["logit_bias"] = dict.fromkeys(range(1, n_vocab), fields["logit_bias"])
            try:
                sampler = model.new_sampler(implementation="native", **fields)
            except ic.InferCoreError as error:
                print(json.dumps([place, type(error).__name__]), flush=True)
                continue
            tokens = [sampler.sample(context, i % 7) for i in range(8)]
            sampler.observe([40, 50] * 40)
            twin = sampler.clone()
            sampler.reset()
            tokens += [twin.sample(context), sampler.sample(context)]
            twin.close()
            sampler.close()
            assert all(0 <= token < n_vocab for token in tokens), tokens
            print(json.dumps([place, "drawn"]), flush=True)
"""


def test_no_chain_ends_the_process(story_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(story_path), json.dumps(EXTREME)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    told = [json.loads(line) for line in child.stdout.splitlines()]
    reached = EXTREME[len(told)] if len(told) < len(EXTREME) else "the end"
    assert child.returncode == 0, f"ended at {reached}: {child.stderr[-2000:]}"
    assert [place for place, _ in told] == list(range(len(EXTREME)))
    refused = [EXTREME[place] for place, outcome in told if outcome != "drawn"]
    assert len(refused) < len(EXTREME) / 4, refused


@pytest.mark.parametrize("target", [0.0, 0.2, 0.9])
def test_adaptive_p_is_that_of_the_engine(target: float) -> None:
    """Step by step, with the engine's choices: its own sampler is not offered, see docs."""
    from infercore.sampling import selection
    from infercore.sampling.candidates import Candidates, softmax
    from infercore_llamacpp.library import api

    n, mu = 40, target
    engine = api.llama_sampler_init_adaptive_p(target, 0.8, 3)
    for step in range(12):
        logits = np.random.default_rng(step).normal(0, 2, n).astype(np.float32)
        rows = (api.llama_token_data * n)(
            *(api.llama_token_data(i, x, 0) for i, x in enumerate(logits.tolist()))
        )
        array = api.llama_token_data_array(data=rows, size=n, selected=-1, sorted=False)
        api.llama_sampler_apply(engine, ctypes.byref(array))
        kept = Candidates(np.arange(n), logits.astype(np.float64))
        ours = selection.adaptive_p(kept, 0.5, mu=mu, target=target, decay=0.8)
        expected = [rows[i].p for i in np.argsort([row.id for row in rows])]
        np.testing.assert_allclose(softmax(ours.out_of.logits), expected, atol=2e-5)
        token = rows[array.selected].id
        api.llama_sampler_accept(engine, token)
        mu = 0.2 * float(softmax(kept.logits)[token]) + 0.8 * mu
    api.llama_sampler_free(engine)
