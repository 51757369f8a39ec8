"""A context that several sessions share, each with a sequence of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from infercore.engine.gate import Gate
from infercore.errors import SessionBusyError, SessionClosedError, SessionFatalError

if TYPE_CHECKING:
    from types import TracebackType


class SharedContext:
    """Hands out the sequences of a context; closes it when the last one is given back.

    A context manager that each call of a session passes through: the outputs of a context are
    those of its last call, so no other session may come between a decode and its sample.
    """

    def __init__(self, context: Any) -> None:
        self.context = context
        self._lock = threading.Lock()
        self._free = list(range(context.n_seq_max - 1, -1, -1))
        self._left: list[int] = []  # given back while the context was busy: still to be emptied
        self._n_taken = 0
        self._gate = Gate("context") if context.n_seq_max > 1 else None

    def __enter__(self) -> None:
        if self._gate is None:
            return
        self._gate.__enter__()
        try:
            self._empty_left()
        except BaseException:
            self._gate.__exit__()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._gate is not None:
            self._gate.__exit__(kind, error, trace)

    def _empty_left(self) -> None:
        while self._left:
            self.context.seq_remove(self._left[-1])
            with self._lock:
                self._free.append(self._left.pop())

    @property
    def is_shared(self) -> bool:
        """Whether the context has room for several sessions."""
        return self._gate is not None

    def take(self) -> int | None:
        """Return a free sequence id, None where there is none."""
        with self._lock:
            if not self._free:
                return None
            self._n_taken += 1
            return self._free.pop()

    def give_back(self, seq_id: int) -> None:
        """Take a sequence back and empty it; with the last one the context is closed."""
        with self._lock:
            self._left.append(seq_id)
            self._n_taken -= 1
            last = self._n_taken == 0
        if last:
            self.context.close()
            return
        try:
            with self:
                pass
        except (SessionBusyError, SessionClosedError, SessionFatalError):
            return  # the next call empties it, or the context keeps nothing any more
