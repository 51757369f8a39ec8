"""Saving and restoring what a context holds."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.engine import blob, calls
from infercore.engine.cells import n_cells_of
from infercore.engine.context_sequences import Sequences
from infercore.errors import ContextOverflowError, OutputNotAvailableError, SnapshotError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Buffer


class Saving(Sequences):
    """save_state, load_state, save_sequence, load_sequence."""

    def save_state(self) -> bytes:
        """Return all sequences and the last logits as bytes; see `Context.save_state`."""
        with self._gate:
            self._need("state", declared=self.capabilities.state)
            held = [s for s in range(self.n_seq_max) if self._cells.length(s)]
            return self._pack("state", held, self._inner.save_state)

    def save_sequence(self, seq_id: int = 0, *, note: Mapping[str, Any] | None = None) -> bytes:
        """Return one sequence and the last logits as bytes; see `Context.save_sequence`.

        ``note`` is for the caller: it stands in the header (`blob.read_header`) as "note", and
        must be what JSON can say.
        """
        with self._gate:
            self._need("sequence_state", declared=self.capabilities.sequence_state)
            seq_id = self._sequence(seq_id)
            save = partial(self._inner.save_sequence, seq_id)
            return self._pack("sequence", [seq_id], save, note)

    def _pack(
        self,
        kind: str,
        seq_ids: list[int],
        save: Callable[[], Buffer],
        note: Mapping[str, Any] | None = None,
    ) -> bytes:
        self._forget_late_abort()  # an engine may compute to save what it put off
        has_row = kind == "state" or seq_ids[0] in self._row_of
        row = self._judged(self._last_row) if has_row else b""  # an engine may lose it by saving
        header = {
            "kind": kind,
            **self._identity,
            "n_seq_max": self.n_seq_max,
            "sequences": self._cells.describe(seq_ids),
            "row_of": list(self._row_of),
        }
        if note is not None:
            header["note"] = dict(note)
        payload = self._judged(save)
        with calls.typed(self._backend, "packing saved state"):
            return blob.pack(header, payload, row)

    def _last_row(self) -> bytes:
        try:
            return self._outputs.row(-1).tobytes()
        except OutputNotAvailableError:
            return b""

    def load_state(self, data: Buffer) -> None:
        """Restore what `save_state` returned; see `Context.load_state`.

        Raises `SnapshotError`: refused by the header, the state is *unchanged*; refused by the
        engine, it is *cleared*.
        """
        with self._gate:
            self._need("state", declared=self.capabilities.state)
            header, payload, logits = blob.unpack(data)
            blob.require(header, {"kind": "state", **self._identity, "n_seq_max": self.n_seq_max})
            blob.check_held(header, self.n_seq_max, self._n_vocab)
            blob.check_row(logits, self._n_vocab)
            self._check_fits(n_cells_of(header["sequences"]), header["sequences"])
            self._restore(
                lambda: self._inner.load_state(self._given(payload)),
                lambda: self._cells.restore(header["sequences"]),
                header["sequences"],
            )
            self._take_logits(logits, tuple(header["row_of"]))

    def load_sequence(self, seq_id: int, data: Buffer) -> None:
        """Restore what `save_sequence` returned, into ``seq_id``; errors as in `load_state`."""
        with self._gate:
            self._need("sequence_state", declared=self.capabilities.sequence_state)
            seq_id = self._sequence(seq_id)
            header, payload, logits = blob.unpack(data)
            blob.require(header, {"kind": "sequence", **self._identity})
            blob.check_held(header, None, self._n_vocab)
            blob.check_row(logits, self._n_vocab)
            sequence = header["sequences"][0]
            n_others = self._cells.n_cells - self._given_back(seq_id, 0)
            n_tokens = len(sequence["tokens"])
            self._check_fits(n_tokens + (n_others if self._window.shared else 0), [sequence])
            self._restore(
                lambda: self._load_sequence(seq_id, payload, n_tokens),
                lambda: self._cells.set_sequence(seq_id, sequence["runs"], sequence["tokens"]),
                [{**sequence, "seq_id": seq_id}],
            )
            self._take_logits(logits, (seq_id,))

    def _load_sequence(self, seq_id: int, payload: memoryview, n_tokens: int) -> None:
        """Nothing is restored by removing what is there: an engine may not do so by itself."""
        if n_tokens:
            self._inner.load_sequence(seq_id, self._given(payload))
        else:
            self._inner.seq_remove(seq_id, 0, -1)

    def _given(self, payload: memoryview) -> Buffer:
        """Return ``payload`` as the engine takes it: a copy unless it says that a view will do."""
        return payload if getattr(self._inner, "takes_views", False) else bytes(payload)

    def _check_fits(self, n_cells: int, sequences: list[dict[str, Any]]) -> None:
        longest = max((len(sequence["tokens"]) for sequence in sequences), default=0)
        needed, n_ctx = (n_cells, self.n_ctx) if self._window.shared else (longest, self.n_ctx_seq)
        if needed > n_ctx:
            raise ContextOverflowError(
                stage="restore", resident_tokens=0, additional_tokens=needed, n_ctx=n_ctx
            )

    def _restore(
        self,
        work: Callable[[], None],
        enter: Callable[[], None],
        sequences: list[dict[str, Any]],
    ) -> None:
        """Let the engine restore, and ``enter`` it in the books; empty where that breaks off."""
        self._forget_outputs()
        try:
            try:
                work()
            except Exception as error:
                raise _not_restored(
                    f"the engine refused the saved state ({error}); the context is empty now",
                    "engine",
                ) from error
            enter()
            self._verify(sequences)
        except BaseException:  # an interruption too: the engine may hold either
            self._clear()
            raise

    def _verify(self, sequences: list[dict[str, Any]]) -> None:
        """Positions follow the engine: a restore that left others is not one."""
        for sequence in sequences:
            seq_id = sequence["seq_id"]
            if self._position(seq_id) != self._cells.next_position(seq_id):
                raise _not_restored(
                    "the engine holds other positions than the saved state; the context is empty",
                    "positions",
                )

    def _take_logits(self, data: memoryview, row_of: tuple[int, ...]) -> None:
        if data:
            self._row_of = row_of
            row = np.frombuffer(data, dtype=np.float32).copy()
            self._outputs.set_gathered(row.reshape(1, -1), all_rows=False)


def _not_restored(message: str, reason: str) -> SnapshotError:
    error = SnapshotError(message, reason=reason)
    error.state_after = "cleared"
    return error
