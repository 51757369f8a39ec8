"""Failures that engines and plugins raise untyped, and what a checked blob may still hold."""

from __future__ import annotations

import threading

import attrs
import numpy as np
import pytest

import pack
from infercore import api
from infercore.engine import blob, digest
from infercore.engine.gate import Gate
from infercore.engine.ladder import allocate
from infercore.errors import (
    BackendUnavailableError,
    DecodeAbortedError,
    InvalidInputError,
    ModelFormatError,
    ModelNotFoundError,
    OutOfMemoryError,
    OutputNotAvailableError,
    PluginError,
    SessionFatalError,
    SnapshotError,
)
from infercore.protocols.hooks import API_VERSION
from infercore.testing import Faults, load_reference_model, load_toy_model
from infercore.testing.toy import ToyContext, ToyModel
from infercore.values.config import AdapterSpec, ContextConfig
from infercore.values.info import BackendDescriptor, Capabilities

# -- opening -----------------------------------------------------------------------------------


def model_of(load, **facts):
    descriptor = BackendDescriptor(
        name="sick", api_version=API_VERSION, match=lambda _: 0.0, loader=load, **facts
    )
    return api.CoreBackend(descriptor).load_model(".")


class SickModel(ToyModel):
    error: Exception | None = None
    asked = 0

    def new_context(self, config):
        self.asked += 1
        if self.error is not None and (config.n_ubatch or 512) > 128:
            raise self.error
        return super().new_context(config)


@pytest.fixture
def sick():
    inner = SickModel()
    with model_of(lambda *_: inner) as model:
        yield inner, model


def test_memory_that_an_engine_lacks_is_typed_and_starts_the_ladder(sick):
    inner, model = sick
    inner.error = MemoryError("full")
    with pytest.raises(OutOfMemoryError, match="full") as caught:
        model.new_context(n_ctx=64)
    assert caught.value.attempts[0].error == "full"
    with model.new_context(n_ctx=64, on_oom="shrink") as context:
        assert [a.error for a in context.attempts] == ["full", "full", None]


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, KeyError, AttributeError])
def test_what_else_new_context_raises_names_the_plugin(sick, kind):
    inner, model = sick
    inner.error = kind("broken")
    with pytest.raises(PluginError, match=r"opening a context.*broken") as caught:
        model.new_context(n_ctx=64)
    assert caught.value.plugin == "sick"
    assert caught.value.__cause__ is inner.error
    inner.error = None
    model.new_context(n_ctx=64).close()


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (MemoryError("m"), OutOfMemoryError),
        (OSError("o"), ModelFormatError),
        (ValueError("v"), ModelFormatError),
        (RuntimeError("r"), ModelFormatError),
        (ImportError("i"), BackendUnavailableError),
        (AttributeError("a"), PluginError),
        (TypeError("t"), PluginError),
        (NameError("n"), PluginError),
        (KeyError("k"), PluginError),
        (IndexError("x"), PluginError),
        (AssertionError("s"), PluginError),
    ],
)
def test_what_a_loader_raises_is_typed_by_its_meaning(raised, kind):
    def load(_path, _config):
        raise raised

    with pytest.raises(kind, match="'sick' could not load") as caught:
        model_of(load)
    assert type(caught.value) is kind
    assert caught.value.__cause__ is raised


# -- the ladder --------------------------------------------------------------------------------

KINDS = Capabilities(kv_types=("f32", "f16", "q8_0", "q4_0"))


@pytest.mark.parametrize(
    ("fields", "last"),
    [
        ({"type_k": "f32", "type_v": "q8_0"}, ("f16", "q4_0")),
        ({"type_k": "q8_0"}, ("q4_0", "q8_0")),
        ({"type_k": "q4_0", "type_v": "f16"}, ("q4_0", "q8_0")),
        ({"type_k": "f32", "type_v": "f32", "flash_attn": "off"}, ("f16", "f16")),
        ({"flash_attn": "off"}, (None, None)),
        ({"type_k": "q4_0", "type_v": "q4_0"}, ("q4_0", "q4_0")),
    ],
)
def test_each_kv_type_steps_down_and_none_up(fields, last):
    asked = []

    def make(config):
        asked.append(config)
        raise MemoryError

    with pytest.raises(OutOfMemoryError):
        allocate(make, ContextConfig(n_ctx=64, n_ubatch=64, on_oom="shrink", **fields), KINDS)
    assert (asked[-1].type_k, asked[-1].type_v) == last


# -- the gate ----------------------------------------------------------------------------------


def test_a_repeated_fatal_error_has_the_first_cause():
    gate, first = Gate("context"), ValueError("first")
    gate.fail(first)
    for _ in range(2):
        with pytest.raises(SessionFatalError) as caught, gate:
            pass
        assert caught.value.__cause__ is caught.value.cause is first


# -- what users start from ---------------------------------------------------------------------


