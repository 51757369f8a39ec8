"""What a plugin gets wrong is a `PluginError` that names it, never a fault of the caller's."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

import infercore as ic
import pack
from infercore import api
from infercore.engine import plugin_checks
from infercore.errors import (
    OutOfMemoryError,
    PluginError,
    PluginLoadError,
    SessionFatalError,
    TransientEngineError,
    UnsupportedFeatureError,
)
from infercore.testing import Faults, load_reference_model, load_toy_model
from infercore.testing.toy import ToyContext, ToyModel, ToyTokenizer


def load(loader, match=lambda _path: 1.0, **fields):
    descriptor = ic.BackendDescriptor(
        name="mine", api_version=1, match=match, loader=loader, tries_in_child=False, **fields
    )
    return api.CoreBackend(descriptor).load_model(".")


def made(**fields):
    """Return a loader of a toy with other attributes."""

    def loader(_path, _config):
        model = ToyModel()
        for name, value in fields.items():
            setattr(model, name, value)
        return model

    return loader


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (lambda *_: None, "returned None"),
        (lambda *_: object(), "info"),
        (made(capabilities={"kv_remove": "any"}), "capabilities is dict"),
        (made(info={"n_vocab": 3}), "info is dict"),
        (made(files="model.bin"), "model.files is str"),
        (made(files=("/no/such/file",)), "/no/such/file"),
        (made(files=(), digest=None), "no digest"),
        (made(new_context=None), "new_context"),
        (made(tokenizer=None), "without a tokenizer"),
        (made(tokenizer=object()), "encode"),
        (lambda *_: ToyModel, "info is NoneType"),
        (made(runtime="cpu"), "model.runtime is str"),
        (made(capabilities=ic.Capabilities(native_sampler=True)), "new_sampler"),
    ],
)
def test_a_model_that_is_none_is_refused(loader, told):
    with pytest.raises(PluginError, match=told) as caught:
        load(loader)
    assert caught.value.plugin == "mine"
    assert "'mine'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_vocab", 263),
        ("bos", 264),
        ("eos", -1),
        ("eot", "x"),
        ("add_bos", 1),
        ("chat_template", 3),
    ],
)
def test_a_tokenizer_s_facts_are_checked(name, value):
    tokenizer = ToyTokenizer()
    setattr(tokenizer, name, value)
    with pytest.raises(PluginError, match=rf"tokenizer\.{name}"):
        load(made(tokenizer=tokenizer))


@pytest.mark.parametrize("score", [True, "yes", None, float("nan")])
def test_a_match_that_is_no_score_is_refused(score):
    with pytest.raises(PluginError, match="match gave"):
        load(made(), match=lambda _path: score)


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (np.array([1, 2]), "ndarray"),
        ([1, 999], "999"),
        ([-1], "-1"),
        ([1.5], "float"),
        (None, "None"),
    ],
)
def test_what_encode_gives_is_checked(ids, told):
    tokenizer = ToyTokenizer()
    tokenizer.encode = lambda *_, **__: ids
    with load(made(tokenizer=tokenizer)) as model:
        with pytest.raises(PluginError, match=r"tokenizer\.encode") as caught:
            model.tokenizer.encode("a")
        assert told in str(caught.value)
        with model.new_session(n_ctx=32) as session, pytest.raises(PluginError):
            session.ensure_prefix("a")


def test_pieces_and_flags_are_checked():
    tokenizer = ToyTokenizer()
    tokenizer.token_bytes = str
    tokenizer.is_eog = lambda _: None
    with load(made(tokenizer=tokenizer)) as model:
        for call in (
            lambda: model.tokenizer.token_bytes(1),
            lambda: model.tokenizer.decode([1]),
            lambda: model.tokenizer.digest,
        ):
            with pytest.raises(PluginError, match=r"token_bytes\(\d\) returned str"):
                call()
        with pytest.raises(PluginError, match="is_eog"):
            model.tokenizer.is_eog(1)


def test_what_encode_raises_names_plugin_and_line():
    tokenizer = ToyTokenizer()

    def encode(*_, **__):
        raise KeyError("name")

    tokenizer.encode = encode
    with load(made(tokenizer=tokenizer)) as model, pytest.raises(PluginError) as caught:
        model.tokenizer.encode("a")
    assert "'mine'" in str(caught.value)
    assert f"KeyError: 'name' ({__file__}, line " in str(caught.value)
    assert str(caught.value).endswith("in encode)")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("token_bytes", lambda tokenizer: tokenizer.token_bytes(1)),
        ("token_bytes", lambda tokenizer: tokenizer.decode([1])),
        ("is_eog", lambda tokenizer: tokenizer.is_eog(1)),
        ("is_control", lambda tokenizer: tokenizer.is_control(1)),
        ("token_kind", lambda tokenizer: tokenizer.token_kind(1)),
        ("token_score", lambda tokenizer: tokenizer.token_score(1)),
    ],
)
def test_what_a_tokenizer_raises_names_plugin_and_line(name, call):
    tokenizer = ToyTokenizer()
    setattr(tokenizer, name, lambda _: {}["missing"])
    with load(made(tokenizer=tokenizer)) as model, pytest.raises(PluginError) as caught:
        call(model.tokenizer)
    assert caught.value.plugin == "mine"
    assert f"KeyError: 'missing' ({__file__}, line " in str(caught.value)


def test_lack_of_memory_in_a_tokenizer_is_that(monkeypatch):
    tokenizer = ToyTokenizer()

    def token_bytes(_):
        raise MemoryError

    tokenizer.token_bytes = token_bytes
    with load(made(tokenizer=tokenizer)) as model, pytest.raises(ic.OutOfMemoryError):
        model.tokenizer.token_bytes(1)


def divides(*_):
    return 1 / 0


def test_what_a_descriptor_or_a_model_raises_is_no_fault_of_the_file():
    with pytest.raises(PluginError, match="version of its engine: ZeroDivisionError"):
        load(made(), engine_version=divides)
    wrong = pytest.raises(PluginError, match="native handle: ZeroDivisionError")
    with load(made(native_handle=divides)) as model, wrong:
        _ = model.native_handle
    model = load(made(close=divides))
    with pytest.raises(PluginError, match="closing a model: ZeroDivisionError"):
        model.close()
    assert model.closed


def test_a_digest_that_is_none_is_refused():
    with (
        load(made(files=(__file__,), digest=b"abc")) as model,
        pytest.raises(PluginError, match="digest is bytes"),
    ):
        _ = model.digest


def test_a_plan_that_is_none_is_refused():
    with load(made(plan_memory=lambda _: 64)) as model:
        with pytest.raises(PluginError, match="plan_memory returned int 64"):
            model.plan_memory(n_ctx=32)
        with pytest.raises(PluginError, match="plan_memory returned int 64"):
            model.new_context(n_ctx="fit")
        with pytest.raises(PluginError, match="plan_memory returned int 64"):
            model.new_context(n_ctx=32, on_oom="shrink")


@pytest.mark.parametrize("token", [None, 264, -1, 1.0])
def test_a_token_that_is_none_is_refused(token):
    class Sampler:
        seed = 1

        def sample(self, context, i):
            return token

        def observe(self, tokens): ...
        def reset(self): ...
        def close(self): ...
        def clone(self):
            return None

    native = attrs.evolve(ToyModel.capabilities, native_sampler=True)
    given = {"capabilities": native, "new_sampler": lambda _: Sampler()}
    with load(made(**given)) as model, model.new_context(n_ctx=32) as context:
        context.decode([1])
        sampler = model.new_sampler(implementation="native")
        with pytest.raises(PluginError, match=r"sampler\.sample"):
            sampler.sample(context)
        with pytest.raises(PluginError, match="without the methods sample"):
            sampler.clone()
        sampler.close()
    wrong = pytest.raises(PluginError, match="NoneType without the methods sample")
    with load(made(**given | {"new_sampler": lambda _: None})) as model, wrong:
        model.new_sampler(implementation="native")


class Wrong(ToyContext):
    """A context that says of itself what the test wants."""

    changes: ClassVar[dict[str, Any]] = {}

    def __init__(self, config):
        super().__init__(config)
        for name, value in self.changes.items():
            setattr(self, name, value)


def opened(monkeypatch, **changes):
    monkeypatch.setattr(Wrong, "changes", changes)
    return load(made(new_context=Wrong))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"capabilities": {}}, "capabilities is dict"),
        ({"effective": None}, "effective is NoneType"),
        ({"effective": {"n_ctx": 32, "n_threads": 1}}, "lacks n_threads_batch"),
        ({"n_batch": 0}, "n_batch is int 0"),
        ({"tolerance": "small"}, "tolerance is str"),
        ({"decode": None}, "decode"),
    ],
)
def test_a_context_that_is_none_is_refused(monkeypatch, changes, told):
    with opened(monkeypatch, **changes) as model, pytest.raises(PluginError, match=told):
        model.new_context(n_ctx=32)


def test_missing_effective_values_are_a_load_error(monkeypatch):
    with opened(monkeypatch, effective={}) as model, pytest.raises(PluginLoadError):
        model.new_context(n_ctx=32)


@pytest.mark.parametrize(
    "row", [[0.0] * 264, np.zeros(100, np.float32), np.zeros(264), np.zeros((1, 264), np.float32)]
)
def test_a_row_of_logits_is_checked(monkeypatch, row):
    changes = {"logits": lambda _i: row}
    with opened(monkeypatch, **changes) as model, model.new_context(n_ctx=32) as context:
        context.decode([1, 2])
        with pytest.raises(PluginError, match=r"context\.logits"):
            context.logits()
        context.decode([3], logits="all")
        with pytest.raises(PluginError, match=r"context\.logits"):
            context.logits_all()
    with opened(monkeypatch, **changes) as model, model.new_session(n_ctx=32) as session:
        session.ensure_prefix("a")
        with pytest.raises(PluginError, match=r"context\.logits"):
            list(session.decode(max_tokens=2))


class Bare:
    """It has a shape, and says not of what."""

    shape = (2, 8)


@contextlib.contextmanager
def embedding_context(monkeypatch, pooling, **made):
    """Open a context that makes embeddings, pooled in this way."""
    kinds = attrs.evolve(ToyContext.capabilities, embeddings=True, pooling=("none", "mean"))
    in_force = {"n_threads": 1, "n_threads_batch": 1, "embeddings": True, "pooling_type": pooling}
    changes = {"capabilities": kinds, "effective": in_force, "set_embeddings": lambda _on: None}
    with (
        opened(monkeypatch, **changes, **made) as model,
        model.new_context(n_ctx=32, embeddings=True, pooling_type=pooling) as context,
    ):
        yield context


@pytest.mark.parametrize(
    "found",
    [
        None,
        [0.0] * 8,
        Bare(),
        np.zeros(0, np.float32),
        np.zeros((2, 2, 8), np.float32),
        np.zeros(8),
    ],
)
def test_a_vector_is_checked(monkeypatch, found):
    made = {"embedding": lambda _seq_id: found, "embeddings": lambda: found}
    with embedding_context(monkeypatch, "mean", **made) as context:
        context.decode([1, 2])
        with pytest.raises(PluginError, match=r"context\.embedding\(0\) returned"):
            context.embedding()
    with embedding_context(monkeypatch, "none", **made) as context:
        context.decode([1, 2])
        with pytest.raises(PluginError, match=r"context\.embeddings\(\) returned"):
            context.embeddings()


def test_there_is_a_vector_for_each_token(monkeypatch):
    made = np.zeros((3, 8), np.float32)
    vectors = {"embedding": lambda _seq_id: made[0], "embeddings": lambda: made}
    with embedding_context(monkeypatch, "none", **vectors) as context:
        context.decode([1, 2, 3])
        assert context.embeddings().shape == (3, 8)
        context.decode([4, 5])
        with pytest.raises(PluginError, match=r"float32\[3, 8\], not float32 \[2, n_embd\]"):
            context.embeddings()


def test_an_abort_without_its_methods_is_a_load_error(monkeypatch):
    kinds = attrs.evolve(ToyContext.capabilities, abort=True)
    wrong = pytest.raises(PluginLoadError, match="abort, clear_abort")
    with opened(monkeypatch, capabilities=kinds) as model, wrong:
        model.new_context(n_ctx=32)


@pytest.mark.parametrize("kept", [1, 3])
def test_a_removal_that_leaves_another_end_ends_the_context(monkeypatch, kept):
    def remove(self, seq_id, p0, p1):
        del self.cells[kept:]
        return True

    monkeypatch.setattr(Wrong, "seq_remove", remove)
    with opened(monkeypatch) as model:
        context = model.new_context(n_ctx=32)
        context.decode([1, 2, 3])
        told = rf"seq_remove\(0, 2, -1\) left the next position at {kept}, not at 2"
        with pytest.raises(SessionFatalError, match=told):
            context.seq_remove(0, 2, -1)
        context.close()


@pytest.mark.parametrize("call", [lambda c: c.seq_remove(0, 1, -1), lambda c: c.clear()])
def test_a_removal_that_answers_nothing_ends_the_context(monkeypatch, call):
    with opened(monkeypatch, seq_remove=lambda *_: None) as model:
        context = model.new_context(n_ctx=32)
        context.decode([1, 2])
        with pytest.raises(SessionFatalError, match=r"'mine': seq_remove\(0, .* returned None"):
            call(context)
        context.close()


def test_a_clear_that_is_refused_ends_the_context(monkeypatch):
    with opened(monkeypatch, seq_remove=lambda *_: False) as model:
        context = model.new_context(n_ctx=32)
        context.decode([1, 2])
        told = r"'mine': seq_remove\(0, 0, -1\) refused to remove a whole sequence"
        with pytest.raises(SessionFatalError, match=told):
            context.clear()
        context.close()


def test_a_position_that_is_none_is_named(monkeypatch):
    with opened(monkeypatch, n_past=lambda _: None) as model:
        context = model.new_context(n_ctx=32)
        with pytest.raises(SessionFatalError, match=r"'mine': n_past\(0\) returned NoneType"):
            context.decode([1])
        context.close()


def test_what_closing_a_context_raises_names_the_plugin(monkeypatch):
    with opened(monkeypatch, close=divides) as model:
        context = model.new_context(n_ctx=32)
        with pytest.raises(PluginError, match="'mine' failed while closing a context"):
            context.close()
        assert context.closed


@pytest.mark.parametrize("saved", [None, "cells"])
def test_saved_state_that_is_no_bytes_is_refused(monkeypatch, saved):
    kinds = attrs.evolve(ToyContext.capabilities, state=True, sequence_state=True)
    saves = {name: lambda *_: saved for name in ("save_state", "save_sequence")}
    loads = {name: lambda *_: None for name in ("load_state", "load_sequence")}
    model = opened(monkeypatch, capabilities=kinds, **saves, **loads)
    with model, model.new_context(n_ctx=32) as context:
        with pytest.raises(PluginError, match=r"'mine': save_state\(\) returned"):
            context.save_state()
        with pytest.raises(PluginError, match=r"'mine': save_sequence\(0\) returned"):
            context.save_sequence(0)


def test_what_a_restore_raises_is_told_with_its_place(monkeypatch):
    changes = {
        "capabilities": attrs.evolve(ToyContext.capabilities, state=True),
        "save_state": lambda: b"cells",
        "load_state": lambda _: {}["cells"],
    }
    with opened(monkeypatch, **changes) as model, model.new_context(n_ctx=32) as context:
        saved = context.save_state()
        with pytest.raises(ic.SnapshotError, match=r"KeyError: 'cells' \(.+, line \d+, in "):
            context.load_state(saved)


@pytest.mark.parametrize("lie", [0, 99])
def test_a_position_that_is_not_true_is_noticed(monkeypatch, lie):
    with opened(monkeypatch, n_past=lambda _seq_id: lie) as model:
        context = model.new_context(n_ctx=64)
        with pytest.raises(SessionFatalError, match="n_past") as caught:
            context.decode([1, 2, 3])
        assert isinstance(caught.value.cause, PluginError)
        context.close()


def test_a_position_that_is_one_too_large_is_noticed_at_the_next_tokens(monkeypatch):
    with opened(monkeypatch) as model:
        context = model.new_context(n_ctx=64)
        context.decode([1, 2, 3])
        context.decode_one(4)
        true = ToyContext.n_past
        monkeypatch.setattr(Wrong, "n_past", lambda self, seq_id: true(self, seq_id) + 1)
        with pytest.raises(SessionFatalError, match=r"returned 5 where the sequence ends at 4"):
            context.decode([5, 6])
        context.close()


def test_a_plugin_s_own_exception_is_named_with_its_place(monkeypatch):
    def decode(*_, **__):
        raise KeyError("name")

    with opened(monkeypatch, decode=decode) as model, model.new_context(n_ctx=32) as context:
        with pytest.raises(SessionFatalError) as caught:
            context.decode([1])
        told = str(caught.value)
        assert "backend 'mine' raised KeyError: 'name'" in told
        assert f"({__file__}, line " in told


def test_another_signature_names_the_plugin(monkeypatch):
    changes = {"decode": lambda tokens: None}
    wrong = pytest.raises(SessionFatalError, match="backend 'mine' raised TypeError")
    with opened(monkeypatch, **changes) as model, model.new_context() as context, wrong:
        context.decode([1])


def test_a_plan_of_less_than_nothing_is_refused():
    sizes = {"weights_bytes": -1, "kv_bytes": 0, "compute_bytes": 0, "peak_bytes": 0, "n_ctx": 32}
    plan = ic.MemoryPlan(**sizes)
    refused = pytest.raises(PluginError, match="plan with weights_bytes=int -1")
    with load(made(plan_memory=lambda _: plan)) as model, refused:
        model.plan_memory(n_ctx=32)


@pytest.mark.parametrize("method", ["decode", "decode_batch"])
def test_memory_that_runs_out_in_the_midst_leaves_a_part(method):
    pack.need_pack()
    faults, tokens = Faults(), [3, 4, 5, 6, 7, 8]
    fields = {"n_ctx": 64, "n_batch": 4, "n_seq_max": 2}
    with load_reference_model(faults=faults) as model, model.new_context(**fields) as context:
        calls = {
            "decode": lambda: context.decode(tokens),
            "decode_batch": lambda: context.decode_spans([(0, tokens, "last"), (1, [9], "last")]),
        }
        for at, held in ((1, []), (2, tokens[:4])):
            faults.plan(method, MemoryError("none left"), at=at)
            with pytest.raises(OutOfMemoryError) as caught:
                calls[method]()
            assert caught.value.state_after == ("partial" if held else "unchanged")
            assert (context.tokens(), context.tokens(1)) == (held, [])


def test_a_call_that_failed_and_changed_nothing_does_not_end_the_context():
    faults = Faults()
    with load_toy_model(faults=faults) as model:
        with model.new_context(n_ctx=64, n_batch=4) as context:
            context.decode([1, 2])
            for call in ("decode", "seq_remove"):
                faults.plan(call, TransientEngineError(backend="toy", retry_after=0.1))
                with pytest.raises(TransientEngineError) as caught:
                    context.decode([3]) if call == "decode" else context.seq_remove(0, 1, -1)
                assert caught.value.state_after == "unchanged"
                assert context.tokens() == [1, 2]
            faults.plan("decode", TransientEngineError(backend="toy"), at=2)
            with pytest.raises(TransientEngineError) as caught:
                context.decode([3, 4, 5, 6, 7, 8])
            assert caught.value.state_after == "partial"
            assert context.tokens() == [1, 2, 3, 4, 5, 6]
            context.decode([7])
        with model.new_session(n_ctx=64) as session:
            session.ensure_prefix("once upon")
            cold = [c.tokens for c in session.decode(max_tokens=6, temperature=0)]
            session.ensure_prefix("once upon")
            faults.plan("decode", TransientEngineError(backend="toy"))
            with pytest.raises(TransientEngineError):
                session.prefill_suffix(" a time")
            session.prefill_suffix("")
            assert [c.tokens for c in session.decode(max_tokens=6, temperature=0)] == cold


def test_a_helper_refuses_what_is_not_honoured():
    config = ic.ContextConfig(n_ctx=64, n_batch=8, n_seq_max=1, no_perf=True)
    takes = {"n_batch": None, "n_seq_max": (1,), "flash_attn": ("auto", "off")}
    ic.refuse_unhonoured(config, takes, backend="mine")
    for fields in (
        {"n_seq_max": 2},
        {"flash_attn": "on"},
        {"kv_unified": False},
        {"type_k": "f16"},
    ):
        with pytest.raises(UnsupportedFeatureError, match=next(iter(fields))) as caught:
            ic.refuse_unhonoured(attrs.evolve(config, **fields), takes, backend="mine")
        assert caught.value.backend == "mine"
    of_the_core = ic.ModelConfig(progress=print, check_in_child=False)
    ic.refuse_unhonoured(of_the_core, (), backend="mine")
    with pytest.raises(ic.InvalidInputError, match="n_bach"):
        ic.refuse_unhonoured(config, ["n_bach"], backend="mine")


def test_perf_is_always_there():
    assert ic.Capabilities().perf
    assert ic.Capabilities(perf=False).perf


def test_a_sequence_that_a_restore_emptied_takes_tokens(reference_model):
    with reference_model.new_context(n_ctx=64) as context:
        nothing = context.save_sequence(0)
        context.decode([5, 6, 7])
        context.load_sequence(0, nothing)
        assert context.tokens() == []
        context.decode_one(7)
        assert (context.tokens(), context.n_past(), context.seq_pos_min(0)) == ([7], 1, 0)


def test_what_has_no_text_is_named_by_its_type() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise ValueError("no text")

    assert plugin_checks.shown(Silent()).startswith("Silent <Silent ")
