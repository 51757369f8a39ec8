"""A context that several sessions share, each with a sequence of its own."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import ref

from infercore.engine.gate import Gate
from infercore.errors import SessionBusyError, SessionClosedError, SessionFatalError
from infercore.session.stream import DecodeStream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infercore.session.generation import Generation
    from infercore.session.resident import Resident
    from infercore.session.session import CoreSession
    from infercore.values.config import ContextConfig


def _on_enter(shared: ref[SharedContext]) -> Callable[[], None]:
    """Empty what was given back; no cycle, so that the context goes with its last session."""

    def empty_left() -> None:
        alive = shared()
        if alive is not None:
            alive._empty_left()  # noqa: SLF001

    return empty_left


class SharedContext:
    """Hands out the sequences of a context; closes it when the last one is given back.

    Each call of a session passes through ``gate``: the outputs of a context are those of its last
    call, so no other session may come between a decode and its sample.
    """

    def __init__(self, context: Any) -> None:
        self.context = context
        self._lock = threading.Lock()
        self._free = list(range(context.n_seq_max - 1, -1, -1))
        self._left: list[int] = []  # given back while the context was busy: still to be emptied
        self._n_taken = 0
        self.is_shared: bool = context.n_seq_max > 1
        """Whether the context has room for several sessions."""
        self.gate: AbstractContextManager[Any] = (
            Gate("context", _on_enter(ref(self))) if self.is_shared else nullcontext()
        )

    def _empty_left(self) -> None:
        while self._left:
            self.context.seq_remove(self._left[-1])
            with self._lock:
                self._free.append(self._left.pop())

    def take(self) -> int | None:
        """Return a free sequence id, None where there is none."""
        with self._lock:
            if not self._free:
                return None
            self._n_taken += 1
            return self._free.pop()

    def for_twin(self, model: Any, config: ContextConfig) -> tuple[SharedContext, int]:
        """Return where a fork lives: in a free sequence here, else in a new context."""
        copies = self.context.capabilities.kv_copy != "none"
        seq_id = self.take() if copies else None
        if seq_id is not None:
            return self, seq_id
        fresh = SharedContext(model.context_of(config))
        return fresh, fresh.take() or 0

    @staticmethod
    def copy(source: Resident, target: Resident) -> bool:
        """Give ``target`` the tokens of ``source``; True where it had to evaluate them anew."""
        if target.context is source.context:
            source.context.seq_copy(source.seq_id, target.seq_id)
        elif source.context.capabilities.sequence_state:
            saved = source.context.save_sequence(source.seq_id)
            target.context.load_sequence(target.seq_id, saved)
        else:
            target.context.decode(source.tape.tokens(), seq_id=target.seq_id)
            return True
        return False

    @staticmethod
    def new_stream(
        session: CoreSession, generation: Generation, dropped: Sequence[int], started: float | None
    ) -> DecodeStream:
        """Return the iterator over what ``generation`` makes."""
        return DecodeStream(session, generation, dropped, started=started)

    @staticmethod
    def call(operation: str) -> AbstractContextManager[Any]:  # noqa: ARG004
        """Return what a call of a session runs within."""
        return nullcontext()

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
            with self.gate:
                pass
        except (SessionBusyError, SessionClosedError, SessionFatalError):
            return  # the next call empties it, or the context keeps nothing any more
