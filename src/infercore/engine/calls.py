"""What a plugin raises, as typed errors that name the plugin, the exception and its place."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from infercore.errors import InferCoreError, OutOfMemoryError, PluginError
from infercore.values.handlers import frames_of, is_a_handlers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from infercore.engine.gate import Gate

T = TypeVar("T")
_CORE, _TESTING = "infercore", "infercore.testing"


@contextmanager
def typed(backend: str, doing: str) -> Iterator[None]:
    """Raise lack of memory as `OutOfMemoryError`, other untyped failures as `PluginError`."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  (raised anew, typed)
        raise_typed(backend, doing, error)


def raise_typed(backend: str, doing: str, error: Exception) -> NoReturn:
    """Raise ``error`` as `typed` does; in an except clause, where a with block takes too long."""
    if isinstance(error, InferCoreError) or is_a_handlers(error):
        raise error
    if isinstance(error, MemoryError):
        raise OutOfMemoryError(
            f"backend {backend!r} ran out of memory while {doing}: {error}"
        ) from error
    raise PluginError(
        f"backend {backend!r} failed while {doing}: {described(error)}", plugin=backend
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
    if isinstance(error, InferCoreError) or not is_of_the_engine(error):
        return
    if isinstance(error, MemoryError):
        raise OutOfMemoryError(f"the engine ran out of memory: {error}") from error
    raise gate.fail(error) from error


def is_of_the_engine(error: BaseException) -> bool:
    """Whether the call itself raised ``error``: no Ctrl-C, and no handler of a signal."""
    return isinstance(error, Exception) and not is_a_handlers(error)


def described(error: BaseException) -> str:
    """Return type and text of ``error``, and where in the plugin it was raised, if it was."""
    place = raised_at(error)
    return f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")


def raised_at(error: BaseException) -> str | None:
    """Return file, line and function of the last frame in the plugin; None for none.

    The plugin is what the core called last: what that called in turn is an engine's own.
    """
    frames = list(frames_of(error.__traceback__))
    of_core = [i for i, (frame, _) in enumerate(frames) if _is_core(frame)]
    called = frames[of_core[-1] + 1 :] if of_core else frames
    if not called:
        return None
    package = _package(called[0][0])
    frame, line = [found for found in called if _package(found[0]) == package][-1]
    code = frame.f_code
    return f"{code.co_filename}, line {line}, in {code.co_name}"


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_core(frame: FrameType) -> bool:
    name = _name(frame)
    if name == _TESTING or name.startswith(f"{_TESTING}."):  # backends like any other
        return False
    return name == _CORE or name.startswith(f"{_CORE}.")


def _package(frame: FrameType) -> str:
    return _name(frame).split(".", maxsplit=1)[0]
