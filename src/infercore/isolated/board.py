"""What a worker shows without being asked: a page of memory that outlives it."""

from __future__ import annotations

import mmap
import struct
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZE = 4096
_HEAD = struct.Struct("<dI")
_COUNTS = struct.Struct("<9Q")
_COUNTS_AT = SIZE - _COUNTS.size
_OBSERVED_AT = _COUNTS_AT - 1
_LANE = struct.Struct("=QQ")
_LANE_AT = _OBSERVED_AT // 8 * 8 - _LANE.size
_FRESH_AT = SIZE // 2
_N = struct.Struct("<I")
_MOST = (_LANE_AT - _FRESH_AT - _N.size) // 4
PING, STEP, LOG = 0, -1, -2
"""In place of a request's number: nobody waits for it; no answer, but a step, or a log record."""
COUNTED = (
    *("prompt_tokens", "cached_tokens", "restored_tokens", "generated_tokens", "n_steps"),
    *("n_batched", "n_preempted", "n_moved_out", "n_restarts"),
)
"""What a worker counts, in this order."""


OF_POOL = 1 << 31
"""Added to the number of a request that is no session's: so it stands where sessions do."""


class Board:
    """Which sessions are in the engine call that runs, and until when it should have ended."""

    def __init__(self, file: int) -> None:
        self._page = mmap.mmap(file, SIZE)
        lane = memoryview(self._page)[_LANE_AT : _LANE_AT + _LANE.size]
        self._lane = lane.cast("Q")  # each word is read and written at once

    def begin(self, ids: Sequence[int], seconds: float) -> None:
        """Note that a call for the sessions ``ids`` begins, which may take ``seconds``."""
        ids = ids[:_MOST]
        struct.pack_into(
            f"<dI{len(ids)}I", self._page, 0, time.monotonic() + seconds, len(ids), *ids
        )

    def end(self) -> None:
        """Note that no call runs."""
        _HEAD.pack_into(self._page, 0, 0.0, 0)

    @property
    def is_late(self) -> bool:
        """Whether the call that runs should have ended."""
        until, _ = _HEAD.unpack_from(self._page, 0)
        return bool(until) and time.monotonic() > until

    @property
    def in_call(self) -> list[int] | None:
        """The sessions of the call that runs, None where none does."""
        until, n = _HEAD.unpack_from(self._page, 0)
        if not until:
            return None
        return list(struct.unpack_from(f"<{min(n, _MOST)}I", self._page, _HEAD.size))

    def begin_outside(self, ids: Sequence[int]) -> None:
        """Note whose calls have begun and have not been in an engine call yet."""
        ids = ids[:_MOST]
        struct.pack_into(f"<I{len(ids)}I", self._page, _FRESH_AT, len(ids), *ids)

    @property
    def outside(self) -> set[int]:
        """Whose calls have begun and have not been in an engine call yet."""
        n = min(_N.unpack_from(self._page, _FRESH_AT)[0], _MOST)
        return set(struct.unpack_from(f"<{n}I", self._page, _FRESH_AT + _N.size))

    def count(self, counts: Sequence[int]) -> None:
        """Note what was done so far, in the order of `COUNTED`."""
        _COUNTS.pack_into(self._page, _COUNTS_AT, *counts)

    @property
    def counts(self) -> tuple[int, ...]:
        """What was done so far, in the order of `COUNTED`."""
        return _COUNTS.unpack_from(self._page, _COUNTS_AT)

    @property
    def is_observed(self) -> bool:
        """Whether the program wants to hear of steps."""
        return bool(self._page[_OBSERVED_AT])

    @is_observed.setter
    def is_observed(self, value: bool) -> None:
        self._page[_OBSERVED_AT] = value

    @property
    def asked(self) -> tuple[int, int]:
        """Number and session of the request for a chunk that the reader in the lane made last so.

        They are one word, so nobody sees the number of one reader with the session of another.
        """
        return divmod(self._lane[0], OF_POOL)

    def ask(self, number: int, target: int) -> bool:
        """Ask for a session's chunk if the worker will look; False where it was not to."""
        lane = self._lane
        if lane[1] != target:
            return False
        lane[0] = number * OF_POOL + target
        return True

    @property
    def armed(self) -> int:
        """The session whose next item makes the worker look at `asked`, 0 for none.

        Each side writes its word before it reads the other's, so one of them sees both: where this
        is another session the reader sends a frame.
        """
        return self._lane[1]

    @armed.setter
    def armed(self, target: int) -> None:
        self._lane[1] = target

    def close(self) -> None:
        """Let go of the page."""
        self._lane.release()
        self._page.close()
