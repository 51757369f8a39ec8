"""``/v1/embeddings`` and ``/v1/rerank``: texts in, vectors or scores out."""

from __future__ import annotations

import asyncio
import base64
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.errors import InvalidInputError
from infercore.serve.wire import check_settled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.embedding import Pooling
    from infercore.serve.metrics import Metrics
    from infercore.serve.models import Served
    from infercore.serve.wire import EmbeddingsRequest, RerankRequest
    from infercore.session.pool import SessionPool


def _usage(n_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": n_tokens, "total_tokens": n_tokens}


async def _n_tokens(pool: SessionPool, texts: Sequence[str]) -> int:
    encode = pool.tokenizer.encode
    return await asyncio.to_thread(lambda: sum(len(encode(text)) for text in texts))


async def embeddings(
    request: EmbeddingsRequest, served: Served, metrics: Metrics
) -> dict[str, Any]:
    """Return one vector for each text, as numbers or as base64 of little-endian float32."""
    check_settled(request)
    if request.encoding_format not in (None, "float", "base64"):
        raise InvalidInputError(
            f"encoding_format={request.encoding_format!r} is not known; send 'float' or 'base64'",
            field="encoding_format",
            value=request.encoding_format,
            allowed="'float' or 'base64'",
        )
    texts = _texts_of(request.input)
    async with served.used() as pool:
        n_embd = pool.info.n_embd
        if request.dimensions not in (None, n_embd):
            raise InvalidInputError(
                f"this model's vectors have {n_embd} numbers",
                field="dimensions",
                value=request.dimensions,
                allowed=f"null or {n_embd}",
            )
        pooling: Pooling | None = None if pool.capabilities.encoder else "mean"
        vectors = await pool.aembed(texts, pooling=pooling)
        n_tokens = await _n_tokens(pool, texts)
    metrics.count_tokens(served.name, n_tokens, 0, 0)
    as_text = request.encoding_format == "base64"
    rows = [
        {"object": "embedding", "index": i, "embedding": _shown(vector, as_text=as_text)}
        for i, vector in enumerate(vectors)
    ]
    return {"object": "list", "model": request.model, "data": rows, "usage": _usage(n_tokens)}


def _texts_of(given: str | Sequence[Any]) -> list[str]:
    texts = [given] if isinstance(given, str) else list(given)
    if not texts:
        raise InvalidInputError("there is no text", field="input", value=texts, allowed="texts")
    if not all(isinstance(text, str) for text in texts):
        raise InvalidInputError(
            "send texts: token ids of a client are often of another model's vocabulary"
            " (for LangChain's OpenAIEmbeddings set check_embedding_ctx_length=False)",
            field="input",
            value=given,
            allowed="texts",
        )
    return texts


def _shown(vector: Any, *, as_text: bool) -> Any:
    if not as_text:
        return vector.tolist()
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()


async def rerank(request: RerankRequest, served: Served, metrics: Metrics) -> dict[str, Any]:
    """Return the documents' places, best first, with their scores."""
    documents = [_text_of(document) for document in request.documents]
    async with served.used() as pool:
        ranked = await pool.arerank(request.query, documents, top_n=request.top_n)
        n_tokens = await _n_tokens(pool, (request.query, *documents))
    metrics.count_tokens(served.name, n_tokens, 0, 0)
    wants_text = bool(request.return_documents)
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": request.model,
        "results": [
            {
                "index": place,
                "relevance_score": score,
                **({"document": {"text": documents[place]}} if wants_text else {}),
            }
            for place, score in ranked
        ],
        "usage": _usage(n_tokens),
    }


def _text_of(document: Any) -> str:
    if isinstance(document, str):
        return document
    if isinstance(document.get("text"), str):
        text: str = document["text"]
        return text
    raise InvalidInputError(
        "a document is a text, or an object with one",
        field="documents",
        value=document,
        allowed="texts",
    )
