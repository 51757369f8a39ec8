"""One llama.cpp context: what it holds, how that is saved, and its live controls."""

from __future__ import annotations

import ctypes
import hashlib
import os
from typing import TYPE_CHECKING

import numpy as np

from infercore_llamacpp import log, state
from infercore_llamacpp.decoding import NO_ROOM, Decoding
from infercore_llamacpp.library import api
from infercore_llamacpp.settings import refuse
from infercore_llamacpp.threads import ender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infercore import AdapterSpec
    from infercore_llamacpp.decoding import Floats


_end_team = ender(api._lib)  # noqa: SLF001  (the library has no public name)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_end_team)  # a child that computes anew would wait for the team


_FLOATS = ctypes.POINTER(ctypes.c_float)


@log.raising
class LlamaContext(Decoding):
    """A KV cache on a loaded model. Arguments have been checked by the caller."""

    takes_views = True

    # -- sequences -----------------------------------------------------------------------------

    def seq_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        """Remove positions [p0, p1); False, and unchanged, where the engine cannot."""
        return self.memory.remove(seq_id, p0, p1)

    def seq_copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Let ``dst`` hold what ``src`` holds in [p0, p1)."""
        self.memory.copy(src, dst, p0, p1)

    def seq_shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add ``delta`` to the positions in [p0, p1)."""
        self.memory.shift(seq_id, p0, p1, delta)

    def seq_divide(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions in [p0, p1) by ``d``."""
        self.memory.divide(seq_id, p0, p1, d)

    def clear(self) -> None:
        """Remove everything."""
        self.memory.clear()

    # -- saved state ---------------------------------------------------------------------------

    def save_state(self) -> memoryview:
        """Return all sequences as bytes."""
        self._carry_out_pending()
        return state.save(self.handle)

    def load_state(self, data: bytes | memoryview) -> None:
        """Replace everything by what `save_state` returned; cleared where it is refused."""
        self._carry_out_pending()
        state.load(self.handle, self.memory, data, self.model.traits)

    def save_sequence(self, seq_id: int) -> memoryview:
        """Return one sequence as bytes."""
        if not self.memory.may_read(seq_id):
            self._carry_out_pending()  # which evaluates a token
        return state.save_sequence(self.handle, seq_id)

    def sequence_size(self, seq_id: int) -> int:
        """Return how many bytes `save_sequence` gives."""
        size: int = api.llama_state_seq_get_size(self.handle, seq_id)
        return size

    def load_sequence(self, seq_id: int, data: bytes | memoryview) -> None:
        """Replace a sequence by what `save_sequence` returned; emptied where it is refused."""
        if not self.memory.may_write(seq_id):
            self._carry_out_pending()
        state.load_sequence(self.handle, self.memory, seq_id, data, self.model.traits)

    # -- live controls -------------------------------------------------------------------------

    release_threads = staticmethod(_end_team)

    def set_threads(self, n: int, n_batch: int) -> None:
        """Set the thread counts for single tokens and for batches."""
        api.llama_set_n_threads(self.handle, n, n_batch)
        self._effective.update(n_threads=n, n_threads_batch=n_batch)

    def set_embeddings(self, on: bool) -> None:  # noqa: FBT001  (the contract's signature)
        """Switch the output of embeddings on or off."""
        if not on and self.memory.handle is None:
            raise refuse("set_embeddings(False)", "this model only makes embeddings")
        api.llama_set_embeddings(self.handle, on)
        self._effective["embeddings"] = on
        self._make_embeddings(on)
        self._rows = ()

    def set_causal_attention(self, on: bool) -> None:  # noqa: FBT001
        """Switch between causal and bidirectional attention."""
        api.llama_set_causal_attn(self.handle, on)
        self._effective["attention_type"] = "causal" if on else "non-causal"

    def abort(self) -> None:
        """Stop the call that runs; from any thread."""
        self._switch.set()

    def clear_abort(self) -> None:
        """Let later calls run."""
        self._switch.clear()

    def set_abort_callback(self, callback: Callable[[], bool] | None) -> None:
        """Ask ``callback`` at every step; what it raises is raised by the call it stopped."""
        self._switch.ask(callback)

    def set_adapters(self, adapters: Sequence[AdapterSpec]) -> None:
        """Replace the whole list of LoRA adapters."""
        self.model.adapters.apply(self.handle, adapters)
        self._effective["adapters"] = tuple(adapters)

    def set_control_vector(self, directions: Floats | None) -> None:
        """Add ``directions`` [n_layer, n_embd] to what the layers put out; None adds nothing."""
        if directions is not None and directions[0].any():
            raise refuse("set_control_vector of layer 0", "llama.cpp adds none there; leave it out")
        n_layer, n_embd = self.model.info.n_layer, self.model.info.n_embd
        data = None
        if directions is not None:  # of the layers from the second on
            data = ctypes.cast(directions.ctypes.data + directions.strides[0], _FLOATS)
        if api.llama_set_adapter_cvec(
            self.handle, data, (n_layer - 1) * n_embd, n_embd, 1, n_layer - 1
        ):
            raise refuse("set_control_vector", "llama.cpp refused it for this model")
        self._effective.pop("control_vector", None)
        if directions is not None:
            self._effective["control_vector"] = hashlib.sha256(directions.data).hexdigest()

    def warmup(self) -> None:
        """Evaluate one token and forget it, so that weights and buffers are touched."""
        if not self.memory.is_empty:
            self._warm_up_beside()
            return
        batch = self._batch.fill(np.zeros(1, np.int32), 0, 0, every=True, last=True)
        run = api.llama_encode if self._needs_encoder_output else api.llama_decode
        self._check(run(self.handle, batch), 1)
        self.memory.clear()

    def _warm_up_beside(self) -> None:
        """Warm up where tokens are held: in an empty sequence, or behind what can be taken back."""
        if self._needs_encoder_output:
            raise refuse("warmup", "tokens were restored, and no text is encoded; clear first")
        seq_id = self.memory.seq_for_scratch()
        if self.memory.whole_only and self.n_past(seq_id):
            raise refuse("warmup", "no sequence is empty, and a recurrent state cannot be undone")
        if self._try_beside(seq_id) == NO_ROOM:
            raise refuse("warmup", "the context is full; warm up before the first decode")

    def synchronize(self) -> None:
        """Wait until the engine has finished all queued work."""
        api.llama_synchronize(self.handle)

    def close(self) -> None:
        """Give the memory back; where somebody keeps a row of logits, with that."""
        self._drop_rows()
        owned, self._owned = self._owned, None
        if owned is not None:
            owned.let_go()


class RecurrentContext(LlamaContext):
    """A context with a state that every token changes, in all layers or in some."""

    # A step that is stopped has changed the state of some layers and not of others, and the
    # engine does not put it back. So it is stopped between steps only, by the guard.
    set_abort_callback = None  # type: ignore[assignment]

    @property
    def couples_sequences(self) -> bool:
        """False: the engine batches no recurrent state that two sequences share."""
        return False
