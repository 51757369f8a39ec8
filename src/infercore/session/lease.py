"""A context that several sessions share, each with a sequence of its own."""

from __future__ import annotations

import threading
from typing import Any


class SharedContext:
    """Hands out the sequences of a context; closes it when the last one is given back."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self._lock = threading.Lock()
        self._free = list(range(context.n_seq_max - 1, -1, -1))
        self._n_taken = 0

    def take(self) -> int | None:
        """Return a free sequence id, None where there is none."""
        with self._lock:
            if not self._free:
                return None
            self._n_taken += 1
            return self._free.pop()

    def give_back(self, seq_id: int) -> bool:
        """Take a sequence back; True when it was the last one, and the context is closed now."""
        with self._lock:
            self._free.append(seq_id)
            self._n_taken -= 1
            last = self._n_taken == 0
        if last:
            self.context.close()
        return last
