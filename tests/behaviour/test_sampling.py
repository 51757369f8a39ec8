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


@pytest.mark.parametrize("seed", range(6))
def test_asking_for_logprobs_changes_no_token_of_a_seed(session: Any, seed: int) -> None:
    word = {"enum": ["Mira", "Tom", "Ida", "a fox"]}
    form = {"type": "object", "properties": {"name": word, "other": word}, "required": ["name"]}
    asked = {"response_format": form, "seed": seed, "temperature": 2.0, "max_tokens": 60}
    plain, _ = tokens_of(session, **asked)
    told, _ = tokens_of(session, logprobs=2, **asked)
    assert told == plain
    session.ensure_prefix(PROMPT)
    chunks = list(session.decode(logprobs=2, **asked))
    logprobs = [one for chunk in chunks for one in chunk.logprobs or ()]
    assert [one.token for one in logprobs] == plain
    cold = session.fork()
    cold.ensure_prefix(PROMPT)
    row, places = [], range(min(4, len(plain)))
    for place in places:  # each is told of by the row behind what stands before it
        cold.ensure_prefix([*session.model.tokenizer.encode(PROMPT), *plain[:place]])
        (first,) = (one for c in cold.decode(max_tokens=1, logprobs=2) for one in c.logprobs or ())
        row.append(first.top)
    cold.close()
    for place in places:
        assert dict(logprobs[place].top) == pytest.approx(dict(row[place]), abs=1e-4)


# --- bias, processors, ends ---------------------------------------------------------------


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
    ("logit_bias", {4: math.nan}, "at most"),
    ("logit_bias", {4: math.inf}, "at most"),
    ("logit_bias", {4: 1e39}, "at most"),
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


def test_adaptive_p_draws_near_its_target(session: Any) -> None:
    loose = {"top_k": 0, "top_p": 1.0, "min_p": 0.02, "temperature": 2.0, "max_tokens": 60}
    means = []
    for target in (0.1, 0.9):
        session.ensure_prefix("The")
        chunks = session.decode(adaptive_p_target=target, seed=1, logprobs=0, **loose)
        found = [one.logprob for chunk in chunks for one in chunk.logprobs or ()]
        means.append(float(np.exp(found).mean()))
    assert means[0] < means[1] - 0.1
    again = tokens_of(session, "The", adaptive_p_target=0.9, seed=1, **loose)[0]
    assert tokens_of(session, "The", adaptive_p_target=0.9, seed=1, **loose)[0] == again


@pytest.mark.parametrize("named", ["decode", "generate", "chat", "sample_many"])
def test_a_stop_token_that_the_model_does_not_have_is_refused(session: Any, named: str) -> None:
    session.ensure_prefix("Once upon")
    before = session.explain_context()
    n_vocab = session.model.info.n_vocab
    given = {
        "generate": ("a",),
        "chat": ([{"role": "user", "content": "a"}],),
        "sample_many": (2,),
    }
    with pytest.raises(ic.InvalidTokenError) as caught:
        getattr(session, named)(*given.get(named, ()), stop_tokens=[3, n_vocab])
    assert (caught.value.field, caught.value.value) == ("stop_tokens", n_vocab)
    assert session.explain_context() == before
