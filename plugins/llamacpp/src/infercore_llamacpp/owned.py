"""What the engine allocated, freed with the last reference to it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Owned:
    """Frees ``handle`` by ``free`` when nobody refers to this any more; ``needs`` lives longer.

    A view over the engine's memory refers to it, so that a row that is read after its context was
    closed is old, but not freed. At the interpreter's exit nothing is freed: a thread may still
    be in the engine.
    """

    def __init__(
        self, free: Callable[[int], object], handle: int, needs: Owned | None = None
    ) -> None:
        self.free = weakref.finalize(self, _free, free, handle, needs)
        self.free.atexit = False


def _free(free: Callable[[int], object], handle: int, needs: Owned | None) -> None:
    free(handle)
    del needs  # only now may the model go that the context is made on
