"""A plugin's context behind its owner's lock, and what a failure of one of its calls means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from infercore.engine import calls, optional, plugin_checks
from infercore.errors import UnsupportedFeatureError
from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import Callable

    from infercore.engine.gate import Gate
    from infercore.protocols.spi import CapableContext, EngineContext

T = TypeVar("T")


class Native:
    """The engine's context ``inner``, its ``optional`` calls, its ``lock`` and its capabilities.

    That a declared capability has its calls was checked when the context was opened.
    """

    def __init__(self, inner: EngineContext, lock: Gate, backend: str) -> None:
        self.inner = cast("CapableContext", inner)
        self.optional = optional.bind(inner)
        self.capabilities = inner.capabilities
        self.lock = lock
        self.backend = backend

    def need(self, feature: str, *, declared: bool, hint: str = "") -> None:
        """Raise `UnsupportedFeatureError` unless ``declared``."""
        if not declared:
            raise UnsupportedFeatureError(feature=feature, backend=self.backend, hint=hint)

    def judged(self, work: Callable[..., T], *args: Any) -> T:
        """Run an engine call; what it raises untyped is judged."""
        return calls.judged(self.lock, work, *args)

    def judge(self, error: BaseException) -> None:
        """Stop trusting an engine that raised what nobody expects; lack of memory is typed."""
        calls.judge(self.lock, error)

    def position(self, seq_id: int) -> int:
        """Return the sequence's next position; an engine that cannot report it is not trusted."""
        try:
            found = self.inner.n_past(seq_id)
        except Exception as error:
            calls.judge(self.lock, error)
            raise
        if type(found) is not int and not checks.is_integer(found):
            told = f"returned {plugin_checks.shown(found)}, not a position"
            raise self.lock.fail(plugin_checks.wrong(self.backend, f"n_past({seq_id})", told))
        return int(found)

    def position_after(self, seq_id: int, error: BaseException) -> int:
        """Return `position` after ``error``; without it the engine is trusted no more."""
        try:
            return int(self.inner.n_past(seq_id))
        except Exception as broken:
            failure = self.lock.fail(error)
            raise (failure if calls.is_of_the_engine(error) else error) from broken
