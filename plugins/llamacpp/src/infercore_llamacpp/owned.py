"""What the engine allocated, freed with the last reference to it."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


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
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        if needs is not None:
            needs.users.add(self)

    def use(self) -> Use:
        """Return what keeps this alive, for a view."""
        use = Use(self)
        self.users.add(use)
        return use

    def let_go(self) -> None:
        """Free at once what nobody uses, so that what comes up then is raised to the caller.

        What is freed with its last reference raises nowhere: a Ctrl-C would be lost.
        """
        if not self.users:
            self.free()


class Use:
    """Refers to an `Owned`."""

    def __init__(self, owned: Owned) -> None:
        self._owned = owned


def _free(free: Callable[[int], object], handle: int, process: int, _: Owned | None) -> None:
    if os.getpid() == process:
        free(handle)
