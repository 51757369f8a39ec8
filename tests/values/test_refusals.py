"""What no field can be is refused with the field's name, never with a bare error."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from typing import Any

import attrs
import pytest

import infercore as ic
from infercore.testing import load_toy_model
from infercore.values import checks

HUGE = 10**400


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError("no text at all")


DEEP: list[Any] = []
for _ in range(5000):
    DEEP = [DEEP]
NOT_SHOWN = {"digits": 10**5000, "below 0": -(10**5000), "key": {10**5000: 1}, "deep": DEEP,
             "own": Unshown(), "in a list": [10**5000]}  # fmt: skip


@pytest.mark.parametrize("name", NOT_SHOWN)
def test_what_has_no_text_is_a_typed_error_too(name: str) -> None:
    """Python itself raises for the text of an integer of 5,000 digits."""
    value = NOT_SHOWN[name]
    classes = [getattr(ic, each) for each in ic.__all__]
    for cls in filter(attrs.has, filter(inspect.isclass, classes)):
        if issubclass(cls, BaseException):
            continue
        for field in attrs.fields(cls):
            with contextlib.suppress(ic.InferCoreError, TypeError):  # others are missing
                cls(**{field.name: value})
    with pytest.raises(ic.InferCoreError):
        ic.get_backend(value)
    model = load_toy_model()
    with model, model.new_context(n_ctx=64) as context, model.new_session(n_ctx=64) as session:
        session.ensure_prefix("ab")
        context.decode([5, 6, 7])
        calls = (
            lambda: context.logits(value), lambda: context.eval([5], value),
            lambda: context.decode([value]), lambda: context.seq_shift(0, 0, -1, value),
            lambda: context.seq_remove(value), lambda: session.evict(value, 3),
            lambda: session.evict(0, value), lambda: session.generate("a", logit_bias={5: value}),
            lambda: list(session.decode(max_tokens=1, logit_bias=value)),
            lambda: session.generate("a", response_format={"maximum": value}),
            lambda: session.generate("a", response_format={"type": value}),
        )  # fmt: skip
        for call in calls:
            with pytest.raises(ic.InferCoreError) as caught:
                call()
            assert not isinstance(caught.value, ic.SessionFatalError)
            assert len(str(caught.value)) < 2000
        assert context.decode([8]) is None


@pytest.mark.parametrize(
    ("cls", "field", "value"),
    [
        (ic.DecodeConfig, "stop", 5),
        (ic.DecodeConfig, "stop", 0),
        (ic.DecodeConfig, "stop", b"x"),
        (ic.DecodeConfig, "stop_tokens", 5),
        (ic.DecodeConfig, "stop_tokens", "5"),
        (ic.DecodeConfig, "processors", 5),
        (ic.ModelConfig, "tensor_split", 5),
        (ic.ModelConfig, "tensor_split", [HUGE]),
        (ic.ModelConfig, "tensor_split", [float("inf")]),
        (ic.SamplingConfig, "logit_bias", 5),
        (ic.SamplingConfig, "logit_bias", []),
        (ic.SamplingConfig, "logit_bias", [(1, 2.0)]),
        (ic.SamplingConfig, "logit_bias", {1: HUGE}),
        (ic.SamplingConfig, "logit_bias", {1: float("nan")}),
        (ic.SamplingConfig, "logit_bias", {1: "x"}),
        (ic.SamplingConfig, "dry_sequence_breakers", None),
        (ic.SamplingConfig, "dry_sequence_breakers", 5),
        (ic.SamplingConfig, "temperature", HUGE),
        (ic.SamplingConfig, "presence_penalty", -HUGE),
        (ic.AdapterSpec, "path", None),
        (ic.AdapterSpec, "path", 5),
        (ic.AdapterSpec, "path", b"x"),
        (ic.AdapterSpec, "path", ""),
        (ic.ContextConfig, "adapters", 5),
        (ic.ContextManifest, "add_bos", "x"),
        (ic.ContextManifest, "add_bos", 1),
        (ic.ContextManifest, "profile_id", 5),
        (ic.ContextManifest, "backend", 5),
        (ic.ContextManifest, "model_digest", b"x"),
        (ic.ContextManifest, "volatile_token_hash", 5),
        (ic.ContextManifest, "adapters", "one"),
        (ic.ContextManifest, "adapters", [5]),
        (ic.ContextManifest, "segments", 5),
        (ic.ContextManifest, "segments", [5]),
        (ic.ContextManifest, "segments", [{"nam": "x"}]),
    ],
)
def test_the_refusal_names_the_field(cls, field, value):
    with pytest.raises(ic.InvalidInputError) as caught:
        cls(**{field: value})
    assert caught.value.field == field


SEGMENT = {
    "name": "a",
    "kind": "stable",
    "byte_start": 0,
    "byte_end": 1,
    "token_start": 0,
    "token_end": 1,
}


@pytest.mark.parametrize("calls", ["x", [5], [None], {"name": "f"}])
def test_the_calls_of_a_message_are_checked(calls):
    with pytest.raises(ic.InvalidInputError) as caught:
        ic.Message(role="assistant", content=None, tool_calls=calls)
    assert caught.value.field == "tool_calls"


@pytest.mark.parametrize(
    ("field", "value"), [("name", 5), ("byte_start", -1), ("token_end", "1"), ("byte_hash", 5)]
)
def test_a_segment_is_checked(field, value):
    assert ic.ContextManifest(segments=[SEGMENT]).segments == (ic.ManifestSegment(**SEGMENT),)
    with pytest.raises(ic.InvalidInputError) as caught:
        ic.ContextManifest(segments=[{**SEGMENT, field: value}])
    assert caught.value.field == field


def test_none_means_none_of_them():
    assert ic.ContextConfig(adapters=None).adapters == ()
    config = ic.DecodeConfig(stop=None, stop_tokens=None, processors=None)
    assert (config.stop, config.stop_tokens, config.processors) == ((), (), ())
    assert dict(ic.SamplingConfig(logit_bias=None).logit_bias) == {}


def test_what_was_allowed_stays_allowed():
    assert ic.AdapterSpec(path=Path("a")).path == "a"
    assert ic.SamplingConfig(logit_bias={1: float("-inf")}).logit_bias[1] == float("-inf")
    assert ic.DecodeConfig(stop="x").stop == ("x",)
    assert ic.ModelConfig(tensor_split=(1, 0.5)).tensor_split == (1.0, 0.5)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("vllm", "known are: llamacpp, openvino"),
        ("onnx", "known are: llamacpp, openvino"),
        ("llama.cpp", "did you mean 'llamacpp'?"),
        ("ollama", "did you mean 'llamacpp'?"),
        ("open", "did you mean 'openvino'?"),
        ("o", "known are: llamacpp, openvino"),
    ],
)
def test_a_name_is_guessed_where_one_is_close_or_begins_so(name, hint):
    assert checks.nearest(name, ["openvino", "llamacpp"]) == hint


@pytest.mark.parametrize(
    ("key", "hint"), [("num_s", "num_streams"), ("inf", "inference_precision")]
)
def test_an_option_is_guessed_by_its_beginning(key, hint):
    with pytest.raises(ic.InvalidInputError, match=f"did you mean '{hint}'"):
        checks.check_options("backend_options", {key: 1}, ["inference_precision", "num_streams"])
