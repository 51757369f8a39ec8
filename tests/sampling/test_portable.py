from __future__ import annotations

import math
import types

import numpy as np
import pytest

from infercore.errors import (
    InvalidInputError,
    InvalidStateError,
    InvalidTokenError,
    SessionClosedError,
)
from infercore.protocols.public import Sampler
from infercore.sampling import PortableSampler, compile_constraint, new_portable_sampler
from infercore.values.config import MAX_SEED, SamplingConfig

EVERYTHING = {
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 0.97,
    "min_p": 0.01,
    "typical_p": 0.98,
    "xtc_probability": 0.5,
    "dynatemp_range": 0.2,
    "repeat_penalty": 1.1,
    "frequency_penalty": 0.1,
    "dry_multiplier": 0.5,
    "logit_bias": {3: 1.0},
}


def logits(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def run(sampler, row, n=40):
    return [sampler.sample_logits(row) for _ in range(n)]


def test_it_is_a_sampler_and_reads_a_row_of_the_context(make):
    rows = {-1: logits(0, 9, 0), 2: logits(9, 0, 0)}
    context = types.SimpleNamespace(logits=rows.__getitem__)
    sampler = make(3, temperature=0)
    assert isinstance(sampler, Sampler)
    assert (sampler.sample(context), sampler.sample(context, 2)) == (1, 0)


@pytest.mark.parametrize("mirostat", [0, 1, 2])
def test_temperature_zero_is_argmax_whatever_else_is_set(make, row, mirostat):
    fields = {**EVERYTHING, "temperature": 0, "mirostat": mirostat, "logit_bias": {}}
    fields |= {"repeat_penalty": 1.0, "frequency_penalty": 0.0, "dry_multiplier": 0.0}
    sampler = make(xtc_threshold=0.0, seed=None, **fields)
    assert run(sampler, row, 5) == [int(row.argmax())] * 5


def test_temperature_zero_sees_bias_penalties_and_mask(make, tokenizer):
    assert make(3, temperature=0).sample_logits(logits(2, 2, 1)) == 0
    assert make(3, temperature=0, logit_bias={1: 0.5}).sample_logits(logits(2, 2, 1)) == 1
    penalised = make(3, temperature=0, presence_penalty=0.5)
    assert run(penalised, logits(2, 1.9, 1), 3) == [0, 1, 0]
    constraint = compile_constraint({"type": "regex", "pattern": "ba"}, tokenizer)
    row = np.zeros(tokenizer.n_vocab, dtype=np.float32)
    row[ord("a")] = 1
    masked = make(temperature=0, own={"constraint": constraint})
    assert [chr(token) for token in run(masked, row, 2)] == ["b", "a"]


def test_the_same_seed_gives_the_same_tokens(make, row):
    same = [run(make(seed=7, **EVERYTHING), row) for _ in range(2)]
    assert same[0] == same[1]
    assert same[0] != run(make(seed=8, **EVERYTHING), row)


def test_the_draw_is_specified(make):
    # PCG64(42).random(): 0.774, 0.439, 0.859, 0.697; cumulative 0.2, 0.5, 1.0 by id
    row = np.log(logits(0.2, 0.3, 0.5))
    assert run(make(3, seed=42), row, 4) == [2, 1, 2, 2]
    # with xtc on, the first of each pair decides about xtc (here: is above 0.5), so 0.439, 0.697
    assert run(make(3, seed=42, xtc_probability=0.1), row, 2) == [1, 2]


def test_no_seed_draws_one_and_reports_it(make, row):
    sampler = make(seed=None)
    assert 0 <= sampler.seed <= MAX_SEED
    assert run(make(seed=sampler.seed), row) == run(sampler, row)
    assert len({make(seed=None).seed for _ in range(5)}) > 1


@pytest.mark.parametrize("mirostat", [0, 1, 2])
def test_a_clone_continues_identically_and_alone(make, row, mirostat):
    sampler = make(mirostat=mirostat, **EVERYTHING)
    sampler.observe([1, 2, 3, 1, 2])
    run(sampler, row, 10)
    twin, control = sampler.clone(), sampler.clone()
    ahead = run(twin, row)
    assert run(sampler, row) == ahead
    twin.close()
    assert run(control, row) == ahead
    assert control.seed == sampler.seed


@pytest.mark.parametrize("mirostat", [0, 1, 2])
def test_reset_rewinds_to_the_beginning(make, row, mirostat):
    sampler = make(mirostat=mirostat, seed=None, **EVERYTHING)
    seed, first = sampler.seed, run(sampler, row)
    sampler.reset()
    assert (sampler.seed, run(sampler, row)) == (seed, first)


def test_clone_and_reset_take_the_constraint_along(make, tokenizer, row):
    pattern = "[a-z]{10}[0-9]{10}[A-Z]{10}"
    constraint = compile_constraint({"type": "regex", "pattern": pattern}, tokenizer)
    sampler = make(own={"constraint": constraint})
    start = run(sampler, row, 10)
    twin = sampler.clone()
    assert run(sampler, row, 10) == run(twin, row, 10)
    sampler.reset()
    assert run(sampler, row, 10) == start
    assert not twin.constraint.is_accepting


@pytest.mark.parametrize("seed", range(6))
def test_mirostat_goes_on_from_step_to_step(make, seed):
    # mu 2.5 leaves two tokens; their surprise is 0.585 or 1.585 bits, so mu becomes 9.15 or -0.85
    sampler = make(4, seed=seed, mirostat=2, mirostat_tau=1.25, mirostat_eta=10.0)
    row = np.log(logits(0.5, 0.25, 0.125, 0.125))

    def step():
        token = sampler.sample_logits(row)
        return token, len(sampler.last_logprobs(9, processed=True).top)

    for _ in range(2):
        token, n_left = step()
        assert n_left == 2
        assert step()[1] == (4 if token == 0 else 1)
        sampler.reset()


class CountingConstraint:
    def __init__(self):
        self.accepted = []

    def apply(self, row):
        row[0] = -np.inf

    def accept_all(self, tokens):
        self.accepted += tokens


def test_each_sample_is_accepted_exactly_once(make):
    counting = CountingConstraint()
    sampler = make(4, own={"constraint": counting}, frequency_penalty=0.1, penalty_last_n=-1)
    tokens = run(sampler, logits(9, 1, 1, 1), 12)
    assert counting.accepted == tokens
    assert sampler._history.last(-1).tolist() == tokens
    assert 0 not in tokens


def test_observe_primes_penalties_and_dry(make):
    sampler = make(3, temperature=0, presence_penalty=1.0, penalty_last_n=2)
    sampler.observe([0, 1])
    assert sampler.sample_logits(logits(1.2, 1, 0.5)) == 2
    assert sampler.sample_logits(logits(1.2, 1, 0.5)) == 0  # 0 has left the window of 2
    dry = make(3, temperature=0, dry_multiplier=9.0, dry_sequence_breakers=())
    dry.observe([0, 1, 2, 0, 1])
    assert dry.sample_logits(logits(0, 0, 5)) == 0


def test_observe_primes_the_constraint_unless_told_otherwise(make, tokenizer):
    constraint = compile_constraint({"type": "regex", "pattern": "ab"}, tokenizer)
    sampler = make(own={"constraint": constraint})
    row = np.zeros(tokenizer.n_vocab, dtype=np.float32)
    sampler.observe(list(b"a prompt"), constrained=False)
    sampler.observe(list(b"a"))
    assert sampler.sample_logits(row) == ord("b")
    assert sampler.constraint.is_finished
    with pytest.raises(InvalidInputError, match="does not allow"):
        sampler.observe(list(b"c"))


@pytest.mark.parametrize("token", [-1, 3, 2**31, 1.0, "1", True])
def test_observe_refuses_foreign_ids_and_is_unchanged(make, token):
    sampler = make(3)
    with pytest.raises(InvalidTokenError) as caught:
        sampler.observe([0, token])
    assert (caught.value.value, len(sampler._history)) == (token, 0)


def test_a_penalty_over_the_whole_context(make):
    sampler = make(3, temperature=0, presence_penalty=1.0, penalty_last_n=-1)
    sampler.observe([0] + [1] * 500)
    assert sampler.sample_logits(logits(1.2, 0, 0.5)) == 2


def test_ignore_eos_forbids_every_end_of_generation_token(make, tokenizer):
    row = np.zeros(tokenizer.n_vocab, dtype=np.float32)
    row[[tokenizer.eos, tokenizer.eot]] = 50
    row[5] = 10
    samplers = [make(temperature=0, ignore_eos=True, logit_bias={7: 1.0}) for _ in range(3)]
    assert [sampler.sample_logits(row) for sampler in samplers] == [5, 5, 5]
    assert tokenizer.eog_questions == tokenizer.n_vocab  # asked once for all three


def test_a_forbidden_token_never_comes_and_a_favoured_one_always(make, row):
    assert 4 not in run(make(logit_bias={4: -math.inf}), np.where(np.arange(259) == 4, 5, row))
    assert run(make(logit_bias={4: 100.0}), row) == [4] * 40


@pytest.mark.parametrize("token", [3, 10**9])
def test_a_bias_outside_the_vocabulary_is_refused_at_construction(make, token):
    with pytest.raises(InvalidTokenError) as caught:
        make(3, logit_bias={token: 1.0})
    assert (caught.value.field, caught.value.value) == ("logit_bias", token)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("top_p", 2),
        ("mirostat", 3),
        ("seed", 2**32 - 1),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 0.0}),
    ],
)
def test_the_config_refuses_what_means_nothing(field, value):
    with pytest.raises(InvalidInputError) as caught:
        SamplingConfig(**{field: value})
    assert caught.value.field == field
    assert caught.value.allowed is not None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("row", "found"),
    [
        ((1, math.nan, 2), "NaN"),
        ((math.inf, 1, 2), "inf"),
        ((math.inf, math.nan, 2), "NaN"),
        ((-math.inf,) * 3, "-inf"),
    ],
)
def test_broken_logits_are_an_error_and_change_nothing(make, temperature, row, found):
    sampler = make(3, temperature=temperature, logit_bias={1: 0.5})
    twin = sampler.clone()
    with pytest.raises(InvalidStateError, match=found):
        sampler.sample_logits(logits(*row))
    fine = logits(1, -math.inf, 2)
    assert run(sampler, fine) == run(twin, fine)


