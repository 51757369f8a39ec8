"""Where the engine of a pool lives, as its sessions see it: a process, or replicas elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from infercore.errors import SessionFatalError
    from infercore.values.pool import PoolStats


class Done(Protocol):
    """**Protocol:** something to wait for."""

    def wait(self, timeout: float = ..., /) -> bool:
        """Wait, for at most ``timeout`` seconds; return whether it is there."""
        ...

    def when_open(self, callback: Callable[[], object], /) -> None:
        """Call ``callback`` when it is there, in any thread."""
        ...


class Call(Protocol):
    """**Protocol:** a request; ``error`` is a `DeathError` where the process died over it."""

    @property
    def done(self) -> Done:
        """What opens when the answer is there."""
        ...

    result: Any
    error: BaseException | None
    value: Any


class Left(Protocol):
    """**Protocol:** takes what was dropped, from a finalizer, and so without a lock."""

    def put(self, item: tuple[int, str], /) -> None:
        """Note that a session or a stream has nobody any more."""
        ...


class Place(Protocol):
    """**Protocol:** the process that has a session, or the next one that will."""

    @property
    def left(self) -> Left:
        """Where to put what was dropped."""
        ...

    @property
    def ended(self) -> dict[int, BaseException]:
        """The sessions that were in the call of two deaths in a row, and the cause."""
        ...

    @property
    def closed(self) -> bool:
        """Whether nothing is answered any more."""
        ...

    def here(self) -> int:
        """Return the number of the process that answers now, started if need be."""
        ...

    def send(
        self,
        epoch: int,
        target: int,
        name: str,
        args: Sequence[Any] = (),
        fields: Mapping[str, Any] | None = None,
    ) -> Call:
        """Send a request to the process number ``epoch``; one that is gone has died."""
        ...

    def send_next(self, epoch: int, target: int) -> Call:
        """Ask for a stream's next chunk as `send` does; the caller waits for it in this thread."""
        ...

    @property
    def living(self) -> int:
        """The number of the process that answers now, 0 where none does."""
        ...

    def let_first(self, mark: int) -> None:
        """Wait until those have made their calls again who may have ended the last process."""
        ...

    def alone(self, mark: int) -> AbstractContextManager[Callable[[Any], None]]:
        """Hold back who else may have ended the last process, if ``mark`` is one of them."""
        ...

    def forget_session(self, target: int) -> None:
        """Forget what was held against a session that is closed."""
        ...

    def is_lone(self, target: int) -> bool:
        """Whether a session may be why the last process died; answers so once."""
        ...

    def went_on(self, target: int) -> None:
        """Note that a session got further than where the last process died."""
        ...

    def beside(self) -> Place:
        """Return where a fork of the session lives."""
        ...


class Engines(Protocol):
    """**Protocol:** who answers for a pool.

    ``facts`` are those that `infercore.isolated.worker.Worker.hold` returns.
    """

    facts: dict[str, Any]
    n_restarts: int

    @property
    def counts(self) -> Mapping[str, int]:
        """What was counted over all processes that there were; empty where `stats` says it."""
        ...

    fatal: SessionFatalError | None
    closed: bool

    def place(self) -> Place:
        """Return where a new session lives."""
        ...

    def check(self) -> None:
        """Raise unless a call may be made."""
        ...

    def ask(self, name: str, *args: Any, **fields: Any) -> Any:
        """Return what the pool answers, from another process where one died over it."""
        ...

    def stats(self) -> PoolStats | None:
        """Return what was counted; None where nobody can be asked now."""
        ...

    def flush(self, namespace: str | None) -> None:
        """Forget what is kept of sequences that lost their cells."""
        ...

    def drain(self, timeout: float | None) -> bool | None:
        """Let the calls that have begun end; None where their process died meanwhile."""
        ...

    def close(self, *, wait: bool = True) -> None:
        """End everything, without ``wait`` at once; idempotent."""
        ...
