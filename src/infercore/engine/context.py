"""The guarded context: the `Context` that users get, over any plugin's."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from infercore.engine.context_controls import Controls
from infercore.engine.context_decode import Decoding
from infercore.engine.context_state import Saving
from infercore.engine.gate import Gate, fork_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self


class GuardedContext(Saving, Decoding, Controls):
    """A `Context` over a plugin's `EngineContext`; it keeps its model alive until closed."""

    def __init__(self, inner: Any, *, release: Callable[[], None], **facts: Any) -> None:
        super().__init__(inner, **facts)
        self._finalizer = weakref.finalize(self, _close, inner, release, fork_count(), self._gate)

    def close(self) -> None:
        """Give the memory back; idempotent. A call that runs in another thread is aborted."""
        if not self._gate.entered_here():
            self.abort()
        if self._gate.shut():
            with self._abort_lock:  # an abort from another thread has left the engine then
                pass
            self._finalizer()  # once, whoever asks
            self._identity_source = dict  # what it asks keeps the model alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(inner: Any, release: Callable[[], None], born: int, gate: Gate) -> None:
    if born != fork_count():  # the parent's engine: closing it here may hang
        return
    if not gate.shut_at_end(getattr(inner, "abort", None)):
        return
    try:
        inner.close()
    finally:
        release()
