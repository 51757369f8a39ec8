"""A model that ranks gives each text a score, through `infercore.embed` too."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np
import pytest

import infercore as ic
from infercore import embedding
from infercore.session import ranking
from llamacpp import random_gguf

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"\u2581{chr(97 + i)}" for i in range(26)]
TEXTS = ["a b c", "c b a a", "z", "q w e r t y " * 20]


@pytest.fixture(scope="module")
def ranker_path(plugin_model, tmp_path_factory):
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
    return random_gguf.write_file(path, metadata, tensors)


@pytest.fixture(scope="module")
def ranker(ranker_path):
    with ic.load_model(ranker_path) as model:
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


DOCUMENTS = ["a b c", "c b a a", "z", "q w e r t y " * 5, "a b c"]


def scores_of_pairs(model, query, documents):
    """Return the scores of ``[CLS] query [SEP] document [SEP]``, each in a context of its own."""
    found = []
    for document in documents:
        ids = [2, *_ids(model, query), 3, *_ids(model, document), 3]
        with model.new_context(n_ctx=256, n_threads=1, pooling_type="rank") as context:
            context.encode(ids)
            found.append(float(context.embedding()[0]))
    return found


def _ids(model, text):
    return model.tokenizer.encode(text, add_special=False)


def test_documents_are_ranked_by_the_score_of_their_pair(ranker):
    expected = scores_of_pairs(ranker, "x y", DOCUMENTS)
    ranked = ic.rerank(ranker, "x y", DOCUMENTS, n_threads=1)
    assert sorted(place for place, _ in ranked) == list(range(len(DOCUMENTS)))
    assert [score for _, score in ranked] == sorted((s for _, s in ranked), reverse=True)
    assert all(abs(score - expected[place]) < 1e-4 for place, score in ranked)
    assert ic.rerank(ranker, "x y", DOCUMENTS, top_n=2, n_threads=1) == ranked[:2]
    assert ic.rerank(ranker, "x y", []) == []


def test_documents_of_one_score_keep_their_order():
    scores = np.array([[1], [3], [1], [3]], dtype=np.float32)
    assert ranking.best_first(scores, None) == [(1, 3.0), (3, 3.0), (0, 1.0), (2, 1.0)]
    assert ranking.best_first(scores, 9) == ranking.best_first(scores, 4)


def test_documents_are_ranked_over_http(ranker):
    httpx = pytest.importorskip("httpx", reason="the client that the tests use is not installed")
    from served import serving

    asked = {"model": "ranks", "query": "x y", "documents": [*DOCUMENTS[:-1]]}
    asked["documents"].append({"text": DOCUMENTS[-1]})
    with ranker.new_pool(n_threads=1) as pool, serving({"ranks": pool}) as served:
        whole = httpx.post(f"{served.url}/v1/rerank", json=asked).json()
        best = {**asked, "top_n": 2, "return_documents": True}
        first = httpx.post(f"{served.url}/v1/rerank", json=best).json()
        wrong = [
            httpx.post(f"{served.url}{path}", json=body)
            for path, body in (
                ("/v1/rerank", {**asked, "documents": [{"body": "x"}]}),
                ("/v1/completions", {"model": "ranks", "prompt": "x"}),
            )
        ]
        expected = pool.rerank("x y", DOCUMENTS)
    found = [(row["index"], row["relevance_score"]) for row in whole["results"]]
    assert [place for place, _ in found] == [place for place, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected])
    assert [row["document"]["text"] for row in first["results"]] == [
        DOCUMENTS[place] for place, _ in expected[:2]
    ]
    assert whole["usage"]["prompt_tokens"] > len(DOCUMENTS)
    assert [answer.status_code for answer in wrong] == [400, 400]
    assert wrong[0].json()["error"]["param"] == "documents"


def test_callers_of_a_pool_that_rank_share_calls(ranker):
    queries = ["x y", "a", "q w e", "z z z"]
    expected = [dict(ic.rerank(ranker, query, DOCUMENTS)) for query in queries]
    with ranker.new_pool() as pool, ThreadPoolExecutor(len(queries)) as threads:
        found = list(threads.map(lambda query: pool.rerank(query, DOCUMENTS), queries))
        for ours, theirs in zip(found, expected, strict=True):
            assert dict(ours) == pytest.approx(theirs, abs=1e-4)
        assert pool.rerank("a", DOCUMENTS, top_n=1) == asyncio.run(
            pool.arerank("a", DOCUMENTS, top_n=1)
        )
        scores = pool.embed(TEXTS)
        assert np.abs(scores - scores_of(ranker, TEXTS)).max() < 1e-4  # never normalized
        with pytest.raises(ic.UnsupportedFeatureError):
            pool.open_session()
    with pytest.raises(ic.SessionClosedError):
        pool.rerank("a", DOCUMENTS)


def test_a_ranking_is_the_same_whose_engine_dies(ranker, ranker_path, monkeypatch):
    expected = dict(ic.rerank(ranker, "x y", DOCUMENTS, n_threads=1))
    with ic.open_pool(ranker_path, isolate=True, n_threads=1) as pool:
        send, pid = pool.process.send, pool.process.pid

        def dying(*given):
            call = send(*given)
            if pool.process.pid == pid:
                os.kill(pid, signal.SIGKILL)
            return call

        monkeypatch.setattr(pool.process, "send", dying)
        assert dict(pool.rerank("x y", DOCUMENTS)) == pytest.approx(expected, abs=1e-4)
        assert pool.stats().n_restarts == 1


@pytest.mark.parametrize(
    ("query", "documents", "top_n", "field"),
    [
        (1, ["a"], None, "query"),
        ("a", "a", None, "documents"),
        ("a", ["a", 2], None, "documents"),
        ("a", ["a"], 0, "top_n"),
        ("a", ["a"], True, "top_n"),
        ("a", ["a " * 4096], None, "texts"),
    ],
)
def test_what_cannot_be_ranked_is_refused(ranker, query, documents, top_n, field):
    with pytest.raises(ic.InvalidInputError) as caught:
        ic.rerank(ranker, query, documents, top_n=top_n)
    assert caught.value.field == field


def test_a_model_without_a_head_cannot_rerank(story_path):
    with pytest.raises(ic.UnsupportedFeatureError, match="rerank"):
        ic.rerank(story_path, "a", ["b"])


def test_a_template_of_the_file_puts_query_and_document_together(ranker):
    class Templated:
        tokenizer, backend = ranker.tokenizer, ranker.backend
        info = attrs.evolve(
            ranker.info,
            metadata={"tokenizer.chat_template.rerank": "[CLS]{document} a {query}[SEP]"},
        )

    ids = embedding._encode_pair(Templated(), ranking.Pair("{document}", "b c"))
    plain = [*_ids(ranker, "b c"), *_ids(ranker, " a "), *_ids(ranker, "{document}")]
    assert ids == [2, *plain, 3]
