"""Whether who waits for a process with limits still wants what it does."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_look: ContextVar[Callable[[], object] | None] = ContextVar("_look", default=None)


@contextmanager
def looked_at(look: Callable[[], object]) -> Iterator[None]:
    """Have ``look`` called from time to time while this thread waits; what it raises ends that."""
    token = _look.set(look)
    try:
        yield
    finally:
        _look.reset(token)


def look() -> None:
    """Raise what ended the call that waits, if anything did."""
    wanted = _look.get()
    if wanted is not None:
        wanted()
