"""What a plugin raises, as typed errors."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from infercore.errors import InferCoreError, OutOfMemoryError, PluginError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from infercore.engine.gate import Gate

T = TypeVar("T")


@contextmanager
def typed(backend: str, doing: str) -> Iterator[None]:
    """Raise lack of memory as `OutOfMemoryError`, other untyped failures as `PluginError`."""
    try:
        yield
    except InferCoreError:
        raise
    except MemoryError as error:
        raise OutOfMemoryError(
            f"backend {backend!r} ran out of memory while {doing}: {error}"
        ) from error
    except Exception as error:
        raise PluginError(
            f"backend {backend!r} failed while {doing}: {error}", plugin=backend
        ) from error


def judged(gate: Gate, work: Callable[..., T], *args: Any) -> T:
    """Run an engine call on the object behind ``gate``; what it raises untyped is judged."""
    try:
        return work(*args)
    except Exception as error:
        judge(gate, error)
        raise


def judge(gate: Gate, error: BaseException) -> None:
    """Stop trusting an object that raised what nobody expects; lack of memory is typed."""
    if isinstance(error, InferCoreError) or not isinstance(error, Exception):
        return
    if isinstance(error, MemoryError):
        raise OutOfMemoryError(f"the engine ran out of memory: {error}") from error
    raise gate.fail(error) from error
