"""The context over a graph with states that sum up a text: recurrent models, and hybrid ones.

Such a state has no end to cut, so a sequence is kept or removed whole. Each sequence has an infer
request of its own, whose variables are its state; they are saved, copied and restored together.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov

from infercore import Capabilities, UnsupportedFeatureError
from infercore_openvino import state
from infercore_openvino.additions import give_rows
from infercore_openvino.base import BaseContext
from infercore_openvino.compiled import NOTHING
from infercore_openvino.engine import BACKEND
from infercore_openvino.limits import computing
from infercore_openvino.settings import FLASH_ATTENTION, POOLING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from infercore_openvino.additions import Additions
    from infercore_openvino.base import Floats, Tokens
    from infercore_openvino.compiled import Compiled, CompiledGraphs
    from infercore_openvino.settings import Settings

_PROBED = 6  # tokens


def capabilities(settings: Settings) -> Capabilities:
    """Return what a recurrent context can do."""
    return Capabilities(
        kv_copy="full",
        multi_sequence=True,
        state=True,
        sequence_state=True,
        logits_all=True,
        embeddings=True,
        pooling=POOLING,
        abort=True,
        live_threads=True,
        kv_types=settings.kv_types,
        flash_attention=FLASH_ATTENTION,
    )


class RecurrentContext(BaseContext):
    """Sequences that are states: how many tokens each has seen, and the request that has it."""

    takes_views = True

    @staticmethod
    def check(settings: Settings) -> None:
        """Refuse what a graph with such states has no place for."""
        wrong = {
            "attention_type": (not settings.causal, "each token reads a state of those before"),
            "adapters": (bool(settings.adapters), "its matrices have no known names"),
        }
        for name, (is_wrong, why) in wrong.items():
            if is_wrong:
                raise _refuse(f"{name} of a recurrent model", f"{why}; leave it out")

    def __init__(
        self,
        compiled: Compiled,
        graphs: CompiledGraphs,
        settings: Settings,
        added: Additions = NOTHING,
    ) -> None:
        super().__init__(compiled, graphs, settings, added)
        self.capabilities = capabilities(settings)
        self._n = [0] * settings.n_seq_max
        self._requests = [self._request, *(compiled.new_request(added) for _ in self._n[1:])]
        if compiled.goes_on is None:
            compiled.goes_on = self._goes_on()
        if not compiled.goes_on:
            raise _refuse("this graph", "it gives other logits when a text comes in pieces")

    def _goes_on(self) -> bool:
        """Whether a text in pieces gives the logits of the whole, with its states between them."""
        tokens = np.arange(_PROBED)
        rows = []
        for pieces in ([tokens], [tokens[:2], tokens[2:3], tokens[3:]]):
            request, n = self._compiled.new_request(self._added), 0
            for piece in pieces:
                self._infer(request, piece, n, [len(piece) - 1], [])
                n += len(piece)
            rows.append(request.get_output_tensor(0).data.reshape(-1).copy())
        whole, in_pieces = rows
        return np.allclose(whole, in_pieces, rtol=0, atol=self.tolerance)

    def n_past(self, seq_id: int) -> int:
        """Return the sequence's next position."""
        return self._n[seq_id]

    # -- appending -----------------------------------------------------------------------------

    def _step(self, tokens: Tokens, seq_id: int, out_rows: Any, hidden_rows: Any) -> None:
        self._request = self._requests[seq_id]
        try:
            self._infer(self._request, tokens, self._n[seq_id], out_rows, hidden_rows)
        except BaseException:
            self._forget(seq_id)  # some layers have seen the tokens, others not
            raise
        self._n[seq_id] += len(tokens)

    def _infer(
        self, request: Any, tokens: Any, n_past: int, out_rows: Any, hidden_rows: Any
    ) -> None:
        end = n_past + len(tokens)
        inputs = self._compiled.given(
            input_ids=tokens[None],
            attention_mask=np.ones((1, end), dtype=np.int64),
            position_ids=np.arange(n_past, end)[None],
            beam_idx=[0],
            out_rows=out_rows,
            hidden_rows=hidden_rows,
        )
        with computing("a compute step"):
            request.infer(inputs, share_inputs=True, share_outputs=True)

    def decode_batch(
        self,
        tokens: Tokens,
        positions: npt.NDArray[np.int32],  # noqa: ARG002  (each goes to its sequence's end)
        seq_ids: Sequence[Sequence[int]],
        wanted: npt.NDArray[np.bool_],
    ) -> None:
        """Append tokens, one sequence after the other: the engine has no call for several."""
        self._decode_each(tokens, seq_ids, wanted)

    def decode_vectors(
        self,
        rows: Floats,
        positions: npt.NDArray[np.int32],  # noqa: ARG002  (each goes to its sequence's end)
        seq_ids: npt.NDArray[np.int32],
        wanted: npt.NDArray[np.bool_],
    ) -> None:
        """Append ``rows`` [n, n_embd] in place of tokens, one sequence after the other."""
        self._take_rows()
        tokens = np.zeros(len(rows), dtype=np.int32)
        self._decode_each(tokens, [(s,) for s in seq_ids.tolist()], wanted, rows)

    def _decode_each(
        self, tokens: Tokens, seq_ids: Sequence[Sequence[int]], wanted: Any, given: Any = None
    ) -> None:
        self._begin_outputs()
        rows: dict[int, Floats] = {}
        hidden: dict[int, Floats] = {}
        for s in sorted({s for ids in seq_ids for s in ids}):
            places = [i for i, ids in enumerate(seq_ids) if s in ids]
            for start in range(0, len(places), self.n_ubatch):
                self._check_abort(s)
                part = places[start : start + self.n_ubatch]
                vectors = None if given is None else given[part]
                with self._given(s, vectors):
                    self._part(tokens, part, s, wanted, (rows, hidden))
            if self._embeddings:
                self._hidden[s] = np.stack([hidden[i] for i in places])
        self._logits.add(_in_order(rows), last=True)
        if self._embeddings:
            self._hidden_all.add(_in_order(hidden), last=True)
        self.n_evaluated += len(tokens)

    @contextmanager
    def _given(self, seq_id: int, rows: Floats | None) -> Iterator[None]:
        """Let the sequence's own request take ``rows`` in place of the next step's tokens."""
        if rows is None:
            yield
            return
        request = self._requests[seq_id]
        give_rows(request, rows)
        try:
            yield
        finally:
            give_rows(request, rows[:0])

    def _part(self, tokens: Tokens, part: list[int], s: int, wanted: Any, found: Any) -> None:
        out = np.flatnonzero(wanted[part])
        self._step(tokens[part], s, out, self._wanted(tokens[part]))
        made = self._request.get_output_tensor(0).data
        made = made.reshape(-1, made.shape[-1])
        for row, at in zip(made, out.tolist(), strict=True):
            found[0].setdefault(part[at], row.copy())  # of several, the first one's
        if self._embeddings:
            states = self._request.get_output_tensor(1).data
            for row, at in zip(states.reshape(-1, states.shape[-1]), part, strict=True):
                found[1].setdefault(at, row.copy())

    # -- changing ------------------------------------------------------------------------------

    def _forget(self, seq_id: int) -> None:
        self._requests[seq_id].reset_state()
        self._n[seq_id] = 0

    def seq_remove(self, seq_id: int, p0: int, p1: int) -> bool:  # noqa: ARG002  (all of it)
        """Remove the sequence: the core asks for no part of one that has none."""
        self._forget(seq_id)
        return True

    def seq_copy(self, src: int, dst: int, p0: int, p1: int) -> None:  # noqa: ARG002  (all of it)
        """Let ``dst`` hold what ``src`` holds."""
        self._put(self._requests[dst], self._data(src))
        self._n[dst] = self._n[src]

    def clear(self) -> None:
        """Remove everything."""
        for seq_id in range(len(self._n)):
            self._forget(seq_id)

    # -- state ---------------------------------------------------------------------------------

    def _data(self, seq_id: int) -> dict[str, Any]:
        return {v.name: v.state.data.copy() for v in self._requests[seq_id].query_state()}

    @staticmethod
    def _put(request: Any, arrays: Mapping[str, Any]) -> None:
        for variable in request.query_state():
            variable.state = ov.Tensor(arrays[variable.name])

    def _move_to(self, compiled: Compiled, request: Any, added: Additions) -> None:
        fresh = [request, *(compiled.new_request(added) for _ in self._n[1:])]
        for seq_id, new in enumerate(fresh):
            if self._n[seq_id]:
                self._put(new, self._data(seq_id))
        self._requests = fresh

    def _pack(self, seq_ids: Sequence[int]) -> bytes:
        held: list[dict[str, Any]] = []
        parts: list[memoryview] = []
        for s in seq_ids:
            arrays = self._data(s)
            shapes = {name: array.shape for name, array in arrays.items()}
            held.append({"seq_id": s, "n": self._n[s], "shapes": shapes})
            parts += [array.astype(np.float32).data for array in arrays.values()]
        return state.pack({**self._identity(), **state.BY_NAME, "sequences": held}, parts)

    def _unpack(self, data: bytes | memoryview, seq_id: int | None = None) -> None:
        header, view = state.unpack(data, {**self._identity(), **state.BY_NAME})
        saved = header["sequences"]
        if seq_id is not None and len(saved) != 1:
            raise state.refused("does not hold exactly one sequence")
        shapes = [shape for entry in saved for shape in entry["shapes"].values()]
        stored = state.read_arrays(view, shapes, np.float32)
        if not all(np.isfinite(array).all() for array in stored):
            raise state.refused("has numbers that are not finite")
        arrays = iter(stored)
        for entry in saved:
            target = entry["seq_id"] if seq_id is None else seq_id
            self._put(self._requests[target], {name: next(arrays) for name in entry["shapes"]})
            self._n[target] = int(entry["n"])

    def save_sequence(self, seq_id: int) -> bytes:
        """Return the sequence as bytes."""
        return self._pack([seq_id])

    def load_sequence(self, seq_id: int, data: bytes | memoryview) -> None:
        """Restore what `save_sequence` returned."""
        self._unpack(data, seq_id)

    def save_state(self) -> bytes:
        """Return all sequences as bytes."""
        return self._pack([s for s, n in enumerate(self._n) if n])

    def load_state(self, data: bytes | memoryview) -> None:
        """Restore what `save_state` returned."""
        self.clear()
        self._unpack(data)

    def warmup(self) -> None:
        """Run a token in a request of its own."""
        self._infer(self._compiled.new_request(self._added), np.zeros(1), 0, [0], [])

    def close(self) -> None:
        """Drop the requests and the use of the compiled graph."""
        self._requests = []
        super().close()


def _in_order(rows: dict[int, Any]) -> Any:
    return np.array([rows[i] for i in sorted(rows)])


def _refuse(feature: str, hint: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(feature=feature, backend=BACKEND, hint=hint)