def test_forbidding_every_token_is_an_error(make, tokenizer):
    with pytest.raises(InvalidStateError, match="forbid every token"):
        make(1, logit_bias={0: -math.inf}).sample_logits(logits(1))
    constraint = compile_constraint({"type": "regex", "pattern": "a"}, tokenizer)
    sampler = make(ignore_eos=True, own={"constraint": constraint})
    row = np.zeros(tokenizer.n_vocab, dtype=np.float32)
    assert sampler.sample_logits(row) == ord("a")
    with pytest.raises(InvalidStateError, match="constraint is finished"):
        sampler.sample_logits(row)


@pytest.mark.parametrize(
    "wrong", [[1.0, 2.0, 3.0], np.zeros(3), np.zeros(4, np.float32), np.zeros((1, 3), np.float32)]
)
def test_a_row_of_another_shape_is_refused(make, wrong):
    with pytest.raises(InvalidInputError) as caught:
        make(3).sample_logits(wrong)
    assert caught.value.field == "logits"


class Processor:
    def __init__(self, apply):
        self.apply = apply


def test_processors_run_in_order_before_all_else_on_a_copy(make):
    seen = []

    def first(row):
        seen.append(row.copy())
        row[2] = 8
        return row

    def second(row):
        return row * np.float32(2)

    row = logits(1, 2, 3)
    row.setflags(write=False)
    processors = (Processor(first), Processor(second))
    sampler = make(3, temperature=0, logit_bias={0: 15.5}, own={"processors": processors})
    assert sampler.sample_logits(row) == 0  # 2 + 15.5 against 16: the bias comes after
    assert seen[0].tolist() == row.tolist() == [1, 2, 3]
    assert make(3, temperature=0, own={"processors": processors}).sample_logits(row) == 2


