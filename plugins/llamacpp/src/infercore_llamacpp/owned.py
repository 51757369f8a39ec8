"""What the engine allocated, freed with the last reference to it."""

from __future__ import annotations

import os
import sys
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_ONLY_HERE = 3  # a variable of the caller, the argument, and that of getrefcount


class Owned:
    """Frees ``handle`` by ``free`` when nobody refers to this any more; ``needs`` lives longer.

    A view over the engine's memory refers to it, so that a row of the last call that is read
    after its context was closed is still there. Not freed is what outlives the interpreter, as
    a thread may still be in the engine, and what a forked child has of its parent.
    """

    def __init__(
        self, free: Callable[[int], object], handle: int, needs: Owned | None = None
    ) -> None:
        # The finalizer keeps its arguments until it has run: the model stays that is needed.
        self.free = weakref.finalize(self, _free, free, handle, os.getpid(), needs)
        self.free.atexit = False


def let_go(owned: Owned | None) -> None:
    """Free at once what only the caller refers to, so that what comes up then is raised there.

    What is freed with its last reference raises nowhere: a Ctrl-C would be lost.
    """
    if owned is not None and sys.getrefcount(owned) <= _ONLY_HERE:
        owned.free()


def _free(free: Callable[[int], object], handle: int, process: int, _: Owned | None) -> None:
    if os.getpid() == process:
        free(handle)
