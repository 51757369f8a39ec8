"""Documents to be ranked by how well each answers a query, and the order of their scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from infercore.errors import UnsupportedFeatureError
from infercore.values import checks

if TYPE_CHECKING:
    from infercore.protocols.spi import FloatArray

RANK = "rank"
"""The pooling of models that rank."""


@attrs.frozen
class Pair:
    """A document, to be ranked by how well it answers a query."""

    query: str
    document: str


def check_ranks(model: Any) -> None:
    """Raise `UnsupportedFeatureError` for a model that does not rank."""
    if RANK not in model.capabilities.pooling:
        raise UnsupportedFeatureError(
            feature="rerank",
            backend=model.backend,
            hint="this model has no head that ranks; give a reranker, or compare what embed gives",
        )


def check_texts(texts: Any, name: str = "texts") -> list[Any]:
    """Return ``texts``, strings or pairs, as a list. Raises `InvalidInputError`."""
    if isinstance(texts, (str, bytes)):
        raise checks.refuse(name, texts, "a list of texts; put a single one into a list")
    listed = checks.items(name, texts, "a list of texts")
    return [text if isinstance(text, Pair) else checks.check_text(name, text) for text in listed]


def pairs_of(query: Any, documents: Any, top_n: Any) -> list[Pair]:
    """Return a pair for each of ``documents``. Raises `InvalidInputError` for what is no text."""
    checks.check_text("query", query)
    if top_n is not None and (not checks.is_integer(top_n) or top_n < 1):
        raise checks.refuse("top_n", top_n, "an integer of at least 1, or None")
    return [Pair(query, document) for document in check_texts(documents, "documents")]


def best_first(scores: FloatArray, top_n: int | None) -> list[tuple[int, float]]:
    """Return place and score of the ``top_n`` best of ``scores`` [n_texts, n_classes]."""
    if not len(scores):
        return []
    order = np.argsort(-scores[:, 0], kind="stable")[:top_n]
    return [(int(i), float(scores[i, 0])) for i in order]
