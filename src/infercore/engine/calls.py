"""What a plugin raises while something is opened, as typed errors."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from infercore.errors import InferCoreError, OutOfMemoryError, PluginError

if TYPE_CHECKING:
    from collections.abc import Iterator


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
