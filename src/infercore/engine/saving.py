"""Saving and restoring what a context holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from infercore.engine import blob, calls, plugin_checks
from infercore.engine.cells import n_cells_of
from infercore.errors import SnapshotError
from infercore.values.handlers import is_a_handlers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Buffer

    from infercore.engine.abort import Abort
    from infercore.engine.cells import CellMap
    from infercore.engine.native import Native
    from infercore.engine.results import Results
    from infercore.engine.room import Room
    from infercore.engine.sequences import Sequences
    from infercore.protocols.spi import FloatArray


class Handed(NamedTuple):
    """What saved state consists of, unpacked: it never leaves the process as it is."""

    header: Mapping[str, Any]
    payload: memoryview
    logits: memoryview

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes in memory, about."""
        return len(self.payload) + len(self.logits)

    def pack(self) -> bytes:
        """Return it as `Context.save_sequence` does."""
        return blob.pack(dict(self.header), self.payload, self.logits)


class Saving:
    """Packs what the engine saves, and checks what it is to restore before it sees it.

    ``identity`` returns what saved state must agree in; asked for only then, as digests take time.
    """

    def __init__(
        self,
        native: Native,
        cells: CellMap,
        results: Results,
        sequences: Sequences,
        room: Room,
        *,
        abort: Abort,
        identity: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._native = native
        self._inner = native.inner
        self._cells = cells
        self._results = results
        self._outputs = results.outputs
        self._sequences = sequences
        self._room = room
        self._abort = abort
        self.identity = identity
        self._n_seq_max = cells.n_seq_max
        self._n_vocab = results.outputs.n_vocab

    def save_state(self) -> bytes:
        """Return all sequences and the last row."""
        held = [s for s in range(self._n_seq_max) if self._cells.length(s)]
        row, row_of = self._native.judged(self._outputs.last)
        return self._pack(self._handed("state", held, self._inner.save_state, row, row_of))

    def save_sequence(self, seq_id: int, note: Mapping[str, Any] | None, *, row: bool) -> bytes:
        """Return one sequence, and the row behind its last token if that is asked for."""
        return self._pack(self.hand_over(seq_id, note, has_row=row))

    def hand_over(
        self, seq_id: int, note: Mapping[str, Any] | None = None, *, has_row: bool = True
    ) -> Handed:
        """Return what `save_sequence` packs, for `take_over` of another context."""
        index = self._outputs.of(seq_id) if has_row else None
        row = None if index is None else self._native.judged(self._outputs.row, index)
        row_of = [] if row is None else [seq_id]

        def save() -> Buffer:
            return self._inner.save_sequence(seq_id)

        return self._handed("sequence", [seq_id], save, row, row_of, note)

    def _handed(
        self,
        kind: str,
        seq_ids: list[int],
        save: Callable[[], Buffer],
        row: FloatArray | None,
        row_of: list[int],
        note: Mapping[str, Any] | None = None,
    ) -> Handed:
        self._abort.forget_late()  # an engine may compute to save what it put off
        logits = b"" if row is None else row.tobytes()  # and may lose the row by that
        header = {
            "kind": kind,
            **self.identity(),
            "n_seq_max": self._n_seq_max,
            "sequences": self._cells.describe(seq_ids),
            "row_of": row_of,
        }
        if note is not None:
            header["note"] = dict(note)
        payload = self._native.judged(save)
        try:
            memoryview(payload)
        except TypeError:
            call = "save_state()" if kind == "state" else f"save_sequence({seq_ids[0]})"
            made = f"returned {plugin_checks.shown(payload)}, not bytes"
            raise plugin_checks.wrong(self._native.backend, call, made) from None
        with calls.typed(self._native.backend, "packing saved state"):
            view = memoryview(self._given(memoryview(payload).cast("B")))
            return Handed(header, view, memoryview(logits))

    def _pack(self, handed: Handed) -> bytes:
        with calls.typed(self._native.backend, "packing saved state"):
            return handed.pack()

    def load_state(self, data: Buffer) -> None:
        """Restore what `save_state` returned; all is empty where the engine refuses it."""
        header, payload, logits = blob.unpack(data)
        expected = {"kind": "state", **self.identity(), "n_seq_max": self._n_seq_max}
        blob.require(header, expected)
        blob.check_held(header, self._n_seq_max, self._n_vocab)
        blob.check_row(logits, self._n_vocab)
        sequences = header["sequences"]
        self._room.check_restored(n_cells_of(sequences), sequences)
        self._results.forget()

        def restore() -> None:
            self._load(lambda: self._inner.load_state(self._given(payload)), "the context")
            self._cells.restore(sequences)
            for sequence in sequences:
                self._verify(sequence["seq_id"], "the context")

        _or_undo(restore, self._sequences.clear)
        self._take_row(logits, header["row_of"])

    def load_sequence(self, seq_id: int, data: Buffer) -> None:
        """Restore what `save_sequence` returned into ``seq_id``, which is empty if refused."""
        self.take_over(seq_id, Handed(*blob.unpack(data)))

    def take_over(self, seq_id: int, handed: Handed) -> None:
        """Restore what `hand_over` returned, as `load_sequence` does."""
        header, payload, logits = dict(handed.header), handed.payload, handed.logits
        blob.require(header, {"kind": "sequence", **self.identity()})
        blob.check_held(header, None, self._n_vocab)
        blob.check_row(logits, self._n_vocab)
        sequence = header["sequences"][0]
        n_others = self._cells.n_cells - self._room.given_back(seq_id, 0)
        self._room.check_restored(n_others + len(sequence["tokens"]), [sequence])

        def restore() -> None:
            what = f"sequence {seq_id}"
            self._load(lambda: self._load_sequence(seq_id, payload, sequence["tokens"]), what)
            self._cells.set_sequence(seq_id, sequence["runs"], sequence["tokens"])
            self._results.drop(seq_id)
            self._verify(seq_id, what)

        _or_undo(restore, lambda: self._sequences.empty(seq_id))
        self._take_row(logits, [seq_id])

    def _load_sequence(self, seq_id: int, payload: memoryview, tokens: Sequence[int]) -> None:
        """Nothing is restored by removing what is there: an engine may not do so by itself."""
        if tokens:
            self._inner.load_sequence(seq_id, self._given(payload))
        else:
            self._inner.seq_remove(seq_id, 0, -1)

    def _given(self, payload: memoryview) -> Buffer:
        """Return ``payload`` as the engine takes it, and as nobody changes it later.

        That is bytes, unless the engine says that a view will do.
        """
        if self._native.optional.takes_views:
            return payload
        own = payload.obj
        return own if isinstance(own, bytes) and len(own) == len(payload) else bytes(payload)

    @staticmethod
    def _load(work: Callable[[], None], what: str) -> None:
        try:
            work()
        except Exception as error:
            if is_a_handlers(error):
                raise
            raise _not_restored(
                f"the engine refused the saved state ({calls.described(error)}); "
                f"{what} is empty now",
                "engine",
            ) from error

    def _verify(self, seq_id: int, what: str) -> None:
        """Positions follow the engine: a restore that left others is not one."""
        if self._native.position(seq_id) != self._cells.next_position(seq_id):
            raise _not_restored(
                f"the engine holds other positions than the saved state; {what} is empty now",
                "positions",
            )

    def _take_row(self, data: memoryview, row_of: Sequence[int]) -> None:
        if data and row_of:
            self._outputs.restore(np.frombuffer(data, dtype=np.float32).copy(), row_of)


def _or_undo(work: Callable[[], None], undo: Callable[[], None]) -> None:
    try:
        work()
    except BaseException:  # an interruption too: the engine may hold either
        undo()
        raise


def _not_restored(message: str, reason: str) -> SnapshotError:
    error = SnapshotError(message, reason=reason)
    error.state_after = "cleared"
    return error
