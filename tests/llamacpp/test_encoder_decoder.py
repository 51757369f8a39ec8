"""Models of an encoder and a decoder that reads what it made, and of such an encoder alone."""

from __future__ import annotations

import pytest

import infercore as ic
from llamacpp import random_gguf

TEXT, START = list(range(20)), [0, 5, 6]


@pytest.fixture(scope="module")
def model(tmp_path_factory, plugin_model):
    path = random_gguf.write(tmp_path_factory.mktemp("t5") / "t5.gguf", "t5")
    with ic.load_model(path, check_in_child=False) as model:
        yield model


def row_of(context, text):
    context.encode(text)
    context.decode(START)
    return context.logits().copy()


def test_a_second_text_is_encoded_once_the_first_ones_tokens_are_gone(model):
    with model.new_context(n_ctx=64) as context, model.new_context(n_ctx=64) as fresh:
        row_of(context, TEXT)
        for _ in range(2):
            with pytest.raises(ic.InvalidStateError, match=r"clear\(\)") as caught:
                context.encode(TEXT[:7])
            assert caught.value.state == "3 tokens are resident"
            assert context.n_past() == 3
            context.decode_one(4)  # it goes on
            context.eval(START, 0)
        context.clear()
        assert abs(row_of(context, TEXT[:7]) - row_of(fresh, TEXT[:7])).max() < 1e-3
        context.seq_remove(0)
        context.encode(TEXT)


def test_decoding_needs_a_text_first(model):
    with model.new_context(n_ctx=64) as context:
        with pytest.raises(ic.InvalidStateError, match=r"encode\(\)"):
            context.decode(START)
        with pytest.raises(ic.InvalidStateError, match=r"encode\(\)"):
            context.decode_one(START[0])
        row_of(context, TEXT)


def test_a_session_is_refused_by_what_the_model_lacks(model):
    with pytest.raises(ic.UnsupportedFeatureError, match="from encoded text") as caught:
        model.new_session(n_ctx=64)
    assert "only makes embeddings" not in str(caught.value)


def test_an_encoder_alone_decodes_nothing(tmp_path, plugin_model):
    path = random_gguf.write(tmp_path / "encoder.gguf", "t5encoder")
    with ic.load_model(path, check_in_child=False) as model:
        assert not model.capabilities.logits_all
        with model.new_context(n_ctx=64, pooling_type="mean") as context:
            with pytest.raises(ic.UnsupportedFeatureError):
                context.decode(START)
            context.encode(TEXT)
            assert context.embedding().shape == (random_gguf.N_EMBD,)
        with pytest.raises(ic.UnsupportedFeatureError, match="only makes embeddings"):
            model.new_session(n_ctx=64)
