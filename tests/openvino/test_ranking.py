"""Encoders with a head that classifies give scores: of texts llama.cpp's, of pairs the graph's."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
import openvino as ov
import pack

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXTS = ["the stone bridge", "a baker and a fox went home", "an owl"]


@pytest.fixture(scope="module")
def writer() -> Any:
    """Return the module that writes models with a head, for the page of rows too."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
    try:
        from rows import ranker
    finally:
        del sys.path[0]
    return ranker


@pytest.fixture(scope="module")
def gguf_path(writer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    pack.need_backend("llamacpp")
    import infercore_models

    encoder = infercore_models.path("encoder", "gguf-f32")
    return writer.write(encoder, tmp_path_factory.mktemp("gguf") / "ranker.gguf")


@pytest.fixture(scope="module")
def folder(writer: Any, gguf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the pack's encoder with the head of the GGUF file."""
    import infercore_models

    source = infercore_models.path("encoder", "openvino")
    return writer.write_ir(source, gguf_path, tmp_path_factory.mktemp("ir") / "ranker")


@pytest.fixture(scope="module")
def ranker(folder: Path) -> Iterator[Any]:
    with ic.load_model(folder, backend="openvino") as model:
        yield model


def test_scores_of_texts_are_llama_cpp_s(ranker: Any, gguf_path: Path) -> None:
    assert ranker.capabilities.pooling == ("rank",)
    found = ic.embed(ranker, TEXTS, precision="accurate")
    with ic.load_model(gguf_path) as model:
        expected = ic.embed(model, TEXTS)
    assert found.shape == expected.shape == (3, 1)
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert np.ptp(found) > 0.05


def test_pairs_are_ranked_as_the_graph_ranks_them(ranker: Any, folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    compiled = ov.Core().compile_model(
        folder / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    expected = []
    for text in TEXTS:
        pair = tokenizer.encode("the stone bridge", text)
        given = {
            "input_ids": [pair.ids],
            "attention_mask": [pair.attention_mask],
            "token_type_ids": [pair.type_ids],
        }
        assert max(pair.type_ids) == 1
        known = {name for port in compiled.inputs for name in port.get_names()}
        arrays = {n: np.array(v, dtype=np.int64) for n, v in given.items() if n in known}
        expected.append(float(compiled(arrays)["logits"][0, 0]))
    found = ic.rerank(ranker, "the stone bridge", TEXTS, precision="accurate")
    assert [place for place, _ in found] == np.argsort(expected)[::-1].tolist()
    for place, score in found:
        assert score == pytest.approx(expected[place], abs=2e-3)
    first = ic.rerank(ranker, "the stone bridge", TEXTS, top_n=1, precision="accurate")
    assert first == found[:1]


def test_a_width_that_is_no_number_is_the_graph_s(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "ranker")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "hidden_size": [1]}))
    with ic.load_model(copy, backend="openvino", check_in_child=False) as model:
        assert model.info.n_embd == config["hidden_size"]


def test_an_export_without_its_head_makes_vectors(folder: Path, tmp_path: Path) -> None:
    """Its config still names the classifier that it was trained as."""
    import infercore_models

    source = infercore_models.path("encoder", "openvino")
    copy = shutil.copytree(source, tmp_path / "encoder")
    shutil.copy(folder / "config.json", copy)
    with ic.load_model(copy, backend="openvino") as model:
        assert "rank" not in model.capabilities.pooling
        assert ic.embed(model, TEXTS).shape == (3, model.info.n_embd)


def test_what_else_a_ranker_is_asked_is_refused(ranker: Any) -> None:
    for pooling in ("mean", "none"):
        with pytest.raises(ic.UnsupportedFeatureError, match="give one of 'rank'"):
            ranker.new_context(n_ctx=64, pooling_type=pooling)
    with ranker.new_context(n_ctx=64) as context:
        context.encode([2, 5, 3])
        assert context.embedding().shape == (1,)
        with pytest.raises((ic.InvalidInputError, ic.UnsupportedFeatureError)):
            context.embeddings()
