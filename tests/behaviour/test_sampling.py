"""Sampling means the same on every engine: seeds, bias, processors, ends, penalties, errors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
import pack
from infercore.sampling import new_portable_sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROMPT = "Once upon a time there was a baker named Mira"
EVERYTHING = {  # loose, for the storyteller is sure of most words
    "temperature": 4.0, "top_k": 60, "top_p": 0.999999, "min_p": 1e-7, "typical_p": 0.999999,
    "xtc_probability": 0.3, "dynatemp_range": 0.3, "repeat_penalty": 1.1,
    "frequency_penalty": 0.1, "dry_multiplier": 0.5, "mirostat_tau": 7.0, "mirostat": 1,
}  # fmt: skip


def tokens_of(session: Any, prompt: str = PROMPT, **decode: Any) -> tuple[list[int], Any]:
    session.ensure_prefix(prompt)
    chunks = list(session.decode(**decode))
    return [token for chunk in chunks for token in chunk.tokens], chunks[-1]


def implementations(backend_name: str) -> tuple[str, ...]:
    return ("portable", "native") if backend_name == "llamacpp" else ("portable",)


class Processor:
    def __init__(self, apply: Callable[[Any], Any]) -> None:
        self.apply = apply


# --- seeds --------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_tokens(session: Any, backend_name: str) -> None:
    for implementation in implementations(backend_name):
        fields = {**EVERYTHING, "implementation": implementation, "max_tokens": 40}
        first, last = tokens_of(session, seed=11, **fields)
        assert tokens_of(session, seed=11, **fields)[0] == first
        assert last.usage.seed == 11
        assert any(tokens_of(session, seed=seed, **fields)[0] != first for seed in (12, 13))


def test_no_seed_draws_one_and_reports_it(session: Any, backend_name: str) -> None:
    for implementation in implementations(backend_name):
        fields = {"temperature": 2.0, "implementation": implementation, "max_tokens": 30}
        runs = [tokens_of(session, **fields) for _ in range(4)]
        assert len({last.usage.seed for _, last in runs}) > 1
        for tokens, last in runs[:2]:
            assert 0 <= last.usage.seed <= 2**32 - 2
            assert tokens_of(session, seed=last.usage.seed, **fields)[0] == tokens


def test_a_clone_continues_identically(
    model: Any, new_context: Callable[..., Any], backend_name: str
) -> None:
    ids = model.tokenizer.encode(PROMPT)
    for implementation in implementations(backend_name):
        context = new_context()
        sampler = model.new_sampler(seed=3, implementation=implementation, **EVERYTHING)
        sampler.observe(ids)
        context.decode(ids)
        for _ in range(8):
            last = sampler.sample(context)
            context.decode_one(last)
        n_past, twin, runs = context.n_past(), sampler.clone(), []
        for each in (sampler, twin):
            context.eval([last], n_past - 1)
            runs.append([])
            for _ in range(25):
                runs[-1].append(each.sample(context))
                context.decode_one(runs[-1][-1])
            each.close()
        assert runs[0] == runs[1]
        assert twin.seed == 3


def test_temperature_zero_ignores_the_seed(session: Any, backend_name: str) -> None:
    fields = {"max_tokens": 30, "temperature": 0, "xtc_probability": 1.0, "xtc_threshold": 0.0}
    runs = [
        tokens_of(session, seed=seed, implementation=implementation, **fields)[0]
        for implementation in implementations(backend_name)
        for seed in (1, 2, None)
    ]
    assert all(run == runs[0] for run in runs)


@pytest.fixture(scope="module")
def one_session_each() -> Iterator[dict[str, Any]]:
    """Return an exact session on every engine; skip unless both are there."""
    for name in pack.FORMATS:
        pack.need_backend(name)
    threads = {"llamacpp": {"n_threads": 1, "n_threads_batch": 1}, "openvino": {}}
    sessions = {
        name: ic.open_session(
            pack.model_path(name), backend=name, n_ctx=512, **pack.EXACT, **threads[name]
        )
        for name in pack.FORMATS
    }
    yield sessions
    for session in sessions.values():
        session.close()
        session.model.close()


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_the_same_seed_gives_the_same_text_on_every_engine(
    one_session_each: dict[str, Any], seed: int, temperature: float
) -> None:
    found = {
        name: tokens_of(
            session, seed=seed, temperature=temperature, implementation="portable", max_tokens=80
        )[0]
        for name, session in one_session_each.items()
    }
    assert found["llamacpp"] == found["openvino"]
    assert len(found["llamacpp"]) > 10


def test_all_steps_together_on_every_engine(one_session_each: dict[str, Any]) -> None:
    fields = {**EVERYTHING, "seed": 9, "implementation": "portable", "max_tokens": 60}
    found = [tokens_of(session, **fields)[0] for session in one_session_each.values()]
    assert found[0] == found[1]


# --- log-probabilities --------------------------------------------------------------------


def test_logprobs_are_those_of_the_models_own_row(session: Any) -> None:
    n_vocab = session.model.tokenizer.n_vocab
    session.ensure_prefix(PROMPT)
    bias = {5: 3.0}
    chunks = list(session.decode(max_tokens=12, seed=1, logprobs=1000, logit_bias=bias))
    told = [logprob for chunk in chunks for logprob in chunk.logprobs]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert [one.token for one in told] == tokens
    for one in told:
        values = [value for _, value in one.top]
        assert values == sorted(values, reverse=True)
        assert len(one.top) == min(1000, n_vocab)
        assert 0.999 < math.fsum(map(math.exp, values)) < 1 + 1e-6
        assert dict(one.top).get(one.token, one.logprob) == one.logprob
    session.ensure_prefix(PROMPT)
    again = list(session.decode(max_tokens=1, temperature=0.1, logprobs=2))
    (first,) = (logprob for chunk in again for logprob in chunk.logprobs)
    assert [token for token, _ in first.top] == [token for token, _ in told[0].top[:2]]
    values = [value for _, value in told[0].top[:2]]
    assert [value for _, value in first.top] == pytest.approx(values, abs=1e-5)


def test_without_logprobs_none_are_told(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    assert all(chunk.logprobs is None for chunk in session.decode(max_tokens=4))
    chunks = list(session.decode(max_tokens=4, logprobs=0))
    assert [one.top for chunk in chunks for one in chunk.logprobs] == [()] * 4


def test_both_distributions_sum_to_one(model: Any, new_context: Callable[..., Any]) -> None:
    context, n_vocab = new_context(), model.tokenizer.n_vocab
    context.decode(model.tokenizer.encode(PROMPT))
    config = ic.SamplingConfig(temperature=1.3, top_k=20, top_p=0.9, seed=2, logit_bias={9: -2})
    sampler = new_portable_sampler(config, model.tokenizer, n_vocab, logprobs=True)
    row = context.logits().copy()
    ids, probabilities = sampler.distribution(row)
    token = sampler.sample(context)
    raw = dict(sampler.last_logprobs(n_vocab).top)
    processed = dict(sampler.last_logprobs(n_vocab, processed=True).top)
    assert math.fsum(map(math.exp, raw.values())) == pytest.approx(1)
    assert math.fsum(map(math.exp, processed.values())) == pytest.approx(1)
    assert sorted(processed) == ids.tolist()
    assert np.exp([processed[i] for i in ids.tolist()]) == pytest.approx(probabilities)
    expected = row[token] - np.logaddexp.reduce(row.astype(np.float64))
    assert raw[token] == pytest.approx(expected, abs=1e-5)


# --- bias, processors, ends ---------------------------------------------------------------


def test_a_forbidden_token_never_comes_and_a_favoured_one_always(
    session: Any, backend_name: str
) -> None:
    for implementation in implementations(backend_name):
        fields = {"implementation": implementation, "temperature": 1.5, "seed": 5}
        barred: dict[int, float] = {}
        for _ in range(4):
            found, _ = tokens_of(session, max_tokens=25, logit_bias=barred, **fields)
            assert not barred.keys() & set(found)
            barred |= dict.fromkeys(found, -math.inf)
        (token,) = session.model.tokenizer.encode("e", add_special=False)[-1:]
        always, _ = tokens_of(session, max_tokens=10, logit_bias={token: 100.0}, **fields)
        assert always == [token] * 10


def test_processors_see_every_row_in_order(session: Any) -> None:
    seen: list[str] = []
    n_vocab = session.model.tokenizer.n_vocab

    def first(row: np.ndarray) -> np.ndarray:
        assert (row.dtype, row.shape) == (np.float32, (n_vocab,))
        seen.append("first")
        row[:] = 0
        return row

    def second(row: np.ndarray) -> np.ndarray:
        seen.append("second")
        assert not row.any()
        row[40 + len(seen) // 2] = 9
        return row

    processors = [Processor(first), Processor(second)]
    tokens, _ = tokens_of(session, max_tokens=5, temperature=0, processors=processors)
    assert tokens == [41, 42, 43, 44, 45]
    assert seen == ["first", "second"] * 5


@pytest.mark.parametrize("speculative", [None, ic.SpeculativeConfig(n_draft=4)])
def test_a_processors_exception_reaches_the_caller(session: Any, speculative: Any) -> None:
    error = RuntimeError("mine")
    rows: list[Any] = []

    def fail_late(row: np.ndarray) -> np.ndarray:
        rows.append(row)
        if len(rows) > 6:
            raise error
        return row

    plain, _ = tokens_of(session, max_tokens=20, temperature=0)
    session.ensure_prefix(PROMPT)
    processors = [Processor(fail_late)]
    fields = {"temperature": 0, "processors": processors, "speculative": speculative}
    with pytest.raises(RuntimeError) as caught:
        list(session.decode(max_tokens=20, **fields))
    assert caught.value is error
    report = session.explain_context()
    held = session.context.tokens()[report.prefix_tokens : report.resident_tokens]
    rest = [t for c in session.decode(max_tokens=20 - len(held), temperature=0) for t in c.tokens]
    assert held + rest == plain, "what was generated is resident, and decoding goes on"


def test_a_processors_wrong_result_is_refused(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    wrong: list[Callable[[Any], Any]] = [
        lambda row: None,
        lambda row: row[:-1],
        lambda row: row.astype(np.float64),
    ]
    for apply in wrong:
        with pytest.raises(ic.InvalidInputError) as caught:
            list(session.decode(max_tokens=2, processors=[Processor(apply)]))
        assert caught.value.field == "processors"
    with pytest.raises(ic.InvalidStateError, match="NaN"):
        list(session.decode(max_tokens=2, processors=[Processor(lambda row: row * np.nan)]))
    assert len(tokens_of(session, max_tokens=3)[0]) == 3


def test_ignore_eos_goes_on(session: Any, backend_name: str) -> None:
    tokenizer = session.model.tokenizer
    ends = [token for token in range(tokenizer.n_vocab) if tokenizer.is_eog(token)]
    eager = dict.fromkeys(ends, 60.0)
    for implementation in implementations(backend_name):
        fields = {"implementation": implementation, "logit_bias": eager, "seed": 1}
        tokens, last = tokens_of(session, max_tokens=15, **fields)
        assert (tokens, last.finish_reason) == ([], "eos")
        tokens, last = tokens_of(session, max_tokens=15, ignore_eos=True, **fields)
        assert (len(tokens), last.finish_reason) == (15, "length")
        assert not set(tokens) & set(ends)


def test_a_stop_token_ends_and_is_not_shown(session: Any) -> None:
    plain, _ = tokens_of(session, max_tokens=40, temperature=0)
    for place in (0, 7, 20):
        at = plain.index(plain[place])
        tokens, last = tokens_of(session, max_tokens=40, temperature=0, stop_tokens=[plain[place]])
        assert (tokens, last.finish_reason) == (plain[:at], "stop")
        report = session.explain_context()
        assert report.resident_tokens == report.prefix_tokens + at


# --- penalties ----------------------------------------------------------------------------


def test_penalties_look_back_on_the_prompt(session: Any, backend_name: str) -> None:
    """The model would repeat a word of the prompt at once; a penalty forbids it."""
    (first,), _ = tokens_of(session, max_tokens=1, temperature=0)
    prompt = PROMPT + session.model.tokenizer.decode([first]) + ". " + PROMPT
    (again,), _ = tokens_of(session, prompt, max_tokens=1, temperature=0)
    assert again in session.model.tokenizer.encode(prompt)
    for implementation in implementations(backend_name):
        for penalty in ({"repeat_penalty": 1e5}, {"presence_penalty": 90.0}):
            fields = {"implementation": implementation, "max_tokens": 1, "temperature": 0}
            (other,), _ = tokens_of(session, prompt, **fields, **penalty, penalty_last_n=-1)
            assert other != again
            (short,), _ = tokens_of(session, prompt, **fields, **penalty, penalty_last_n=1)
            assert short == again, "a window of one token does not reach it"


# --- bad input ----------------------------------------------------------------------------

BAD = [
    ("temperature", -0.1, "0"),
    ("temperature", math.nan, "0"),
    ("temperature", "warm", "0"),
    ("top_p", 2, "0 to 1"),
    ("min_p", -0.5, "0 to 1"),
    ("typical_p", 1.5, "0 to 1"),
    ("xtc_probability", 2, "0 to 1"),
    ("top_k", -1, "0"),
    ("top_k", 1.5, "0"),
    ("mirostat", 3, "0, 1, 2"),
    ("repeat_penalty", 0, "1e-06"),
    ("penalty_last_n", -2, "-1"),
    ("min_keep", -1, "0"),
    ("seed", -1, "0 to 4294967294"),
    ("seed", 2**32 - 1, "0 to 4294967294"),
    ("implementation", "gpu", "portable"),
    ("ignore_eos", 1, "True or False"),
    ("logit_bias", {-4: 1.0}, "at least 0"),
    ("logit_bias", {4: math.nan}, "below infinity"),
    ("logit_bias", {4: math.inf}, "below infinity"),
]


@pytest.mark.parametrize(("field", "value", "allowed"), BAD)
def test_bad_input_is_refused_on_construction(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ic.InvalidInputError) as caught:
        ic.SamplingConfig(**{field: value})
    assert caught.value.field == field
    found, text = caught.value.value, str(caught.value)
    assert found is value or found in ([*value, *value.values()] if field == "logit_bias" else ())
    assert field in text
    assert repr(found) in text
    assert allowed in str(caught.value.allowed)
    assert str(caught.value.allowed) in text


def test_what_only_the_model_can_refuse_is_refused_before_decoding(
    session: Any, backend_name: str
) -> None:
    n_vocab = session.model.tokenizer.n_vocab
    session.ensure_prefix(PROMPT)
    before = session.explain_context()
    for implementation in implementations(backend_name):
        for bias in ({n_vocab: 1.0}, {10**9: 1.0}):
            with pytest.raises(ic.InvalidTokenError) as caught:
                session.decode(logit_bias=bias, implementation=implementation)
            assert (caught.value.field, caught.value.value) == ("logit_bias", *bias)
            assert str(n_vocab - 1) in str(caught.value.allowed)
    for choices in ([], "abc", [1]):
        with pytest.raises(ic.InvalidInputError) as refused:
            session.decode(response_format={"type": "choice", "choices": choices})
        assert refused.value.field == "response_format"
    assert session.explain_context() == before
    assert len(list(session.decode(max_tokens=2))) > 0


def test_a_native_sampler_where_there_is_none_is_refused(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    if not session.context.capabilities.native_sampler:
        with pytest.raises(ic.UnsupportedFeatureError):
            session.decode(implementation="native")
    for field, value in (
        ("response_format", {"type": "json_object"}),
        ("processors", [Processor(lambda row: row)]),
        ("logprobs", 2),
    ):
        with pytest.raises(ic.UnsupportedFeatureError):
            session.decode(implementation="native", **{field: value})
