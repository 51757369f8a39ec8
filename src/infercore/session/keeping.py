"""Where sequences go that lose their cells, and what may be found there again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infercore.engine import blob
from infercore.errors import SessionFatalError
from infercore.session.store import n_bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from infercore.session.sequence import Sequence
    from infercore.session.shared_engine import SharedEngine
    from infercore.session.store import Found, Store
    from infercore.session.tally import Tally

WORTH_KEEPING = 32
"""Fewer tokens than these are evaluated sooner than they are moved out and back."""


class Keeping:
    """Moves sequences out: to a store for all, or to the sequence itself.

    What was cut is of use to nobody else, so it stays with its sequence; and up to ``own_bytes`` of
    others do, where each has bits of its own.
    """

    def __init__(
        self,
        engine: SharedEngine,
        sequences: Iterable[Sequence],
        tally: Tally,
        *,
        store: Store | None = None,
        own_bytes: int = 0,
    ) -> None:
        self._engine = engine
        self._sequences = sequences
        self._tally = tally
        self._store = store
        self._own_bytes = own_bytes

    @property
    def stays_in_place(self) -> bool:
        """Whether what closed sessions held may stay where it is until the place is wanted.

        Only where host memory would keep it otherwise, and where it costs others nothing: each
        sequence has a cache of its own, which no other's step looks at.
        """
        engine = self._engine
        has_memory = self._store is not None and self._store.has_memory
        return has_memory and engine.copies_caches and engine.multiple is None

    def move_out(self, sequence: Sequence) -> None:
        """Keep what ``sequence`` holds, where there is a place for it."""
        engine = self._engine
        own = sequence.is_cut or self._own_bytes > 0
        if not engine.context.capabilities.sequence_state or (self._store is None and not own):
            return
        engine.trim(sequence)
        if not sequence.n_held or (not own and self._is_stored(sequence)):
            return
        try:
            row = not engine.can_truncate  # else the last token is evaluated anew
            data = engine.context.hand_over(sequence.own_id, row=row)
        except SessionFatalError:
            raise
        except Exception:  # noqa: BLE001  (what cannot be kept is evaluated anew)
            return
        if own:
            kept = sum(n_bytes_of(s.saved) for s in self._sequences if s.saved is not None)
            if not sequence.is_cut and kept + data.n_bytes > self._own_bytes:
                return
            sequence.save(data)
        elif self._store is not None:
            held = sequence.tokens[: sequence.n_held]
            self._store.put(sequence.namespace, sequence.identity, held, data)
        self._tally.n_moved_out += 1

    def _is_stored(self, sequence: Sequence) -> bool:
        """Whether memory has all that ``sequence`` holds, which counts as used then."""
        held = sequence.tokens[: sequence.n_held]
        return self._store is not None and self._store.use(
            sequence.namespace, sequence.identity, held
        )

    def before_cut(self, sequence: Sequence, n_keep: int) -> None:
        """Move ``sequence`` out if most of what it holds is given up: it may be asked for again."""
        n_lost = sequence.n_held - n_keep
        worthless = sequence.is_cut or n_lost < max(WORTH_KEEPING, n_keep)
        if self._store is not None and self._engine.can_truncate and not worthless:
            self.move_out(sequence)

    def share_state(self, sequence: Sequence, data: bytes) -> None:
        """Let others find ``data``, the state of ``sequence`` as it is.

        Where the engine cannot go back a sequence is of use to others only as it was at such a
        point, not at its end.
        """
        if self._store is not None and not self._engine.can_truncate and not sequence.is_cut:
            self._store.put(sequence.namespace, sequence.identity, sequence.tokens, data)

    def find(self, sequence: Sequence, n_most: int) -> Found | None:
        """Return what is stored of the first ``n_most`` tokens that ``sequence`` wants."""
        if self._store is None or sequence.is_cold or sequence.saved is not None:
            return None
        wanted = sequence.tokens[: max(0, n_most)]
        return self._store.find(sequence.namespace, sequence.identity, wanted)

    def flush(self, namespace: str | None) -> None:
        """Forget what is stored, in all namespaces or in one."""
        if self._store is not None:
            self._store.flush(namespace)

    def close(self) -> None:
        """Let the store write what is to outlast the program."""
        if self._store is not None:
            self._store.close()


def n_tokens_of(data: bytes) -> int:
    """Return how many tokens a saved sequence holds, as its header says; 0 where it is damaged."""
    try:
        return len(blob.read_header(data)["sequences"][0]["tokens"])
    except (LookupError, TypeError):
        return 0