def test_a_backend_cannot_be_chosen_for_a_loaded_model():
    with load_toy_model() as model:
        with pytest.raises(InvalidInputError, match="loaded already") as caught:
            api.open_session(model, backend="toy")
        assert caught.value.field == "backend"
        with pytest.raises(InvalidInputError, match="loaded already"):
            api.embed(model, ["a"], backend="toy")


@pytest.mark.parametrize("value", [123, None, [], b"path"])
def test_what_is_neither_a_path_nor_a_model_is_refused(value):
    with pytest.raises(InvalidInputError, match="path_or_model"):
        api.open_session(value)
    with pytest.raises(InvalidInputError, match="path_or_model"):
        api.embed(value, ["a"])


def test_a_memory_plan_knows_the_options_of_a_context(sick):
    inner, model = sick
    inner.plan_memory = lambda _: pytest.fail("asked with an unknown option")
    with pytest.raises(InvalidInputError, match="unknown option 'x'"):
        model.plan_memory(backend_options={"x": 1})


# -- adapters ----------------------------------------------------------------------------------


def test_an_adapter_is_known_by_its_content_and_scale(tmp_path):
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    for path, text in ((one, "a"), (same, "a"), (other, "b")):
        path.write_text(text)

    def name(path, scale):
        return digest.adapter_identities([AdapterSpec(path=path, scale=scale)])

    assert name(one, 1) == name(same, 1.0)
    assert name(one, 1) != name(other, 1)
    assert name(one, 1) != name(one, 0.5)
    assert digest.adapter_identities(()) == []
    with pytest.raises(ModelNotFoundError):
        name(tmp_path / "gone", 1)


def test_saved_state_must_agree_in_the_adapters(toy_model, tmp_path):
    path = tmp_path / "one"
    path.write_text("a")
    adapters = (AdapterSpec(path=path),)
    assert toy_model._state_identity({})["adapters"] == []
    found = toy_model._state_identity({"adapters": adapters})["adapters"]
    assert found == digest.adapter_identities(adapters)


# -- what engine calls raise -------------------------------------------------------------------


class WideContext(ToyContext):
    """A toy with every control; it notes what is done in ``done``."""

    capabilities = attrs.evolve(
        ToyContext.capabilities, live_threads=True, lora=True, encoder=True, abort=True
    )

    def __init__(self, config):
        super().__init__(config)
        self.done = []
        self.in_step = None

    def __getattr__(self, name):
        if name in {"set_threads", "set_adapters", "warmup", "synchronize", "encode", "abort"}:
            return lambda *_: self.done.append(name)
        if name == "clear_abort":
            return lambda: self.done.append(name)
        raise AttributeError(name)

    def decode_one(self, token, *, seq_id):
        if self.in_step is not None:
            self.in_step()
            if "abort" in self.done:
                raise DecodeAbortedError("stopped", resident_tokens=0)
        self.decode(np.array([token]), seq_id=seq_id, logits="last")


class WideModel(ToyModel):
    capabilities = WideContext.capabilities

    def new_context(self, config):
        super().new_context(config)
        return WideContext(config)


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def wide(faults):
    with (
        model_of(lambda *_: faults.around(WideModel())) as model,
        model.new_context(n_ctx=32, n_batch=4) as context,
    ):
        context.decode([1, 2, 3])
        yield context


WIDE_CALLS = {
    "set_threads": lambda c: c.set_threads(2),
    "set_adapters": lambda c: c.set_adapters([]),
    "warmup": lambda c: c.warmup(),
    "synchronize": lambda c: c.synchronize(),
    "encode": lambda c: (c.clear(), c.encode([1, 2])),
    "logits": lambda c: c.logits(),
    "n_past": lambda c: c.n_past(),
}
STATE_CALLS = {
    "save_state": lambda c: c.save_state(),
    "save_sequence": lambda c: c.save_sequence(),
    "set_embeddings": lambda c: c.set_embeddings(True),
    "logits": lambda c: c.logits(),
    "warmup": lambda c: c.warmup(),
}


def check_judged(context, faults, call, name):
    faults.plan(name, MemoryError("full"))
    with pytest.raises(OutOfMemoryError):
        call(context)
    faults.plan(name, OutOfMemoryError("typed"))
    with pytest.raises(OutOfMemoryError, match="typed"):
        call(context)
    broken = RuntimeError("broken")
    faults.plan(name, broken)
    for _ in range(2):
        with pytest.raises(SessionFatalError, match="broken") as caught:
            call(context)
        assert caught.value.cause is caught.value.__cause__ is broken


@pytest.mark.parametrize("name", WIDE_CALLS)
def test_no_control_lets_an_engine_error_out_bare(wide, faults, name):
    check_judged(wide, faults, WIDE_CALLS[name], name)


@pytest.mark.parametrize("name", STATE_CALLS)
def test_no_report_lets_an_engine_error_out_bare(faults, name):
    pack.need_pack()
    with load_reference_model(faults=faults) as model, model.new_context(n_ctx=32) as context:
        context.decode([1, 2, 3])
        check_judged(context, faults, STATE_CALLS[name], name)


