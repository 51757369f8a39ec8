"""An engine that generates by itself: it shows no logits, and brings sessions of its own."""

from __future__ import annotations

import os

import attrs
import pytest

import infercore as ic
from infercore import api
from infercore.testing.toy import ToyContext, ToyModel, load_toy_model, toy_logits

KINDS = attrs.evolve(ToyContext.capabilities, logits="none", native_sampler=True, logits_all=False)


class Session:
    """The toy's context without its rows."""

    capabilities = KINDS
    tolerance = 0.0

    def __init__(self, config):
        self.inner = ToyContext(config)
        for name in ("effective", "n_batch", "n_ubatch", "seq_remove", "n_past", "close"):
            setattr(self, name, getattr(self.inner, name))
        self.modes = []

    def decode(self, tokens, *, seq_id, logits):
        self.modes.append(logits)
        self.inner.decode(tokens, seq_id=seq_id, logits="none")


class Sampler:
    seed = 7

    def __init__(self, config):
        assert config.implementation in {"auto", "native"}

    def sample(self, session, i):
        assert i == 0
        positions, held = zip(*session.inner.cells, strict=True)
        return int(toy_logits(held, positions).argmax())

    def observe(self, tokens):
        pass

    def reset(self):
        pass

    def clone(self):
        return self

    def close(self):
        pass


class Model(ToyModel):
    capabilities = KINDS
    new_context = None

    def new_session(self, config):
        return Session(config)

    def new_sampler(self, config):
        return Sampler(config)


def loaded(model):
    descriptor = ic.BackendDescriptor(
        name="own",
        api_version=ic.API_VERSION,
        match=lambda _: 0.0,
        loader=lambda _path, _config: model,
        engine_version=lambda: "1",
        tries_in_child=False,
    )
    return api.CoreBackend(descriptor).load_model(os.curdir)


@pytest.fixture
def own():
    with loaded(Model()) as model:
        yield model


@pytest.fixture
def session(own):
    with own.new_session(n_ctx=128) as session:
        yield session


def greedy(session, **fields):
    return [t for c in session.decode(max_tokens=6, temperature=0, **fields) for t in c.tokens]


def test_its_sessions_are_those_of_the_core(session):
    with load_toy_model() as toy, toy.new_session(n_ctx=128) as plain:
        for each in (session, plain):
            each.ensure_prefix("a tale of ")
            each.prefill_suffix("two cities")
        assert greedy(session) == greedy(plain)
        for each in (session, plain):
            each.prefill_suffix("one city")
        ours, theirs = greedy(session), greedy(plain)
        assert ours == theirs
        counts = [s.explain_context().resident_tokens for s in (session, plain)]
        assert counts[0] == counts[1]
    last = list(session.decode(max_tokens=2, temperature=0))[-1]
    assert last.usage.seed == 7


def test_a_fork_goes_on_by_itself(session):
    session.ensure_prefix("a tale of ")
    with session.fork() as twin:
        assert greedy(twin) == greedy(session)


def test_a_context_shows_no_rows(own):
    assert own.capabilities.logits == "none"
    with own.new_context(n_ctx=64) as context:
        context.decode([1, 2, 3])
        assert context.n_outputs == 0
        with pytest.raises(ic.UnsupportedFeatureError, match="shows none") as caught:
            context.logits()
        assert caught.value.feature == "logits"
        with pytest.raises(ic.UnsupportedFeatureError):
            context.decode([4, 5], logits="all")
        assert context.n_past() == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"implementation": "portable"},
        {"response_format": {"type": "regex", "pattern": "a+"}},
        {"processors": [lambda _ids, logits: logits]},
        {"logprobs": 1},
        {"prompt_logprobs": 1},
        {"min_tokens": 1},
        {"no_repeat_ngram_size": 2},
        {"speculative": ic.SpeculativeConfig()},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_needs_logits_is_refused_by_name_and_changes_nothing(session, fields):
    session.ensure_prefix("a tale of ")
    with pytest.raises(ic.UnsupportedFeatureError, match=next(iter(fields))):
        session.decode(**fields)
    assert session.state == "PREFIXED"
    assert greedy(session)


def test_beams_and_pools_are_refused(own, session):
    session.ensure_prefix("a tale of ")
    with pytest.raises(ic.UnsupportedFeatureError, match="beam_search"):
        session.beam_search(2, max_tokens=3)
    with pytest.raises(ic.UnsupportedFeatureError, match="pool"):
        own.new_pool(n_ctx=64)
    assert len(session.sample_many(2, max_tokens=3, temperature=0)) == 2


def test_a_plugin_that_lacks_a_part_is_told_so():
    class NoSession(Model):
        new_session = None

    class NoSampler(Model):
        capabilities = attrs.evolve(KINDS, native_sampler=False)

        def new_session(self, config):
            session = Session(config)
            session.capabilities = self.capabilities
            return session

    with pytest.raises(ic.PluginError, match="new_session"):
        loaded(NoSession())
    with loaded(NoSampler()) as model, pytest.raises(ic.PluginError, match="native_sampler"):
        model.new_context(n_ctx=64)
