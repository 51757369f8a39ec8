"""What of a model's metadata recommends a sampling."""

from __future__ import annotations

import pytest

import infercore as ic
from infercore.values.recommended import recommended_sampling


def test_both_ways_of_saying_it() -> None:
    gguf = {"general.sampling.temp": "0.600000", "general.sampling.penalty_last_n": "32"}
    assert recommended_sampling(gguf) == {"temperature": 0.6, "penalty_last_n": 32}
    stated = {"generation_config.repetition_penalty": "1.1", "generation_config.top_k": "20"}
    assert recommended_sampling(stated) == {
        "repeat_penalty": 1.1,
        "top_k": 20,
        "penalty_last_n": -1,
    }


def test_a_model_that_does_not_sample_takes_the_likeliest() -> None:
    stated = {"generation_config.do_sample": "False", "generation_config.temperature": "0.7"}
    assert recommended_sampling(stated) == {"temperature": 0.0}
    stated["generation_config.do_sample"] = "true"
    assert recommended_sampling(stated) == {"temperature": 0.7}


def test_other_keys_say_nothing() -> None:
    assert recommended_sampling({"general.name": "a", "temperature": "3"}) == {}
    assert recommended_sampling({"general.sampling.sequence": "temp;top_k"}) == {}


@pytest.mark.parametrize("value", ["nan", "-1", "much", "1e999", "", "inf"])
def test_a_value_that_cannot_be_is_left_out(value: str) -> None:
    assert recommended_sampling({"general.sampling.temp": value}) == {}


def test_a_plugin_that_recommends_nonsense_is_refused() -> None:
    for sampling in ({"temprature": 1}, {"top_p": 3}):
        with pytest.raises(ic.InvalidInputError):
            ic.ModelInfo(
                architecture="a",
                n_vocab=1,
                n_ctx_train=1,
                n_embd=0,
                n_layer=0,
                n_head=0,
                n_head_kv=0,
                n_params=0,
                size_bytes=0,
                sampling=sampling,
            )
