"""The reference's encoder, against hidden states that transformers computed."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import pack
from infercore.errors import InvalidInputError, ModelFormatError, UnsupportedFeatureError
from infercore.testing import load_reference_model


@pytest.fixture(scope="module")
def path():
    pack.need_pack()
    import infercore_models

    return infercore_models.path("encoder", "hf")


@pytest.fixture(scope="module")
def encoder(path):
    with load_reference_model(path) as model:
        yield model


@pytest.fixture(params=range(7))
def golden(request, path):
    import infercore_models

    return infercore_models.golden_texts("encoder")[request.param]


def test_hidden_states(encoder, golden):
    assert encoder.tokenizer.encode(golden.text) == list(golden.tokens)
    with encoder.new_context(pooling_type="none") as context:
        context.encode(golden.tokens)
        assert np.abs(context.embeddings() - golden.rows).max() < 1e-5


def test_its_own_pooling_is_the_mean(encoder, golden):
    with encoder.new_context() as context:
        assert context.pooling_type == "mean"
        context.encode(golden.tokens)
        assert np.abs(context.embedding() - golden.rows.mean(axis=0)).max() < 1e-5


def test_what_it_says_of_itself(encoder):
    info, tokenizer = encoder.info, encoder.tokenizer
    assert (info.architecture, info.has_encoder, info.n_ctx_train) == ("bert", True, 256)
    assert (info.n_embd, info.n_layer, info.n_head) == (64, 3, 2)
    ids = tokenizer.encode("the bakers", add_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == b" the bakers"
    assert tokenizer.token_bytes(2) == b"[CLS]"
    assert not tokenizer.add_bos
    plan = encoder.plan_memory()
    assert plan.kv_bytes == 0 < plan.compute_bytes
    assert plan.weights_bytes == 4 * info.n_params


@pytest.mark.parametrize(
    "fields",
    [{"attention_type": "causal"}, {"embeddings": False}, {"type_k": "f16"},
     {"rope_freq_base": 5e4}, {"pooling_type": "rank"}],
)  # fmt: skip
def test_what_it_cannot_do_is_refused(encoder, fields):
    with pytest.raises(UnsupportedFeatureError):
        encoder.new_context(**fields)


def test_a_window_beyond_the_learned_positions_is_refused(encoder):
    with pytest.raises(InvalidInputError, match="256 positions"):
        encoder.new_context(n_ctx=257)


def test_a_model_saved_with_a_head_around_it(path, encoder, golden, tmp_path):
    """BertForMaskedLM and its like put all names under ``bert.``."""
    folder = shutil.copytree(path, tmp_path / "model")
    file = folder / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    named = {n if n == "__metadata__" else f"bert.{n}": entry for n, entry in header.items()}
    text = json.dumps(named).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with load_reference_model(folder) as other, other.new_context() as context:
        context.encode(golden.tokens)
        assert np.abs(context.embedding() - golden.rows.mean(axis=0)).max() < 1e-5


@pytest.mark.parametrize(
    "changes",
    [{"hidden_act": "relu"}, {"hidden_act": None}, {"is_decoder": True}, {"hidden_size": 32},
     {"vocab_size": 9}],
)  # fmt: skip
def test_another_shape_is_refused(path, tmp_path, changes):
    """None takes the setting out: the activation of BERT is then another one."""
    folder = shutil.copytree(path, tmp_path / "model")
    settings = {**json.loads((folder / "config.json").read_text()), **changes}
    left = {name: value for name, value in settings.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(left))
    with pytest.raises(ModelFormatError):
        load_reference_model(folder)