def test_a_processors_exception_comes_through_as_it_is(make, row):
    error = KeyError("mine")

    def fail(_):
        raise error

    sampler = make(own={"processors": (Processor(fail),)})
    with pytest.raises(KeyError) as caught:
        sampler.sample_logits(row)
    assert caught.value is error


@pytest.mark.parametrize(
    "wrong",
    [lambda row: None, lambda row: row[:2], lambda row: row.astype(float), lambda row: list(row)],
)
def test_a_processors_wrong_result_is_refused(make, wrong):
    sampler = make(3, own={"processors": (Processor(wrong),)})
    with pytest.raises(InvalidInputError) as caught:
        sampler.sample_logits(logits(1, 2, 3))
    assert caught.value.field == "processors"


def test_a_processors_nan_is_named(make):
    sampler = make(3, own={"processors": (Processor(lambda row: row * np.float32(np.nan)),)})
    with pytest.raises(InvalidStateError, match="a processor made the logit of token 0 NaN"):
        sampler.sample_logits(logits(1, 2, 3))


def test_logprobs_of_the_raw_row(make):
    sampler = make(3, temperature=0, logit_bias={0: 9.0}, own={"logprobs": True})
    row = np.log(logits(0.2, 0.5, 0.3))
    sampler.sample_logits(row)
    row[:] = 0  # the engine writes its next row there
    told = sampler.last_logprobs(2)
    assert told.token == 0
    assert told.logprob == pytest.approx(math.log(0.2))
    assert [token for token, _ in told.top] == [1, 2]
    assert [value for _, value in told.top] == pytest.approx([math.log(0.5), math.log(0.3)])
    assert sampler.last_logprobs().top == ()


