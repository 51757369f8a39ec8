"""The context over the stateful form: one sequence, kept inside the engine.

The fallback where the paged form cannot be made. Removing marks slots as holes that the attention
mask leaves out, which costs nothing; when the holes outgrow the window, the state is rewritten
without them. Windows and biases by distance count slots: with those, that is done before each step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov

from infercore import Capabilities, UnsupportedFeatureError
from infercore_openvino import state
from infercore_openvino.base import BaseContext
from infercore_openvino.compiled import NOTHING
from infercore_openvino.engine import BACKEND
from infercore_openvino.limits import computing
from infercore_openvino.settings import FLASH_ATTENTION, POOLING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from infercore_openvino.additions import Additions
    from infercore_openvino.base import Tokens
    from infercore_openvino.compiled import Compiled, CompiledGraphs
    from infercore_openvino.graph import Graph
    from infercore_openvino.settings import Settings

_SEQUENCE = 0
_SLOTS = 2  # the axis of a layer's state that has a place for each token
_STORED_AS: dict[str, Any] = {"f16": np.float16}


def capabilities(settings: Settings, graph: Graph) -> Capabilities:
    """Return what a stateful context can do; holes would change windows and biases."""
    return Capabilities(
        kv_remove="suffix" if graph.counts_slots else "any",
        state=True,
        sequence_state=True,
        logits_all=True,
        embeddings=True,
        pooling=POOLING,
        abort=True,
        live_threads=True,
        lora=True,
        kv_types=tuple(name for name in settings.kv_types if name != "u8"),
        flash_attention=FLASH_ATTENTION,
    )


class StatefulContext(BaseContext):
    """One sequence: the position of each slot, and whether it is still held."""

    takes_views = True

    @staticmethod
    def check(settings: Settings) -> None:
        """Refuse more than one sequence, and a cache in 8 bits, whose saved state is not exact."""
        if settings.kv_type == "u8":
            hint = "the stateful form cannot save it exactly; use the paged form, or give 'f16'"
            raise UnsupportedFeatureError(
                f"type_k='u8' is not supported; {hint}",
                feature="type_k",
                backend=BACKEND,
                hint=hint,
            )
        if settings.n_seq_max > 1:
            hint = "the stateful form holds one sequence; use the paged form"
            raise UnsupportedFeatureError(
                f"n_seq_max={settings.n_seq_max} is not supported; {hint}",
                feature="n_seq_max",
                backend=BACKEND,
                hint=hint,
            )

    def __init__(
        self,
        compiled: Compiled,
        graphs: CompiledGraphs,
        settings: Settings,
        added: Additions = NOTHING,
    ) -> None:
        super().__init__(compiled, graphs, settings, added)
        self.capabilities = capabilities(settings, compiled.graph)
        self._is_cleared = True
        self._positions: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._held: npt.NDArray[np.bool_] = np.empty(0, dtype=np.bool_)

    def n_past(self, seq_id: int) -> int:  # noqa: ARG002  (there is one)
        """Return the next position."""
        held = self._positions[self._held]
        return int(held.max()) + 1 if len(held) else 0

    def _step(self, tokens: Tokens, seq_id: int, out_rows: Any, hidden_rows: Any) -> None:
        self._make_room()
        first = self.n_past(seq_id)
        positions = np.arange(first, first + len(tokens), dtype=np.int64)
        after = (
            np.append(self._positions, positions),
            np.append(self._held, np.ones(len(tokens), dtype=np.bool_)),
        )
        try:
            self._infer(self._request, tokens, positions, after[1], out_rows, hidden_rows)
            self._positions, self._held = after
        except BaseException:
            self._recover(*after)
            raise

    def _recover(self, positions: Any, held: Any) -> None:
        """After a failure: what all layers have is held, and nothing where they differ."""
        try:
            n_slots = {data.shape[_SLOTS] for data in self._data().values()}
        except Exception:  # noqa: BLE001  (then nobody knows)
            n_slots = set()
        if n_slots == {len(held)}:
            self._positions, self._held = positions, held
        elif n_slots != {len(self._held)}:
            self.clear()

    def _infer(
        self, request: Any, tokens: Any, positions: Any, held: Any, out_rows: Any, hidden_rows: Any
    ) -> None:
        inputs = self._compiled.given(
            input_ids=tokens[None],
            attention_mask=held[None],
            position_ids=positions[None],
            beam_idx=[_SEQUENCE],
            out_rows=out_rows,
            hidden_rows=hidden_rows,
        )
        with computing("a compute step"):
            request.infer(inputs, share_inputs=True, share_outputs=True)

    # -- removing ------------------------------------------------------------------------------

    def seq_remove(self, seq_id: int, p0: int, p1: int) -> bool:  # noqa: ARG002
        """Remove positions [p0, p1)."""
        end = self._positions.max(initial=-1) + 1 if p1 < 0 else p1
        self._held &= ~((self._positions >= p0) & (self._positions < end))
        if not self._held.any():
            self.clear()
        return True

    def clear(self) -> None:
        """Remove everything; where that is broken off, the next call does it."""
        self._is_cleared = False
        self._positions, self._held = self._positions[:0], self._held[:0]
        self._finish_clear()

    def _finish_clear(self) -> None:
        if not self._is_cleared:
            self._request.reset_state()
            self._is_cleared = True

    def _make_room(self) -> None:
        """Rewrite the state without its holes, once there are too many."""
        self._finish_clear()
        most = 0 if self._compiled.graph.counts_slots else self._settings.n_ctx
        if np.count_nonzero(~self._held) > most:
            kept = self._positions[self._held]
            arrays = {name: data[:, :, self._held] for name, data in self._data().items()}
            self._put(arrays, kept)

    # -- state ---------------------------------------------------------------------------------

    def _data(self) -> dict[str, Any]:
        return {variable.name: variable.state.data for variable in self._request.query_state()}

    def _put(self, arrays: Mapping[str, Any], positions: Any) -> None:
        """Hold ``arrays``, the slots of ``positions``, alone; nothing, where that is broken off."""
        held = np.ones(len(positions), dtype=np.bool_)
        try:
            for variable in self._request.query_state():
                variable.state = ov.Tensor(arrays[variable.name])
            self._positions, self._held = positions, held
        except BaseException:
            self.clear()
            raise

    def _move_to(self, compiled: Compiled, request: Any, added: Additions) -> None:  # noqa: ARG002
        if len(self._held):
            arrays = self._data()
            for variable in request.query_state():
                variable.state = ov.Tensor(arrays[variable.name])

    def save_sequence(self, seq_id: int) -> bytes:  # noqa: ARG002
        """Return the sequence as bytes; numbers in the type of the cache."""
        stored_as = _STORED_AS.get(self._settings.kv_type, np.float32)
        data = self._data() if self._held.any() else {}
        arrays = {
            name: array[:, :, self._held].astype(stored_as, order="C")
            for name, array in data.items()
        }
        shapes = {name: array.shape for name, array in arrays.items()}
        header = {**self._identity(), **state.BY_NAME, "n": int(self._held.sum()), "shapes": shapes}
        positions = self._positions[self._held].astype("<i8")
        return state.pack(header, [positions.data, *(array.data for array in arrays.values())])

    def load_sequence(self, seq_id: int, data: bytes | memoryview) -> None:  # noqa: ARG002
        """Restore what `save_sequence` returned."""
        self.clear()
        header, view = state.unpack(data, {**self._identity(), **state.BY_NAME})
        positions, view = state.read_positions(view, [header["n"]])
        stored_as = _STORED_AS.get(self._settings.kv_type, np.float32)
        arrays = state.read_arrays(view, header["shapes"].values(), stored_as)
        if arrays:
            named = zip(header["shapes"], arrays, strict=True)
            self._put({name: array.astype(np.float32) for name, array in named}, positions[0])

    def save_state(self) -> bytes:
        """Return everything as bytes."""
        return self.save_sequence(_SEQUENCE)

    def load_state(self, data: bytes | memoryview) -> None:
        """Restore what `save_state` returned."""
        self.load_sequence(_SEQUENCE, data)

    def set_causal_attention(self, on: bool) -> None:  # noqa: FBT001  (the contract's signature)
        """Let each token read what stands before it, or all that is held."""
        self._change(settings=replace(self._settings, causal=on))
        self.effective["attention_type"] = "causal" if on else "non-causal"

    def warmup(self) -> None:
        """Run a token in a request of its own."""
        first = np.zeros(1)
        self._infer(self._compiled.new_request(self._added), first, first, first + 1, [0], [])
