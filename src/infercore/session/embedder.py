"""Vectors for the texts of many callers: who comes while others are evaluated shares a call."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from infercore.errors import InferCoreError, SessionClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infercore.protocols.spi import FloatArray
    from infercore.session.ranking import Pair

    Embed = Callable[[Sequence[str | Pair], str | None], FloatArray]


@attrs.define(eq=False)
class _Request:
    """The texts of one caller, and what became of them."""

    texts: Sequence[str | Pair]
    pooling: str | None
    vectors: FloatArray | None = None
    error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self.vectors is not None or self.error is not None


class Embedder:
    """Evaluates texts in the thread of one of its callers, for all that wait by then.

    ``embed(texts, pooling)`` gives one vector a text, in their order, not normalized.
    """

    def __init__(self, embed: Embed) -> None:
        self._embed = embed
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: list[_Request] = []
        self.closed = False
        self.n_calls = 0
        self._unfinished: set[_Request] = set()

    @property
    def n_unfinished(self) -> int:
        """Calls that have begun and not ended."""
        return len(self._unfinished)

    def vectors(self, texts: Sequence[str | Pair], pooling: str | None) -> FloatArray:
        """Return the vectors of ``texts`` [n_texts, n_embd]. Raises what `infercore.embed` does."""
        request = _Request(texts, pooling)
        try:
            with self._lock:
                if self.closed:
                    raise SessionClosedError("this pool is closed; open a new one")
                self._waiting.append(request)
                self._unfinished.add(request)
            with self._turn:
                if not request.is_done:
                    self._work(request)
        finally:
            self._unfinished.discard(request)
        if request.error is not None:
            raise request.error
        if request.vectors is None:
            raise SessionClosedError("this pool is closed; open a new one")
        return request.vectors

    def _work(self, own: _Request) -> None:
        """Evaluate what waits, ``own`` among it; interrupted, leave the others' to the others."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        try:
            self._evaluate_all(waiting)
        except BaseException:
            left = [request for request in waiting if request is not own and not request.is_done]
            with self._lock:
                self._waiting = [*left, *self._waiting]
            raise

    def _evaluate_all(self, waiting: Sequence[_Request]) -> None:
        for pooling in dict.fromkeys(request.pooling for request in waiting):
            alike = [request for request in waiting if request.pooling == pooling]
            try:
                self._evaluate(alike, pooling)
            except InferCoreError as error:
                if len(alike) == 1:
                    alike[0].error = error
                    continue
                for request in alike:  # the fault is one caller's, and the others' texts are fine
                    self._alone(request)

    def _evaluate(self, requests: Sequence[_Request], pooling: str | None) -> None:
        texts = [text for request in requests for text in request.texts]
        self.n_calls += 1
        found = self._embed(texts, pooling)
        at = 0
        for request in requests:
            request.vectors = np.array(found[at : at + len(request.texts)])
            at += len(request.texts)

    def _alone(self, request: _Request) -> None:
        try:
            self._evaluate([request], request.pooling)
        except InferCoreError as error:
            request.error = error

    def refuse(self) -> None:
        """Evaluate nothing more but what an engine call has begun."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for request in waiting:
            request.error = SessionClosedError("this pool is closed; open a new one")

    def close(self) -> None:
        """Refuse from now on; what runs ends first."""
        with self._lock:
            self.closed = True
        with self._turn:
            return


def unit(vectors: FloatArray) -> FloatArray:
    """Return ``vectors`` with a length of 1 each; those of length 0 stay."""
    lengths = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    lengths[lengths == 0] = 1
    scaled: Any = vectors / lengths
    found: FloatArray = scaled
    return found