def test_logprobs_of_all_tokens_sum_to_one(make, row):
    sampler = make(own={"logprobs": True}, **EVERYTHING)
    sampler.sample_logits(row)
    for processed in (False, True):
        top = sampler.last_logprobs(259, processed=processed).top
        assert sum(math.exp(value) for _, value in top) == pytest.approx(1.0)
        assert sorted(top, key=lambda pair: -pair[1]) == list(top)
    assert len(top) < 259


def test_logprobs_of_the_processed_distribution(make):
    sampler = make(3, temperature=2.0, top_k=2)
    token = sampler.sample_logits(np.log(logits(0.8, 0.15, 0.05)))
    told = sampler.last_logprobs(5, processed=True)
    expected = np.sqrt([0.8, 0.15]) / np.sqrt([0.8, 0.15]).sum()
    assert [value for _, value in told.top] == pytest.approx(np.log(expected))
    assert told.logprob == pytest.approx(np.log(expected)[token])


def test_logprobs_that_are_not_there_are_an_error(make):
    sampler = make(3)
    with pytest.raises(InvalidStateError, match="sample first"):
        sampler.last_logprobs()
    sampler.sample_logits(logits(1, 2, 3))
    with pytest.raises(InvalidStateError, match="logprobs=True"):
        sampler.last_logprobs()


def test_distribution_tells_the_next_draw_and_changes_nothing(make, row):
    sampler = make(**{**EVERYTHING, "top_k": 4})
    for _ in range(20):
        ids, probabilities = sampler.distribution(row)
        assert probabilities.sum() == pytest.approx(1.0)
        assert sampler.clone().sample_logits(row) in ids
        assert np.array_equal(sampler.distribution(row)[0], ids)
        sampler.sample_logits(row)


def test_after_close_every_use_is_refused(make, row):
    sampler = make()
    sampler.close()
    sampler.close()
    assert sampler.closed
    uses = [
        lambda: sampler.sample(None),
        lambda: sampler.sample_logits(row),
        lambda: sampler.distribution(row),
        lambda: sampler.observe([1]),
        sampler.last_logprobs,
        sampler.reset,
        sampler.clone,
    ]
    for use in uses:
        with pytest.raises(SessionClosedError):
            use()


