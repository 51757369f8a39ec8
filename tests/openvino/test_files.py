"""Broken models are refused by name, with the cause."""

from __future__ import annotations

import json
import os
import re

import pytest

import infercore as ic
from infercore_openvino import plugin
from infercore_openvino.files import find

XML, BIN = "openvino_model.xml", "openvino_model.bin"


def load(path):
    return plugin.load(str(path), ic.ModelConfig())


def refused(path, *words: str) -> None:
    with pytest.raises(ic.ModelFormatError) as caught:
        load(path)
    assert caught.value.path == str(path)
    for word in words:
        assert word in str(caught.value)


def test_nothing_there(tmp_path) -> None:
    with pytest.raises(ic.ModelNotFoundError):
        load(tmp_path / "none")


def test_a_folder_without_a_graph(tmp_path) -> None:
    refused(tmp_path, XML)


def test_a_graph_without_weights(copied) -> None:
    (copied / BIN).unlink()
    refused(copied, BIN, "missing")


@pytest.mark.parametrize("n_bytes", [0, 1000, 1_000_000])
def test_truncated_weights(copied, n_bytes) -> None:
    weights = (copied / BIN).read_bytes()
    (copied / BIN).write_bytes(weights[:n_bytes])
    refused(copied, BIN, "truncated", str(n_bytes))


@pytest.mark.parametrize("n_bytes", [0, 30, 100_000])
def test_a_truncated_graph(copied, n_bytes) -> None:
    graph = (copied / XML).read_bytes()
    (copied / XML).write_bytes(graph[:n_bytes])
    refused(copied, XML)


def test_a_graph_that_is_something_else(copied) -> None:
    (copied / XML).write_text("<html></html>")
    refused(copied, XML, "not an OpenVINO graph")


def test_a_graph_that_the_engine_cannot_read(copied) -> None:
    graph = (copied / XML).read_text().replace('type="MatMul"', 'type="MatMull"', 1)
    (copied / XML).write_text(graph)
    refused(copied, XML, "cannot be read")


def test_a_model_that_is_no_causal_one(copied) -> None:
    import openvino as ov
    from openvino import opset13 as op

    pixels = op.parameter([-1, -1], name="pixels")
    ov.save_model(ov.Model([op.relu(pixels)], [pixels], "picture"), copied / XML)
    refused(copied, "neither a causal language model", "text-generation-with-past")


def test_without_a_tokenizer(copied) -> None:
    (copied / "tokenizer.json").unlink()
    refused(copied, "tokenizer.json", "missing")


@pytest.mark.parametrize("text", ["", "{", '{"version": "1.0"}', "[]"])
def test_a_broken_tokenizer(copied, text) -> None:
    (copied / "tokenizer.json").write_text(text)
    refused(copied, "tokenizer.json")


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_broken_config(copied, name, text) -> None:
    (copied / name).write_text(text)
    refused(copied, name)


def test_without_configs_it_still_works(copied, story) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (copied / name).unlink()
    model = load(copied)
    assert (model.info.architecture, model.info.n_ctx_train) == ("unknown", 0)
    assert model.info.n_vocab == 1024
    model.close()


def test_a_config_that_lacks_and_a_file_of_another_kind(copied) -> None:
    config = json.loads((copied / "config.json").read_text())
    del config["max_position_embeddings"]
    (copied / "config.json").write_text(json.dumps(config))
    assert load(copied).info.n_ctx_train == 0
    refused(copied / "config.json", XML)


def test_a_window_that_the_graph_does_not_have_takes_nothing_away(copied) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "sliding_window": 64}))
    model = load(copied)
    assert model.info.sliding_window == 64
    found = model.capabilities
    assert (found.kv_remove, found.kv_copy, found.kv_shift) == ("any", "any", True)


def facts(model) -> tuple[object, ...]:
    info, plan = model.info, model.plan_memory(ic.ContextConfig(n_ctx=512))
    return info.n_ctx_train, info.n_layer, info.n_head, info.n_head_kv, dict(plan.kv_bytes_by_kind)


@pytest.mark.parametrize(
    "names",
    [
        ("n_positions", "n_head", None),  # GPT-2
        ("max_seq_len", "n_heads", None),  # MPT
        ("seq_length", "n_head", None),  # BLOOM
        ("max_position_embeddings", "attention_heads", None),  # XGLM
    ],
)
def test_facts_that_other_configs_name_otherwise(copied, names) -> None:
    expected = facts(load(copied))
    config = json.loads((copied / "config.json").read_text())
    for old, new in zip(
        ("max_position_embeddings", "num_attention_heads", "num_key_value_heads"),
        names,
        strict=True,
    ):
        value = config.pop(old)
        if new is not None:
            config[new] = value
    config.pop("head_dim", None)
    (copied / "config.json").write_text(json.dumps(config))
    assert facts(load(copied)) == expected


def test_keys_and_values_are_known_by_the_names_of_hybrid_exports(copied) -> None:
    expected = facts(load(copied))
    graph = (copied / XML).read_text()
    named = re.sub(
        r"past_key_values\.(\d)\.(key|value)present\.\d\.(key|value)",
        r"cache_params.past.\2.\1cache_params.present.\2.\1",
        graph,
    )
    assert named != graph
    (copied / XML).write_text(named)
    model = load(copied)
    assert facts(model) == expected
    assert not model.info.is_recurrent


def test_an_input_may_have_two_names(copied) -> None:
    graph = (copied / XML).read_text()
    named = graph.replace('names="attention_mask"', 'names="attention_mask,mask"')
    assert named != graph
    (copied / XML).write_text(named)
    assert load(copied).capabilities.multi_sequence


def test_states_whose_sizes_are_not_stated(copied) -> None:
    graph = (copied / XML).read_text()
    (copied / XML).write_text(re.sub(r'variable_shape="[^"]*"', 'variable_shape="?,?,?,?"', graph))
    assert (
        load(copied).info.n_head_kv
        == json.loads((copied / "config.json").read_text())["num_key_value_heads"]
    )


def test_the_graph_file_names_the_model_too(ov_path) -> None:
    assert find(str(ov_path / XML)) == find(str(ov_path))


@pytest.mark.parametrize(
    ("removed", "score"), [((), 100), ((BIN,), 20), ((XML,), 0), ((XML, BIN), 0)]
)
def test_scores(copied, removed, score) -> None:
    for name in removed:
        (copied / name).unlink()
    assert plugin.match(str(copied)) == score
    assert plugin.match(str(copied / XML)) == score


@pytest.mark.parametrize("path", ["", "none", "model.gguf", "model.xml"])
def test_what_is_not_there_scores_nothing(path) -> None:
    assert plugin.match(path) == 0


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_what_never_ends_is_refused_at_once(copied, name: str, kind: str) -> None:
    path = copied / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    refused(copied, name, "not a regular file")