def test_rows_gathered_over_chunks_are_judged_too(wide, faults):
    faults.plan("logits", RuntimeError("broken"), at=2)
    with pytest.raises(SessionFatalError, match="broken"):
        wide.decode([1] * 9, logits="all")


def test_encoding_counts(wide):
    wide.clear()
    wide.reset_perf()
    wide.encode([1, 2])
    assert wide.perf().prefill_tokens == 2


class EncodingContext(WideContext):
    capabilities = attrs.evolve(WideContext.capabilities, embeddings=True)

    def set_embeddings(self, on):
        pass

    def embedding(self, seq_id):
        raise AssertionError("not pooled")

    def embeddings(self):
        return np.zeros((2, 3), np.float32)


def test_a_step_forgets_what_was_encoded_before(monkeypatch):
    monkeypatch.setattr(WideModel, "new_context", lambda _, config: EncodingContext(config))
    with model_of(lambda *_: WideModel()) as model, model.new_context(n_ctx=32) as context:
        context.encode([1, 2])
        assert context.embeddings().shape == (2, 3)
        context.decode_one(4)
        with pytest.raises(OutputNotAvailableError):
            context.embeddings()


# -- cancelling a single step ------------------------------------------------------------------


def test_a_step_asks_the_callback_that_the_engine_cannot_ask(wide):
    wide.set_abort_callback(lambda: True)
    with pytest.raises(DecodeAbortedError) as caught:
        wide.decode_one(4)
    assert caught.value.resident_tokens == wide.n_past() == 3
    with pytest.raises(OutputNotAvailableError):
        wide.logits()
    wide.set_abort_callback(None)
    wide.decode_one(4)
    assert wide.tokens() == [1, 2, 3, 4]


def test_a_callback_that_fails_is_raised_by_the_step(wide):
    def fail():
        raise KeyError("mine")

    wide.set_abort_callback(fail)
    with pytest.raises(KeyError, match="mine"):
        wide.decode_one(4)
    wide.set_abort_callback(lambda: False)
    wide.decode_one(4)


def test_another_thread_stops_a_step(wide):
    engine = wide._inner._inner

    def in_step():
        other = threading.Thread(target=wide.abort)
        other.start()
        other.join(10)

    engine.in_step = in_step
    with pytest.raises(DecodeAbortedError):
        wide.decode_one(4)
    assert engine.done == ["abort", "clear_abort"]
    engine.in_step = None
    wide.abort()  # nothing runs: it does nothing
    assert engine.done == ["abort", "clear_abort"]
    wide.decode_one(4)
    assert wide.n_past() == 4


# -- saved state -------------------------------------------------------------------------------

BAD_HEADERS = [
    {"sequences": None},
    {"sequences": {}},
    {"sequences": [5]},
    {"sequences": []},
    {"row_of": 5},
    {"row_of": ["x"]},
]
BAD_SEQUENCES = [
    {"seq_id": "0"},
    {"seq_id": -1},
    {"runs": None},
    {"runs": [5]},
    {"runs": [[0, 3, 1]]},
    {"runs": [["0", 3]]},
    {"runs": [[0, 2]]},
    {"cells": 5},
    {"cells": []},
    {"tokens": None},
    {"tokens": [1, 2, "3"]},
    {"tokens": [1, 2, 2**40]},
]


@pytest.fixture
def saved(reference_model):
    with reference_model.new_context(n_ctx=32, n_seq_max=1) as context:
        context.decode([1, 2, 3])
        yield context


def check_refused(context, kind, change, row=None):
    data = context.save_state() if kind == "state" else context.save_sequence()
    header, payload, logits = blob.unpack(data)
    bad = blob.pack(change(header), payload, logits if row is None else row)
    with pytest.raises(SnapshotError) as caught:
        context.load_state(bad) if kind == "state" else context.load_sequence(0, bad)
    assert caught.value.state_after == "unchanged"
    assert context.tokens() == [1, 2, 3]
    assert context.logits().tobytes() == logits


@pytest.mark.parametrize("kind", ["state", "sequence"])
@pytest.mark.parametrize("bad", BAD_HEADERS, ids=str)
def test_a_header_of_other_types_is_refused_before_the_engine(saved, kind, bad):
    if kind == "sequence" or bad != {"sequences": []}:  # an empty state is one
        check_refused(saved, kind, lambda header: {**header, **bad})


@pytest.mark.parametrize("kind", ["state", "sequence"])
@pytest.mark.parametrize("bad", BAD_SEQUENCES, ids=str)
def test_a_sequence_of_other_types_is_refused_before_the_engine(saved, kind, bad):
    def change(header):
        return {**header, "sequences": [{**header["sequences"][0], **bad}]}

    check_refused(saved, kind, change)


@pytest.mark.parametrize("kind", ["state", "sequence"])
@pytest.mark.parametrize("row", [b"abc", bytes(8)])
def test_a_row_of_another_length_is_refused_before_the_engine(saved, kind, row):
    check_refused(saved, kind, lambda header: header, row)
