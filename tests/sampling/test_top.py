"""An engine that tells only the likeliest tokens: what they decide is exact, else refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest

import infercore as ic
import pack
from infercore.testing import engine_of, load_reference_model
from infercore.values.info import Capabilities

if TYPE_CHECKING:
    from collections.abc import Iterator

N_TOP = 12
TEXT = "Once upon a time there was a baker"


@pytest.fixture(scope="module")
def full() -> Iterator[Any]:
    pack.need_pack()
    with load_reference_model() as model:
        yield model


@pytest.fixture(scope="module")
def told() -> Iterator[Any]:
    """Return the same model, of which each row's twelve likeliest are told."""
    pack.need_pack()
    with load_reference_model(logits="top", n_top=N_TOP) as model:
        yield model


def log_softmax(row: Any) -> Any:
    exact = row.astype(np.float64)
    return exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())


def chunks(model: Any, **decode: Any) -> list[Any]:
    with model.new_session(n_ctx=128) as session:
        session.ensure_prefix(TEXT)
        return list(session.decode(max_tokens=10, **decode))


def ids(found: list[Any]) -> list[int]:
    return [token for chunk in found for token in chunk.tokens]


def test_a_row_has_the_likeliest_and_nothing_else(full: Any, told: Any) -> None:
    with full.new_context(n_ctx=64) as one, told.new_context(n_ctx=64) as other:
        assert (other.capabilities.logits, other.capabilities.n_top) == ("top", N_TOP)
        for context in (one, other):
            context.decode([5, 6, 7])
        wanted, row = log_softmax(one.logits()), other.logits()
        known = np.flatnonzero(row > -np.inf)
        assert set(known) == set(np.argsort(wanted)[-N_TOP:])
        np.testing.assert_allclose(row[known], wanted[known], atol=1e-5)


@pytest.mark.parametrize(
    "decode",
    [
        {"temperature": 0},
        {"temperature": 0, "top_k": 5, "typical_p": 0.5},
        {"seed": 3, "top_k": N_TOP, "temperature": 2.0, "min_p": 0.0, "top_p": 1.0},
        {"seed": 4, "top_k": 8, "temperature": 1.5, "top_p": 0.9},
        {"seed": 5, "top_k": 8, "typical_p": 0.8, "dynatemp_range": 0.5},
        {"seed": 6, "top_k": 8, "xtc_probability": 1.0, "xtc_threshold": 0.05, "min_p": 0.0},
    ],
)
def test_what_the_likeliest_decide_is_that_of_all(full: Any, told: Any, decode: Any) -> None:
    for model in (full, told):
        assert len(ids(chunks(model, **decode))) == 10
    assert ids(chunks(told, **decode)) == ids(chunks(full, **decode))


def test_log_probabilities_are_those_of_all(full: Any, told: Any) -> None:
    pairs = zip(
        chunks(full, temperature=0, logprobs=N_TOP),
        chunks(told, temperature=0, logprobs=N_TOP),
        strict=True,
    )
    n_seen = 0
    for one, other in pairs:
        for wanted, found in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert (found.token, len(found.top)) == (wanted.token, N_TOP)
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert [t for t, _ in found.top] == [t for t, _ in wanted.top]
            np.testing.assert_allclose(
                [v for _, v in found.top], [v for _, v in wanted.top], atol=1e-4
            )
            n_seen += 1
    assert n_seen == 10


REFUSED: list[dict[str, Any]] = [
    {},  # the default keeps the 40 likeliest
    {"top_k": 0},
    {"top_k": N_TOP + 1},
    {"temperature": 0, "repeat_penalty": 1.1},
    {"temperature": 0, "frequency_penalty": 0.1},
    {"temperature": 0, "presence_penalty": -0.1},
    {"temperature": 0, "dry_multiplier": 0.5},
    {"temperature": 0, "logit_bias": {5: -1.0}},
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0, "no_repeat_ngram_size": 2},
    {"temperature": 0, "xtc_probability": 0.5},
    {"temperature": 0, "typical_p": 0.5},
    {"top_k": 5, "mirostat": 2},
    {"top_k": 5, "top_n_sigma": 1.0},
    {"top_k": 5, "adaptive_p_target": 0.5},
    {"temperature": 0, "min_tokens": 3},
    {"temperature": 0, "logprobs": N_TOP + 1},
    {"temperature": 0, "prompt_logprobs": 0},
    {"temperature": 0, "processors": [lambda _, logits: logits]},
    {"temperature": 0, "response_format": {"type": "choice", "choices": ["a"]}},
    {"top_k": 5, "implementation": "native"},
]


@pytest.mark.parametrize("decode", REFUSED, ids=lambda decode: ",".join(decode) or "defaults")
def test_what_needs_the_others_is_refused_before_anything(told: Any, decode: Any) -> None:
    limits = attrs.evolve(told.capabilities, native_sampler=False)
    with load_reference_model(limits=limits) as model, model.new_session(n_ctx=128) as session:
        session.ensure_prefix(TEXT)
        with pytest.raises(ic.UnsupportedFeatureError) as caught:
            list(session.decode(max_tokens=4, **decode))
        assert caught.value.state_after == "unchanged"
        assert session.state == "PREFIXED"
        assert ids(list(session.decode(max_tokens=4, temperature=0)))


def test_beams_and_samplers_are_refused_alike(told: Any) -> None:
    with told.new_session(n_ctx=128) as session:
        session.ensure_prefix(TEXT)
        with pytest.raises(ic.UnsupportedFeatureError):
            session.beam_search(2, max_tokens=4)
    with pytest.raises(ic.UnsupportedFeatureError):
        told.new_sampler(top_k=40)
    assert told.new_sampler(top_k=3).seed is not None


def test_pools_forks_and_saved_state(full: Any, told: Any) -> None:
    with full.new_session(n_ctx=128) as session:
        wanted = session.generate(TEXT, max_tokens=8, temperature=0)
    with told.new_pool(n_ctx=128, n_parallel=2) as pool, pool.open_session() as session:
        assert session.generate(TEXT, max_tokens=8, temperature=0) == wanted
    with told.new_session(n_ctx=128) as session, told.new_session(n_ctx=128) as other:
        session.ensure_prefix(TEXT)
        other.restore(session.snapshot())
        twin = other.fork()
        for one in (session, other, twin):
            text = "".join(c.text for c in one.decode(max_tokens=8, temperature=0))
            assert text == wanted
        twin.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda row: np.where(row == row.max(), row, -np.inf).astype(np.float32),
        lambda row: row + np.float32(3),
        lambda row: np.full_like(row, np.nan),
    ],
)
def test_rows_of_fewer_or_of_no_log_probabilities_are_the_plugin_s_fault(
    make: Any,
) -> None:
    with load_reference_model(logits="top", n_top=N_TOP) as model:
        context = model.new_context(n_ctx=64)
        inner = engine_of(context)
        plain = type(inner).logits
        limited = context._inner
        inner.logits = lambda i: plain(inner, i)
        told = type(limited).logits

        class Broken(type(limited)):  # type: ignore[misc]
            def logits(self, i: int) -> Any:
                return make(told(self, i))

        limited.__class__ = Broken
        context.decode([5, 6])
        with pytest.raises((ic.PluginError, ic.SessionFatalError), match="log-probabilities"):
            context.logits()


def test_how_many_belongs_to_it() -> None:
    with load_reference_model(logits="top") as model, pytest.raises(ic.PluginLoadError) as caught:
        model.new_context(n_ctx=64)
    assert "n_top" in str(caught.value)
    with pytest.raises(ic.InvalidInputError):
        Capabilities(n_top=-1)
