"""Ownership: whatever is closed, dropped or forgotten, in any order."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref

import attrs
import numpy as np
import pytest

import infercore as ic
import pack
from infercore import api
from infercore.engine.model import GuardedModel
from infercore.errors import (
    InvalidInputError,
    InvalidTokenError,
    OutOfMemoryError,
    PluginError,
    PluginLoadError,
    SessionClosedError,
    UnsupportedFeatureError,
)
from infercore.services import SERVICES
from infercore.testing import load_toy_model
from infercore.testing.toy import ToyContext, ToyModel
from infercore.values.config import KVType
from infercore.values.info import BackendDescriptor, Capabilities

FIELDS = {"n_ctx": 32}


class Watched(ToyModel):
    """A toy that writes down what is closed, and holds no reference to it."""

    def __init__(self):
        super().__init__()
        self.log = []
        self.contexts = []

    def new_context(self, config):
        context = super().new_context(config)
        number = len(self.contexts)
        close = context.close

        def watched():
            self.log.append(number)
            close()

        context.close = watched
        self.contexts.append(weakref.ref(context))
        return context

    def close(self):
        self.log.append("model")


def guarded(inner):
    descriptor = BackendDescriptor(name="toy", api_version=1, match=None, loader=None)
    return GuardedModel(inner, descriptor=descriptor, services=SERVICES)


@pytest.fixture
def watched():
    return Watched()


def test_weights_are_freed_after_the_last_context(watched):
    model = guarded(watched)
    first, second = model.new_context(**FIELDS), model.new_context(**FIELDS)
    model.close()
    assert watched.log == []
    first.decode([1, 2])
    second.close()
    first.decode([3])
    assert watched.log == [1]
    first.close()
    assert watched.log == [1, 0, "model"]


@pytest.mark.parametrize("order", [*itertools.permutations(["model", "a", "b"])])
def test_closing_in_any_order_frees_each_once(watched, order):
    model = guarded(watched)
    things = {"model": model, "a": model.new_context(**FIELDS), "b": model.new_context(**FIELDS)}
    for name in order:
        things[name].close()
        things[name].close()
    assert sorted(watched.log, key=str) == [0, 1, "model"]
    assert watched.log[-1] == "model"


def test_a_context_outlives_the_variable_of_its_model(watched):
    context = guarded(watched).new_context(**FIELDS)
    gc.collect()
    assert watched.log == []
    context.decode([1, 2, 3])
    context.close()
    assert watched.log == [0, "model"]


def test_what_is_dropped_unclosed_is_freed(watched):
    model = guarded(watched)
    context = model.new_context(**FIELDS)
    context.decode([1])
    del context
    gc.collect()
    assert watched.log == [0]
    assert watched.contexts[0]() is None
    del model
    gc.collect()
    assert watched.log == [0, "model"]


def test_a_context_in_a_cycle_is_freed(watched):
    context = guarded(watched).new_context(**FIELDS)
    context.set_abort_callback(context.close)
    del context
    gc.collect()
    assert watched.log == [0, "model"]


def test_nothing_can_be_used_after_close(watched):
    model = guarded(watched)
    context = model.new_context(**FIELDS)
    context.decode([1, 2])
    context.close()
    for call in (
        lambda: context.decode([1]),
        lambda: context.decode([]),
        lambda: context.decode_one(1),
        lambda: context.eval([1], 0),
        lambda: context.logits(),
        lambda: context.logits_all(),
        lambda: context.n_past(),
        lambda: context.tokens(),
        lambda: context.seq_remove(0),
        lambda: context.clear(),
        lambda: context.save_state(),
        lambda: context.perf(),
        lambda: context.synchronize(),
        lambda: context.set_abort_callback(None),
    ):
        with pytest.raises(SessionClosedError) as caught:
            call()
        assert caught.value.state_after == "closed"
    assert context.closed
    assert context.n_ctx == 32
    context.abort()
    context.close()
    model.close()
    for call in (
        lambda: model.new_context(),
        lambda: model.new_sampler(),
        lambda: model.new_session(),
        lambda: model.plan_memory(),
        lambda: model.tokenizer.encode("x"),
        lambda: model.tokenizer.decode([1]),
        lambda: model.tokenizer.token_bytes(1),
    ):
        with pytest.raises(SessionClosedError):
            call()
    assert model.closed
    assert model.info.architecture == "toy"


def test_with_closes(watched):
    with guarded(watched) as model, model.new_context(**FIELDS) as context:
        context.decode([1])
    assert context.closed
    assert model.closed
    assert watched.log == [0, "model"]


def test_two_hundred_contexts_leave_nothing(reference_model):
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(200):
        with reference_model.new_context(n_ctx=16) as context:
            context.decode([1, 2])
    gc.collect()
    assert len(gc.get_objects()) - before < 200


def test_two_hundred_models_leave_nothing():
    load_toy_model().close()  # the first load looks for what is installed, and keeps that
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(200):
        with load_toy_model() as model, model.new_context(n_ctx=16) as context:
            context.decode([1, 2])
    gc.collect()
    assert len(gc.get_objects()) - before < 200


def test_closing_from_many_threads_frees_once(watched):
    model = guarded(watched)
    context = model.new_context(**FIELDS)
    threads = [threading.Thread(target=thing.close) for thing in (context, model) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert watched.log == [0, "model"]


def test_contexts_in_threads_give_what_they_give_alone(reference_model):
    plans = [np.random.default_rng(i).integers(4, 1024, 80).tolist() for i in range(3)]

    def rows(ids):
        with reference_model.new_context(n_ctx=128, n_batch=16) as context:
            context.decode(ids)
            found = [context.logits().copy()]
            for token in ids[:10]:
                context.decode_one(token)
                found.append(context.logits().copy())
        return np.array(found)

    alone = [rows(ids) for ids in plans]
    together = [None] * 3

    def work(i):
        together[i] = rows(plans[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


# -- contexts that cannot be made -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"n_ctx": -1}, InvalidInputError),
        ({"n_ctxx": 5}, InvalidInputError),
        ({"n_seq_max": 2}, UnsupportedFeatureError),
        ({"type_k": "f16"}, UnsupportedFeatureError),
        ({"backend_options": {"x": 1}}, InvalidInputError),
        ({"n_threads": 3}, UnsupportedFeatureError),
    ],
)
def test_a_refused_context_takes_nothing(watched, fields, error):
    model = guarded(watched)
    with pytest.raises(error):
        model.new_context(**fields)
    model.close()
    assert watched.log == ["model"]


def test_a_context_without_memory_takes_nothing(watched):
    def fail(config):
        raise OutOfMemoryError("none left")

    watched.new_context = fail
    model = guarded(watched)
    with pytest.raises(OutOfMemoryError) as caught:
        model.new_context(n_ctx=512, on_oom="shrink")
    assert len(caught.value.attempts) > 1
    model.close()
    assert watched.log == ["model"]


def test_a_smaller_window_is_reported(watched):
    make = watched.new_context

    def fail(config):
        if config.n_ctx > 300:
            raise OutOfMemoryError("none left")
        return make(config)

    watched.new_context = fail
    with guarded(watched) as model:
        context = model.new_context(n_ctx=1024, n_ubatch=64, on_oom="shrink")
        assert (context.n_ctx, context.effective["n_ctx"]) == (256, 256)
        assert [attempt.n_ctx for attempt in context.attempts] == [1024, 512, 256]
        assert [attempt.error is None for attempt in context.attempts] == [False, False, True]
        context.close()


def test_sequences_without_a_token_each_are_refused(reference_model):
    asked = {"n_ctx": 3, "n_seq_max": 4}
    for call in (reference_model.new_context, reference_model.plan_memory):
        with pytest.raises(InvalidInputError, match="no tokens") as caught:
            call(**asked, kv_unified=False)
        assert (caught.value.field, caught.value.state_after) == ("n_ctx", "unchanged")
    with reference_model.new_context(**asked, kv_unified=True) as context:
        context.decode([5], seq_id=3)


def test_an_engine_that_parts_the_window_by_itself_is_closed(watched, monkeypatch):
    parts = {"n_ctx": 3, "n_seq_max": 4, "kv_unified": False, "n_threads": 1, "n_threads_batch": 1}
    monkeypatch.setattr("infercore.testing.toy.ToyContext.effective", parts, raising=False)
    make = watched.new_context

    def new_context(config):
        context = make(config)
        context.effective = parts
        return context

    watched.new_context = new_context
    model = guarded(watched)
    with pytest.raises(InvalidInputError, match="no tokens"):
        model.new_context(n_ctx=3)
    model.close()
    assert watched.log == [0, "model"]


def test_the_ladder_leaves_each_sequence_a_token(reference_model, monkeypatch):
    def fail(config):
        raise OutOfMemoryError("none left")

    monkeypatch.setattr(reference_model._inner, "new_context", fail)
    with pytest.raises(OutOfMemoryError) as caught:
        reference_model.new_context(
            n_ctx=64, n_ctx_min=1, n_seq_max=16, kv_unified=False, on_oom="shrink"
        )
    assert min(attempt.n_ctx for attempt in caught.value.attempts) == 16


class Broken(Watched):
    """A toy that its guard cannot be built around."""

    @property
    def tokenizer(self):
        raise KeyError("vocabulary")

    @tokenizer.setter
    def tokenizer(self, value):
        pass


def test_weights_that_cannot_be_guarded_are_freed(tmp_path):
    made = []

    def load(path, config):
        made.append(Broken())
        return made[-1]

    backend = BackendDescriptor(name="toy", api_version=1, match=None, loader=load)
    with pytest.raises(PluginError, match="vocabulary") as caught:
        api.CoreBackend(backend).load_model(tmp_path)
    assert isinstance(caught.value.__cause__, KeyError)
    del caught
    gc.collect()
    assert made[0].log == ["model"]


@pytest.mark.parametrize(
    ("declared", "missing"),
    [
        ({"kv_shift": True}, "seq_shift"),
        ({"kv_copy": "full"}, "seq_copy"),
        ({"state": True}, "save_state"),
        ({"lora": True}, "set_adapters"),
        ({"live_threads": True}, "set_threads"),
        ({"multi_sequence": True}, "decode_batch"),
    ],
)
def test_a_declared_capability_needs_its_methods(declared, missing):
    with load_toy_model(**declared) as model, pytest.raises(PluginLoadError, match=missing):
        model.new_context()


def test_a_context_that_declares_too_much_is_closed(watched, monkeypatch):
    monkeypatch.setattr("infercore.testing.toy.ToyContext.capabilities", Capabilities(state=True))
    model = guarded(watched)
    with pytest.raises(PluginLoadError):
        model.new_context(**FIELDS)
    model.close()
    assert watched.log == [0, "model"]


def test_the_default_window(watched):
    with guarded(watched) as model:
        for fields, n_ctx in (({}, 1024), ({"n_ctx": 0}, 1024), ({"n_ctx": 7}, 7)):
            with model.new_context(**fields) as context:
                assert context.n_ctx == context.effective["n_ctx"] == n_ctx


def test_a_native_sampler_is_refused_where_there_is_none(toy_model):
    with pytest.raises(UnsupportedFeatureError, match="portable"):
        toy_model.new_sampler(implementation="native")


@pytest.mark.parametrize("order", [*itertools.permutations(["model", "context", "sampler"])])
def test_weights_stay_while_a_sampler_of_the_engine_is_open(order, monkeypatch):
    from infercore.testing import load_reference_model

    pack.need_pack()
    freed, model = [], load_reference_model()
    monkeypatch.setattr(model._inner, "close", lambda: freed.append(True), raising=False)
    context, sampler = (
        model.new_context(n_ctx=16),
        model.new_sampler(implementation="native", seed=3),
    )
    context.decode([5, 6])
    assert 0 <= sampler.sample(context) < 1024
    twin = sampler.clone()
    things = {"model": model, "context": context, "sampler": sampler}
    for name in order:
        things[name].close()
    for call in (lambda: sampler.sample(context), sampler.reset, sampler.clone):
        with pytest.raises(SessionClosedError):
            call()
    twin.reset()
    assert not freed
    twin.close()
    assert freed == [True]


def test_a_backend_scores_paths_alone_and_its_faults_are_named():
    def backend(match):
        found = BackendDescriptor(name="mine", api_version=1, loader=None, match=match)
        return api.CoreBackend(found)

    assert backend(len).match("model.gguf") == 10.0
    for path in (None, 5, b"model.gguf", ["a"], "", "a\0b"):
        with pytest.raises(InvalidInputError) as caught:
            backend(len).match(path)
        assert caught.value.field == "path"
    for match in (lambda _: "good", lambda _: 1 / 0):
        with pytest.raises(PluginError) as wrong:
            backend(match).match("model.gguf")
        assert wrong.value.plugin == "mine"


def test_a_sampler_of_the_engine_leaves_contexts_of_others_alone(reference_model, toy_model):
    sampler = reference_model.new_sampler(implementation="native")
    with toy_model.new_context(n_ctx=16) as foreign:
        foreign.decode([5, 6])
        before = foreign.logits().copy()
        with pytest.raises(InvalidInputError) as caught:
            sampler.sample(foreign)
        assert caught.value.field == "context"
        assert np.array_equal(foreign.logits(), before)
        foreign.decode_one(7)
    assert not sampler.closed
    sampler.close()
    assert sampler.closed


def test_a_sampler_of_the_engine_observes_tokens_of_its_vocabulary_alone(reference_model):
    sampler = reference_model.new_sampler(implementation="native")
    for bad in (-1, 1024, 2**31, True, None):
        with pytest.raises(InvalidTokenError):
            sampler.observe([5, bad])
    sampler.close()


def test_digests_name_model_and_vocabulary(reference_model, toy_model):
    digests = {
        reference_model.digest,
        toy_model.digest,
        reference_model.tokenizer.digest,
        toy_model.tokenizer.digest,
    }
    assert len(digests) == 4
    assert all(len(digest) == 64 for digest in digests)


class OneByOne(ToyContext):
    """An encoder that claims a way to append one token."""

    capabilities = attrs.evolve(ToyContext.capabilities, encoder=True, logits_all=False)

    def decode_one(self, token, *, seq_id):
        raise AssertionError("an encoder takes whole texts")

    def encode(self, tokens):
        pass


def test_an_encoder_is_asked_for_no_single_token(watched):
    watched.new_context = OneByOne
    with guarded(watched) as model, model.new_context(n_ctx=16) as context:
        for call in (lambda: context.decode_one(5), lambda: context.decode([5])):
            with pytest.raises(UnsupportedFeatureError, match="encodes texts"):
                call()
        context.encode([5, 6])


class Eights(ToyModel):
    """A toy that knows a type of its own for the KV cache."""

    capabilities = attrs.evolve(ToyModel.capabilities, kv_types=("fp8_e4m3",))

    def new_context(self, config):
        kind, config = config.type_k, attrs.evolve(config, type_k=None)
        context = super().new_context(config)
        context.effective = {**context.effective, "type_k": kind or "fp8_e4m3"}
        return context


def test_a_kv_type_that_only_the_plugin_knows_is_opened():
    with guarded(Eights()) as model, model.new_context(type_k=KVType("fp8_e4m3")) as context:
        assert context.effective["type_k"] == "fp8_e4m3"


def test_a_kv_type_that_nobody_declares_is_refused(reference_model):
    with pytest.raises(UnsupportedFeatureError, match="nf3"):
        reference_model.new_context(type_v=KVType("nf3"))
    with guarded(Eights()) as model, pytest.raises(UnsupportedFeatureError, match="fp8_e4m3"):
        model.new_context(type_k=KVType("nf3"))


def test_a_tokenizer_outlives_the_variable_of_its_model(watched):
    tokenizer = guarded(watched).tokenizer
    gc.collect()
    assert tokenizer.decode(tokenizer.encode("ab")).endswith("ab")
    assert watched.log == []
    del tokenizer
    assert watched.log == ["model"]
    model = guarded(watched)
    model.close()  # who says so means it
    assert watched.log == ["model"] * 2
    with pytest.raises(ic.SessionClosedError):
        model.tokenizer.encode("ab")


def test_weights_stay_while_a_thread_tokenizes(watched, monkeypatch):
    model = guarded(watched)
    inside, go_on = threading.Event(), threading.Event()
    encode = watched.tokenizer.encode

    def slow(text, **fields):
        inside.set()
        assert go_on.wait(60)
        assert watched.log == []
        return encode(text, **fields)

    monkeypatch.setattr(watched.tokenizer, "encode", slow)
    found = []
    thread = threading.Thread(target=lambda: found.append(model.tokenizer.encode("ab")))
    thread.start()
    assert inside.wait(60)
    model.close()
    with pytest.raises(ic.SessionClosedError):
        model.tokenizer.decode([1])
    go_on.set()
    thread.join(60)
    assert found == [encode("ab", add_special=True, parse_special=True)]
    assert watched.log == ["model"]
