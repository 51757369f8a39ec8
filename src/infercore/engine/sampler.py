"""The guard around a plugin's own sampler."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from infercore.engine import arguments, calls, plugin_checks
from infercore.engine.context import GuardedContext
from infercore.engine.gate import Gate, fork_count
from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infercore.protocols.public import Context


class GuardedSampler:
    """A `Sampler` over an engine's native one: it samples from rows that exist, and only then."""

    is_native = True

    def __init__(
        self, inner: Any, *, n_vocab: int, release: Callable[[], None], backend: str = ""
    ) -> None:
        self._inner = inner
        self._backend = backend
        self._n_vocab = n_vocab
        self._release = release
        self._gate = Gate("sampler")
        self._gate.backend = backend
        self._finalizer = weakref.finalize(self, _close, inner, release, fork_count(), self._gate)

    def __repr__(self) -> str:
        return "<Sampler closed>" if self.closed else "<Sampler native>"

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._gate.closed

    @property
    def seed(self) -> int | None:
        """The seed in use."""
        seed: int | None = self._inner.seed
        return seed

    def sample(self, context: Context, i: int = -1) -> int:
        """Return a token from output row ``i``, accepted exactly once.

        Raises `OutputNotAvailableError` where the context has no such row, `InvalidInputError` for
        a context of another backend or vocabulary; state unchanged.
        """
        with self._gate:
            own = self._backend, self._n_vocab
            if not isinstance(context, GuardedContext) or context.rows_of != own:
                raise checks.refuse("context", context, "a context of this sampler's model")
            return context.sample_native(self._inner.sample, i)

    def observe(self, tokens: Sequence[int], *, constrained: bool = True) -> None:
        """Take in tokens that are there already (penalties). Raises `InvalidTokenError`."""
        del constrained  # an engine's sampler has no constraint
        with self._gate:
            ids = arguments.check_tokens(tokens, self._n_vocab).tolist()
            calls.judged(self._gate, self._inner.observe, ids)

    def reset(self) -> None:
        """Go back to the state after construction."""
        with self._gate:
            calls.judged(self._gate, self._inner.reset)

    def clone(self) -> GuardedSampler:
        """Return an independent sampler in the same state."""
        with self._gate:
            inner = calls.judged(self._gate, self._inner.clone)
            plugin_checks.check_sampler(inner, self._backend)
        release = self._release
        take = getattr(release, "take", None)
        if take is not None:
            release = take()
        return GuardedSampler(inner, n_vocab=self._n_vocab, release=release, backend=self._backend)

    def close(self) -> None:
        """Release what the sampler holds; idempotent."""
        if self._gate.shut():
            self._finalizer()  # once, whoever asks


def _close(inner: Any, release: Callable[[], None], born: int, gate: Gate) -> None:
    if born != fork_count():  # the parent's
        return
    if not gate.shut_at_end(None):
        return
    try:
        with calls.typed(gate.backend, "closing a sampler"):
            inner.close()
    finally:
        release()
