"""Configs refuse what cannot be meant, naming field, value and what is allowed."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest

import infercore as ic

REFUSED = [
    (ic.SamplingConfig, "temperature", -0.1),
    (ic.SamplingConfig, "temperature", float("nan")),
    (ic.SamplingConfig, "temperature", True),
    (ic.SamplingConfig, "top_p", 2),
    (ic.SamplingConfig, "top_k", -1),
    (ic.SamplingConfig, "min_p", 1.5),
    (ic.SamplingConfig, "mirostat", 3),
    (ic.SamplingConfig, "seed", 2**32 - 1),
    (ic.SamplingConfig, "seed", -1),
    (ic.SamplingConfig, "implementation", "fast"),
    (ic.SamplingConfig, "logit_bias", {-1: 1.0}),
    (ic.ContextConfig, "n_ctx", -1),
    (ic.ContextConfig, "n_ctx", 2.5),
    (ic.ContextConfig, "n_ctx", "1024"),
    (ic.ContextConfig, "n_batch", 0),
    (ic.ContextConfig, "n_threads", 0),
    (ic.ContextConfig, "n_threads", 100_000),
    (ic.ContextConfig, "n_seq_max", 0),
    (ic.ContextConfig, "n_seq_max", 257),
    (ic.ContextConfig, "type_k", "q3_k"),
    (ic.ContextConfig, "type_v", 16),
    (ic.ContextConfig, "flash_attn", True),
    (ic.ContextConfig, "pooling_type", "median"),
    (ic.ContextConfig, "defrag_thold", 0.1),
    (ic.ContextConfig, "embeddings", 1),
    (ic.ContextConfig, "on_oom", "pray"),
    (ic.ModelConfig, "n_gpu_layers", -2),
    (ic.ModelConfig, "tensor_split", [-1.0]),
    (ic.ModelConfig, "split_mode", "column"),
    (ic.DecodeConfig, "max_tokens", 0),
    (ic.DecodeConfig, "stop", ""),
    (ic.DecodeConfig, "stop", "\ud800"),
    (ic.DecodeConfig, "stop_tokens", [-1]),
    (ic.DecodeConfig, "processors", [object()]),
]


@pytest.mark.parametrize(("cls", "field", "value"), REFUSED)
def test_a_bad_value_is_refused_with_its_field(cls: Any, field: str, value: object) -> None:
    with pytest.raises(ic.InvalidInputError) as caught:
        cls(**{field: value})
    assert caught.value.field == field
    assert caught.value.allowed is not None or field == "defrag_thold"
    assert isinstance(caught.value, ValueError)


def test_quantised_v_without_flash_attention_is_refused() -> None:
    with pytest.raises(ic.InvalidInputError, match="flash attention"):
        ic.ContextConfig(type_v="q8_0", flash_attn="off")
    assert ic.ContextConfig(type_v="q8_0").type_v == "q8_0"


def test_values_are_frozen_and_keyword_only() -> None:
    config = ic.ContextConfig(n_ctx=5)
    with pytest.raises(AttributeError):
        config.n_ctx = 6  # type: ignore[misc]
    with pytest.raises(TypeError):
        ic.ContextConfig(5)  # type: ignore[misc]


def test_documented_sampling_defaults() -> None:
    config = ic.SamplingConfig()
    assert (config.temperature, config.top_k, config.top_p, config.min_p) == (0.8, 40, 0.95, 0.05)
    assert (config.repeat_penalty, config.penalty_last_n, config.seed) == (1.0, 64, None)


def test_a_kv_type_of_a_plugin_is_named_on_purpose() -> None:
    own = ic.KVType("fp8_e4m3")
    assert ic.ContextConfig(type_k=own).type_k == "fp8_e4m3"
    assert ic.ContextConfig(type_k=ic.KVType("f16")) == ic.ContextConfig(type_k="f16")
    assert pickle.loads(pickle.dumps(own)) == own  # noqa: S301
    with pytest.raises(ic.InvalidInputError, match="KVType"):
        ic.ContextConfig(type_k="fp8_e4m3")
    with pytest.raises(ic.InvalidInputError):
        ic.KVType("")


def test_numbers_of_numpy_are_compared_as_numbers():
    numpy = pytest.importorskip("numpy")
    config = ic.ContextConfig(n_threads=numpy.int64(2), rope_freq_scale=numpy.float32(0.5))
    ic.refuse_unhonoured(config, {"n_threads": None, "rope_freq_scale": None}, backend="mine")
    with pytest.raises(ic.UnsupportedFeatureError, match="n_threads"):
        ic.refuse_unhonoured(config, {"rope_freq_scale": None}, backend="mine")


def test_a_number_of_any_kind_is_held_as_an_int_or_a_float():
    numpy = pytest.importorskip("numpy")
    number, half = numpy.int64(20), numpy.float32(0.5)
    context = ic.ContextConfig(n_ctx=number, rope_freq_base=number, rope_freq_scale=half)
    pool = ic.PoolConfig(n_cells=number, reader_timeout=1, context=context)
    sampling = ic.SamplingConfig(temperature=1, top_k=number, logit_bias={number: 1})
    held = [
        *(context.n_ctx, context.rope_freq_base, context.rope_freq_scale),
        *(pool.n_cells, pool.reader_timeout, ic.AdapterSpec(path="a", scale=2).scale),
        *(sampling.temperature, sampling.top_k),
        *(*sampling.logit_bias, *sampling.logit_bias.values()),
    ]
    kinds = [int, float, float, int, float, float, float, int, int, float]
    assert [type(value) for value in held] == kinds


@pytest.mark.parametrize(
    "value",
    [
        ic.ModelConfig(backend_options={"a": [1]}),
        ic.ContextConfig(backend_options={"a": [1]}),
        ic.SamplingConfig(logit_bias={3: -1.5}),
        ic.DecodeConfig(),
        ic.PoolConfig(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_config_can_be_copied_and_pickled(value: Any) -> None:
    twins = (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value)))  # noqa: S301
    assert twins == (value,) * 3


def test_the_arguments_of_a_call_cannot_be_changed() -> None:
    given: Any = {"city": "Rome"}
    call = ic.ToolCall(id="1", name="weather", arguments=given)
    given["city"] = "Oslo"
    assert call.arguments == {"city": "Rome"}
    assert hash(call) == hash(ic.ToolCall(id="1", name="weather", arguments='{"city": "Rome"}'))
    arguments: Any = call.arguments
    with pytest.raises(TypeError):
        arguments["city"] = "Oslo"
    assert pickle.loads(pickle.dumps(call)) == call  # noqa: S301


def test_a_bias_below_all_that_float32_holds_forbids() -> None:
    assert ic.SamplingConfig(logit_bias={3: -1e39, 4: -3e38}).logit_bias == {3: -math.inf, 4: -3e38}


def test_equal_configs_have_one_hash_and_a_mapping_refuses_changes() -> None:
    one, two = (ic.SamplingConfig(logit_bias={3: bias}) for bias in (1, 1.0))
    assert {one: "found"}[two] == "found"
    assert hash(ic.ContextConfig(backend_options={"names": ["a"], "of": {"b": 1}}))
    bias: Any = two.logit_bias
    for change in (
        lambda: bias.update({5: 1.0}),
        lambda: bias.pop(3),
        lambda: bias.__setitem__(3, 2.0),
        bias.clear,
    ):
        with pytest.raises(TypeError, match="cannot be changed"):
            change()
    assert bias == {3: 1.0}


@pytest.mark.parametrize(
    ("config", "honoured", "backend"),
    [
        (5, (), "mine"),
        (None, (), "mine"),
        (ic.ContextConfig(), None, "mine"),
        (ic.ContextConfig(), [{}], "mine"),
        (ic.ContextConfig(), {"n_batch": 5}, "mine"),
        (ic.ContextConfig(), (), 5),
    ],
)
def test_wrong_types_are_refused(config, honoured, backend):
    with pytest.raises(ic.InvalidInputError):
        ic.refuse_unhonoured(config, honoured, backend=backend)
