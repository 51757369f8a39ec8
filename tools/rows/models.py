"""Rows of what peers test of tokenizers, embeddings, models and adapters."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import infercore as ic
import infercore_models
from rows import ranker
from rows.bench import STORY, raises
from rows.sections import (
    MODELS,
    TOKENS,
)

if TYPE_CHECKING:
    from rows.bench import Bench


# -- tokenizer and embeddings ---------------------------------------------------------------------


@TOKENS.row("text comes back; characters over tokens (mullama)", "`Tokenizer.decode`")
def _(b: Bench) -> None:
    tokenizer = b.model.tokenizer
    text = "Zoë said: 🦊 and 字!"
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)).strip() == text


@TOKENS.row("special ids (ion7-core)", "`Tokenizer.bos`, `Tokenizer.eos`")
def _(b: Bench) -> None:
    tokenizer = b.model.tokenizer
    assert tokenizer.encode("a")[0] == tokenizer.bos
    assert tokenizer.is_control(tokenizer.bos) is True


@TOKENS.row("score and kind of every token, separators (ion7-core)", "`Tokenizer.token_kind`")
def _(b: Bench) -> None:
    tokenizer = b.model.tokenizer
    kinds = [tokenizer.token_kind(token) for token in range(tokenizer.n_vocab)]
    assert kinds[tokenizer.bos] == "control"
    assert kinds.count("normal") > 900
    assert tokenizer.token_score(7) is None  # this vocabulary has merges
    with ic.load_model(b.pack("encoder"), backend=b.backend) as model:
        assert model.tokenizer.sep == 3


@TOKENS.row("batch, pairs and truncation (openvino-genai)", "`Tokenizer.encode_many`")
def _(b: Bench) -> None:
    tokenizer = b.model.tokenizer
    assert tokenizer.encode_many([STORY, "a"]) == [tokenizer.encode(STORY), tokenizer.encode("a")]
    (cut,) = tokenizer.encode_many([STORY], max_tokens=5, truncation="right")
    assert cut == tokenizer.encode(STORY)[:5]
    with ic.load_model(b.pack("encoder"), backend=b.backend) as model:
        (pair,) = model.tokenizer.encode_many([("a", "b")])
        assert (pair[0], pair.count(3), pair[-1]) == (2, 2, 3)


@TOKENS.row("an embedding of each text (openvino-genai)", "`embed`")
def _(b: Bench) -> None:
    texts = infercore_models.golden_texts("encoder")[:3]
    found = ic.embed(b.pack("encoder"), [one.text for one in texts], backend=b.backend)
    for vector, one in zip(found, texts, strict=True):
        wanted = np.asarray(one.rows, dtype=np.float64).mean(0)
        assert vector @ wanted / np.linalg.norm(wanted) > 1 - 1e-3


@TOKENS.row("rerank (openvino-genai)", "`rerank`")
def _(b: Bench) -> None:
    query, documents = "the stone bridge", ["a baker and a fox", "the stone bridge", "an owl"]
    encoder = b.pack("encoder")
    with tempfile.TemporaryDirectory() as folder:
        source = infercore_models.path("encoder", "gguf-f32")
        head = ranker.write(source, Path(folder) / "ranker.gguf")
        if b.backend == "openvino":
            encoder = ranker.write_ir(encoder, head, Path(folder) / "ranker")
        else:
            encoder = head
        found = ic.rerank(encoder, query, documents, backend=b.backend)
        best = ic.rerank(encoder, query, documents, backend=b.backend, top_n=2)
        alone = [ic.rerank(encoder, query, [one], backend=b.backend)[0][1] for one in documents]
    assert best == found[:2]
    assert [place for place, _ in found] == np.argsort(alone)[::-1].tolist()
    assert len(set(alone)) == 3
    assert all(abs(score - alone[place]) < 1e-3 for place, score in found)


# -- models and adapters --------------------------------------------------------------------------


@MODELS.row("metadata and shape (ion7-core)", "`ModelInfo`")
def _(b: Bench) -> None:
    info = b.model.info
    assert (info.n_vocab, info.n_layer > 0, info.n_embd > 0) == (1024, True, True)
    assert info.n_params > 10_000
    assert info.architecture == "llama"


@MODELS.row("several adapters, scales, live (mullama)", "`Context.set_adapters`")
def _(b: Bench) -> None:
    spec = ic.AdapterSpec(path=str(infercore_models.path("storyteller-lora", "gguf-f32")))
    context = b.context()
    context.set_adapters([spec])
    context.decode(b.tokens)
    assert np.abs(context.logits() - b.last_row()).max() > 1e-2
    context.set_adapters([])
    context.eval(b.tokens, 0)
    assert np.abs(context.logits() - b.last_row()).max() <= context.tolerance


@MODELS.row("an adapter is part of the identity (contenox)", "`ContextManifest.adapters`")
def _(b: Bench) -> None:
    spec = ic.AdapterSpec(path=str(infercore_models.path("storyteller-lora", "gguf-f32")))
    with_it = b.session(adapters=[spec]).explain_context()
    assert with_it.manifest_digest != b.session().explain_context().manifest_digest


@MODELS.row("metadata overridden at load (mullama)", "`ModelConfig.backend_options`")
def _(b: Bench) -> None:
    options = {"kv_overrides": {"llama.rope.freq_base": 20000.0}}
    if b.backend != "llamacpp":
        error = raises(
            ic.InvalidInputError,
            lambda: ic.load_model(b.path, backend=b.backend, backend_options=options),
        )
        raise ic.UnsupportedFeatureError(feature="kv_overrides", backend=None, hint=str(error))
    with ic.load_model(b.path, backend=b.backend, backend_options=options) as model:
        assert model.info.metadata["llama.rope.freq_base"].startswith("20000")


@MODELS.row("a file that is cut, missing, foreign (llama-cpp-python)", "`ModelLoadError`")
def _(b: Bench) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wrong = Path(folder) / "model.gguf"
        wrong.write_bytes(b"GGUF" + b"\0" * 50)
        raises(ic.ModelLoadError, lambda: ic.load_model(wrong, backend=b.backend))
        gone = Path(folder) / "no.gguf"
        raises(ic.ModelNotFoundError, lambda: ic.load_model(gone, backend=b.backend))


@MODELS.row("digest of a model's files (contenox)", "`Model.digest`")
def _(b: Bench) -> None:
    with ic.load_model(b.path, backend=b.backend) as again:
        assert again.digest == b.model.digest
    assert len(b.model.digest) == 64