def test_the_factory_compiles_the_response_format(tokenizer):
    sampler = new_portable_sampler(
        SamplingConfig(seed=1),
        tokenizer,
        300,
        response_format={"type": "choice", "choices": ["x"]},
        logprobs=True,
    )
    assert isinstance(sampler, PortableSampler)
    assert sampler.sample_logits(np.zeros(300, dtype=np.float32)) == ord("x")
    assert sampler.last_logprobs().logprob == pytest.approx(-math.log(300))
    assert sampler.n_vocab == 300
    assert sampler.config.seed == 1


# --- the order of the steps ---------------------------------------------------------------

WEIGHTS = (0.40, 0.25, 0.15, 0.10, 0.06, 0.04)
ORDER = {
    "presence_penalty": math.log(4),
    "top_k": 5,
    "top_p": 0.8,
    "min_p": 0.3,
    "xtc_probability": 1.0,
    "xtc_threshold": 0.2,
    "temperature": 0.5,
}
# Token 0 was there: 0.10 of 0.70. top_k leaves the first five. Of 0.66, top_p takes 0.25, 0.15
# and both 0.10. min_p (0.075) keeps all four. Of 0.60, xtc drops the 0.25 and keeps the 0.15.
# At temperature 0.5 the weights are squared: 0.0225, 0.01, 0.01.
EXPECTED = {2: 0.0225 / 0.0425, 0: 0.01 / 0.0425, 3: 0.01 / 0.0425}


def chi_square(drawn, expected):
    counts = {token: drawn.count(token) for token in expected}
    assert sum(counts.values()) == len(drawn), f"drew {set(drawn) - set(expected)}"
    return sum(
        (counts[token] - share * len(drawn)) ** 2 / (share * len(drawn))
        for token, share in expected.items()
    )


def test_the_order_of_steps_by_hand(make):
    sampler = make(6, **ORDER)
    sampler.observe([0])
    ids, probabilities = sampler.distribution(np.log(logits(*WEIGHTS)))
    assert ids.tolist() == sorted(EXPECTED)
    assert probabilities == pytest.approx([EXPECTED[token] for token in sorted(EXPECTED)])


def test_the_bias_comes_before_the_penalties(make):
    sampler = make(2, temperature=0, logit_bias={0: 2.0}, repeat_penalty=2.0)
    sampler.observe([0])
    assert sampler.sample_logits(logits(2, 2.5)) == 1  # (2 + 2) / 2, not 2 / 2 + 2


def test_twenty_thousand_draws_have_that_distribution(make):
    sampler = make(6, **{**ORDER, "penalty_last_n": 1})
    row = np.log(logits(*WEIGHTS))
    drawn = []
    for _ in range(20_000):
        sampler.observe([0])  # the window of one holds token 0 again
        drawn.append(sampler.sample_logits(row))
    assert chi_square(drawn, EXPECTED) < 18.4  # p = 0.0001 for 2 degrees of freedom


@pytest.mark.parametrize(
    ("fields", "weights", "expected"),
    [
        # temperature first would let a third token into top_p
        ({"top_p": 0.75, "temperature": 2.0}, (0.5, 0.3, 0.2), {0: 0.5635, 1: 0.4365}),
        # min_p first would drop token 2 only after top_p had counted it
        ({"top_k": 2, "top_p": 0.62}, (0.5, 0.3, 0.2), {0: 1.0}),
        # typical after top_p would see the entropy of two tokens and keep token 0
        ({"typical_p": 0.2, "top_p": 0.6}, (0.4, *[0.1] * 6), None),
        # top_n_sigma after top_k would measure another deviation
        ({"top_n_sigma": 1.0, "top_k": 3}, (0.5, 0.4, 0.05, 0.05), {0: 5 / 9, 1: 4 / 9}),
        ({"top_n_sigma": 1.0, "top_k": 1}, (0.5, 0.4, 0.05, 0.05), {0: 1.0}),
    ],
)
def test_pairs_of_steps_in_their_order(make, fields, weights, expected):
    ids, probabilities = make(len(weights), **fields).distribution(np.log(logits(*weights)))
    if expected is None:
        assert 0 not in ids
        return
    assert ids.tolist() == sorted(expected)
    assert probabilities == pytest.approx(list(expected.values()), abs=1e-4)
