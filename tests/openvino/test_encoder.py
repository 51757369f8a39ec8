"""An encoder: its outputs, what it refuses, and the text of its tokens."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
import pack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

XML = "openvino_model.xml"


@pytest.fixture(scope="module")
def path() -> Path:
    pack.need_backend("openvino")
    pack.need_pack()
    import infercore_models

    return infercore_models.path("encoder", "openvino")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Any]:
    with ic.load_model(path, backend="openvino") as loaded:
        yield loaded


@pytest.fixture
def copied(path: Path, tmp_path: Path) -> Path:
    return shutil.copytree(path, tmp_path / "encoder")


@pytest.fixture(scope="module")
def texts() -> Any:
    pack.need_pack()
    import infercore_models

    return infercore_models.golden_texts("encoder")


def rewrite(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_what_it_is(model) -> None:
    info = model.info
    assert (info.has_encoder, info.n_vocab, info.n_embd, info.n_layer) == (True, 1024, 64, 3)
    assert (info.n_ctx_train, info.n_params) == (256, 207360)
    found = model.capabilities
    assert (found.encoder, found.embeddings, found.multi_sequence) == (True, True, True)
    assert (found.state, found.logits_all, found.kv_remove) == (False, False, "none")
    with model.new_context() as context:
        assert context.capabilities == found
        effective = context.effective
        assert effective["attention_type"] == "non-causal"
        assert (effective["pooling_type"], effective["embeddings"]) == ("mean", True)
        assert context.n_ctx == context.n_batch == context.n_ubatch == 256


@pytest.mark.parametrize("call", ["encode", "decode_batch"])
def test_rows_are_those_of_transformers(model, texts, call) -> None:
    with model.new_context(pooling_type="none", precision="accurate") as context:
        for text in texts:
            if call == "encode":
                context.encode(text.tokens)
            else:
                context.decode_batch([(token, (0,), False) for token in text.tokens])
            np.testing.assert_allclose(context.embeddings(), text.rows, atol=1e-4)
            assert context.n_past() == 0
            context.clear()


def test_entries_of_a_batch_may_be_mixed(model, texts) -> None:
    first, second = texts[0], texts[1]
    long = max(len(first.tokens), len(second.tokens))
    entries = [
        (text.tokens[i], (seq_id,))
        for i in range(long)
        for seq_id, text in enumerate((first, second))
        if i < len(text.tokens)
    ]
    fields = {"n_seq_max": 2, "precision": "accurate"}
    with model.new_context(pooling_type="none", **fields) as context:
        context.decode_batch([(token, ids, False) for token, ids in entries])
        rows = context.embeddings()
    for seq_id, text in enumerate((first, second)):
        mine = [i for i, (_, ids) in enumerate(entries) if ids == (seq_id,)]
        np.testing.assert_allclose(rows[mine], text.rows, atol=1e-4)


def test_a_text_in_several_sequences_and_an_empty_call(model, texts) -> None:
    tokens = texts[0].tokens
    fields = {"n_seq_max": 3, "precision": "accurate"}
    with model.new_context(pooling_type="mean", **fields) as context:
        context.encode([])
        context.decode_batch([(token, (0, 2), False) for token in tokens])
        np.testing.assert_array_equal(context.embedding(0), context.embedding(2))
        np.testing.assert_allclose(context.embedding(0), texts[0].rows.mean(0), atol=1e-4)
        with pytest.raises(ic.OutputNotAvailableError):
            context.embedding(1)


def test_there_are_no_logits_and_nothing_resident(model, texts) -> None:
    with model.new_context() as context:
        context.warmup()
        with pytest.raises(ic.UnsupportedFeatureError, match="use encode"):
            context.decode(texts[0].tokens)
        context.encode(texts[0].tokens)
        with pytest.raises(ic.OutputNotAvailableError):
            context.logits()
        assert context.n_resident() == 0
        with pytest.raises(ic.UnsupportedFeatureError):
            context.set_embeddings(False)
        context.set_embeddings(True)
        assert context.perf().prefill_tokens == len(texts[0].tokens)
        context.clear()
        assert (context.n_past(), context.n_resident()) == (0, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("embeddings", False),
        ("attention_type", "causal"),
        ("pooling_type", "rank"),
        ("type_k", "f16"),
        ("backend_options", {"form": "paged"}),
    ],
)
def test_what_it_refuses(model, name, value) -> None:
    with pytest.raises(ic.UnsupportedFeatureError) as caught:
        model.new_context(**{name: value})
    assert caught.value.feature == ("form" if name == "backend_options" else name)


def test_a_window_beyond_its_positions_is_refused(model) -> None:
    with pytest.raises(ic.InvalidInputError, match="256") as caught:
        model.new_context(n_ctx=257)
    assert caught.value.field == "n_ctx"


def test_a_callback_stops_it(model, texts) -> None:
    with model.new_context() as context:
        context.set_abort_callback(lambda: True)
        with pytest.raises(ic.DecodeAbortedError):
            context.encode(texts[0].tokens)
        context.set_abort_callback(None)
        context.encode(texts[0].tokens)


def test_no_memory_in_a_step(model, texts) -> None:
    class Failing:
        def infer(self, *args, **kwargs):
            raise RuntimeError("Failed to allocate 9 bytes")

    with model.new_context() as context:
        request, context._inner._request = context._inner._request, Failing()
        with pytest.raises(ic.OutOfMemoryError, match="a compute step"):
            context.encode(texts[0].tokens)
        context._inner._request = request
        context.encode(texts[0].tokens)


@pytest.mark.parametrize(
    ("description", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_cls_token": True}, "none"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": True}, "none"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_the_files_say_how_it_pools(copied, description, pooling) -> None:
    rewrite(copied / "1_Pooling" / "config.json", **description)
    with ic.load_model(copied, backend="openvino") as model, model.new_context() as context:
        assert context.pooling_type == pooling


def test_without_a_description_it_does_not_pool(copied) -> None:
    shutil.rmtree(copied / "1_Pooling")
    rewrite(copied / "tokenizer_config.json", model_max_length=200)
    with ic.load_model(copied, backend="openvino") as model, model.new_context() as context:
        assert (context.pooling_type, model.info.n_ctx_train) == ("none", 200)


@pytest.mark.parametrize(
    ("kind", "padding", "n_lost"), [("roberta", 1, 2), ("xlm-roberta", 0, 1), ("bert", 1, 0)]
)
def test_positions_may_begin_behind_the_padding(copied, kind, padding, n_lost) -> None:
    rewrite(copied / "tokenizer_config.json", model_max_length=10**9)
    with ic.load_model(copied, backend="openvino") as model:
        n = model.info.n_ctx_train
    rewrite(copied / "config.json", model_type=kind, pad_token_id=padding)
    with ic.load_model(copied, backend="openvino") as model:
        assert model.info.n_ctx_train == n - n_lost


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("last_hidden_state", "pooler_output", "feature-extraction"),
        ("attention_mask", "pixels", "feature-extraction"),
    ],
)
def test_a_graph_of_another_kind(copied, old, new, told) -> None:
    (copied / XML).write_text((copied / XML).read_text().replace(old, new))
    with pytest.raises(ic.ModelFormatError, match=told):
        ic.load_model(copied, backend="openvino")


def test_a_graph_of_one_length(copied) -> None:
    import openvino as ov

    graph = ov.Core().read_model(copied / XML)
    graph.reshape({port.get_any_name(): [1, 16] for port in graph.inputs})
    (copied / "fixed").mkdir()
    ov.save_model(graph, copied / "fixed" / XML, compress_to_fp16=False)
    with pytest.raises(ic.ModelFormatError, match="dynamic shapes"):
        ic.load_model(copied / "fixed", backend="openvino")


def test_the_text_of_tokens(model) -> None:
    tokenizer = model.tokenizer
    ids = tokenizer.encode("The old mill, running.")
    assert (ids[0], ids[-1]) == (tokenizer.bos, tokenizer.eos) == (2, 3)
    assert tokenizer.decode(ids, skip_special=True) == "the old mill , running ."
    assert tokenizer.token_bytes(ids[0]) == b"[CLS]"


def test_memory_is_planned_without_a_cache(model, path) -> None:
    plan = model.plan_memory()
    assert (plan.kv_bytes, plan.n_ctx) == (0, 256)
    assert plan.weights_bytes == (path / "openvino_model.bin").stat().st_size
    assert plan.compute_bytes > 0
