"""A model that ranks gives each text a score, through `infercore.embed` too."""

from __future__ import annotations

import numpy as np
import pytest

import infercore as ic
from llamacpp import random_gguf

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"\u2581{chr(97 + i)}" for i in range(26)]
TEXTS = ["a b c", "c b a a", "z", "q w e r t y " * 20]


@pytest.fixture(scope="module")
def ranker(plugin_model, tmp_path_factory):
    """Return a random model that ranks, with a vocabulary of letters."""
    metadata, tensors = random_gguf._rank(np.random.default_rng(5))
    fillers = [f"\u2581unused{i}" for i in range(random_gguf.N_VOCAB - len(SPECIAL) - len(WORDS))]
    metadata |= {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*SPECIAL, *WORDS, *fillers],
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(WORDS) + len(fillers)),
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.mask_token_id": 4,
    }
    path = tmp_path_factory.mktemp("rank") / "rank.gguf"
    with ic.load_model(random_gguf.write_file(path, metadata, tensors)) as model:
        yield model


def scores_of(model, texts):
    """Return the scores that a context gives, text by text."""
    found = []
    for text in texts:
        with model.new_context(n_ctx=256, n_threads=1, pooling_type="rank") as context:
            context.encode(model.tokenizer.encode(text))
            found.append(context.embedding().copy())
    return np.stack(found)


@pytest.mark.parametrize("pooling", ["rank", None])
@pytest.mark.parametrize("normalize", [True, False])
def test_texts_are_ranked_as_the_context_ranks_them(ranker, pooling, normalize):
    scores = ic.embed(ranker, TEXTS, pooling=pooling, normalize=normalize)
    assert scores.shape == (len(TEXTS), 1)
    assert len(set(scores[:, 0].tolist())) == len(TEXTS)
    assert np.abs(scores - scores_of(ranker, TEXTS)).max() < 1e-4


def test_the_same_model_pools_too(ranker):
    vectors = ic.embed(ranker, TEXTS, pooling="mean")
    assert vectors.shape == (len(TEXTS), ranker.info.n_embd)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1)


def test_a_model_that_does_not_rank_is_refused(story_path):
    with pytest.raises(ic.InvalidInputError, match="ranks") as caught:
        ic.embed(story_path, ["a"], pooling="rank")
    assert caught.value.field == "pooling"
    assert set(caught.value.allowed) == {"mean", "cls", "last"}
