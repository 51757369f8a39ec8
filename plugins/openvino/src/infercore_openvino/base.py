"""What both forms of a context share: facts, cancelling, outputs, embeddings."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore import DecodeAbortedError, UnsupportedFeatureError
from infercore_openvino import cpu
from infercore_openvino.adapters import read as read_adapters
from infercore_openvino.additions import give_rows
from infercore_openvino.compiled import NOTHING
from infercore_openvino.engine import BACKEND
from infercore_openvino.outputs import Rows, pooled, wanted_rows
from infercore_openvino.settings import with_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from infercore import AdapterSpec, Capabilities
    from infercore_openvino.additions import Additions
    from infercore_openvino.compiled import Compiled, CompiledGraphs
    from infercore_openvino.settings import Settings

    Floats = npt.NDArray[np.float32]
    Tokens = npt.NDArray[np.int32]


class BaseContext:
    """A context over one infer request of a compiled graph. A subclass has the cache.

    Cancelling is a flag that is read between compute steps: an engine call that is broken off
    leaves the request in an unsafe state.
    """

    capabilities: Capabilities

    def __init__(
        self,
        compiled: Compiled,
        graphs: CompiledGraphs,
        settings: Settings,
        added: Additions = NOTHING,
    ) -> None:
        self._compiled = compiled
        self._graphs = graphs
        self._paged: Any = None
        self._added = added
        self._request = compiled.new_request(added)
        self._settings = settings
        self.tolerance = settings.tolerance(
            rounded=compiled.group_size > 0, n_layer=compiled.graph.shape.n_layer
        )
        self.n_batch = settings.n_batch
        self.n_ubatch = settings.n_ubatch
        self._aborted = False  # no Event: its lock would hold up a signal handler that aborts
        self._abort_callback: Callable[[], bool] | None = None
        self._logits = Rows()
        self._hidden: dict[int, Floats] = {}
        self._hidden_all = Rows()
        self._embeddings = settings.embeddings
        self.n_evaluated = 0
        """Tokens that went into the request, for who looks past the API."""
        self.effective = self._effective()

    def _effective(self) -> dict[str, Any]:
        s, group_size = self._settings, self._compiled.group_size
        highest = s.inference == "f32" and not group_size
        return {
            **s.fixed,
            "n_ctx": s.n_ctx,
            "n_batch": s.n_batch,
            "n_ubatch": s.n_ubatch,
            "n_seq_max": s.n_seq_max,
            "n_threads": self._compiled.n_threads,
            "n_threads_batch": self._compiled.n_threads,
            "defrag_thold": None,
            "pooling_type": s.pooling,
            "flash_attn": "off",
            "type_k": s.kv_type,
            "type_v": s.kv_type,
            "embeddings": s.embeddings,
            "kv_unified": s.kv_unified,
            "no_perf": not s.timed,
            "adapters": tuple(s.adapters),
            "form": self._compiled.graph.form,
            "num_streams": self._compiled.n_streams,
            "precision": "accurate" if highest else "default",
            "activations": "q8" if group_size else s.inference,
            "inference_precision": s.inference,
            "dynamic_quantization_group_size": group_size,
        }

    @staticmethod
    def check(settings: Settings) -> None:
        """Refuse settings that this form cannot honour, before anything is compiled."""

    def native_handle(self) -> Any:
        """Return the ``openvino.InferRequest`` that computes."""
        return self._request

    # -- what a subclass has -------------------------------------------------------------------

    def n_past(self, seq_id: int) -> int:
        """Return the sequence's next position."""
        raise NotImplementedError

    def _step(self, tokens: Tokens, seq_id: int, out_rows: Any, hidden_rows: Any) -> None:
        """Append ``tokens``, at most n_ubatch; on failure nothing is appended."""
        raise NotImplementedError

    # -- what changes while it lives -----------------------------------------------------------

    def set_adapters(self, adapters: Sequence[AdapterSpec]) -> None:
        """Replace the whole list; unchanged where one of them cannot be read."""
        joined = read_adapters(adapters, self._compiled.graph)
        self._change(added=replace(self._added, adapters=joined))
        self.effective["adapters"] = tuple(adapters)

    def set_control_vector(self, directions: Floats | None) -> None:
        """Add ``directions`` [n_layer, n_embd] to what the layers put out; None adds nothing."""
        self._change(added=replace(self._added, directions=directions))
        self.effective.pop("control_vector", None)
        if directions is not None:
            self.effective["control_vector"] = hashlib.sha256(directions.data).hexdigest()

    def set_threads(self, n: int, n_batch: int) -> None:
        """Compute on ``n`` threads from now on; the graph is compiled anew where it must be."""
        if n != n_batch:
            hint = f"one number of threads does all work here; give {n} for both"
            raise UnsupportedFeatureError(feature="n_threads_batch", backend=BACKEND, hint=hint)
        settings = with_threads(self._settings, n)
        cpu.check(settings)
        self._change(settings=settings)
        self.effective.update(n_threads=n, n_threads_batch=n, num_streams=self._compiled.n_streams)

    def set_causal_attention(self, on: bool) -> None:  # noqa: FBT001  (the contract's signature)
        """Refuse another kind of attention than that of the graph."""
        if on != (self.effective["attention_type"] != "non-causal"):
            raise UnsupportedFeatureError(
                feature="set_causal_attention", backend=BACKEND, hint=self._why_no_other_attention
            )

    _why_no_other_attention = "the exported graph has its kind of attention built in"

    def _change(self, settings: Settings | None = None, added: Additions | None = None) -> None:
        """Go on in a graph of other settings or additions; on failure nothing is changed."""
        settings, added = settings or self._settings, added or self._added
        compiled = self._graphs.take(self._compiled.graph.form, settings, added)
        try:
            request = compiled.new_request(added)
            paged = self._move_to(compiled, request, added)
        except BaseException:
            self._graphs.give_back(compiled)
            raise
        left = self._compiled
        # At once: no Ctrl-C comes between.
        self._compiled, self._request, self._paged = compiled, request, paged
        self._settings, self._added = settings, added
        self._graphs.give_back(left)

    def _move_to(self, compiled: Compiled, request: Any, added: Additions) -> Any:
        """Let ``request`` go on from what is held; on failure nothing is changed.

        Returns what the paged form runs its steps with.
        """
        raise NotImplementedError

    # -- appending -----------------------------------------------------------------------------

    def decode(self, tokens: Tokens, *, seq_id: int, logits: str) -> None:
        """Append ``tokens`` in compute steps of n_ubatch."""
        self._begin_outputs()
        starts = range(0, len(tokens), self.n_ubatch)
        for start in starts:
            self._check_abort(seq_id)
            part = tokens[start : start + self.n_ubatch]
            last = start == starts[-1]
            self._step(part, seq_id, wanted_rows(logits, len(part), last=last), self._wanted(part))
            self._take_outputs(last=last)
        if self._embeddings:
            self._hidden[seq_id] = self._hidden_all.all()
        self.n_evaluated += len(tokens)

    def decode_vectors(
        self,
        rows: Floats,
        positions: npt.NDArray[np.int32],
        seq_ids: npt.NDArray[np.int32],
        wanted: npt.NDArray[np.bool_],
    ) -> None:
        """Append ``rows`` [n, n_embd] in place of what tokens would look up in the model's table.

        From the first of them on the context runs a graph that can take them.
        """
        self._take_rows()
        tokens = np.zeros(len(rows), dtype=np.int32)
        self._decode_columns(tokens, positions, seq_ids, wanted, rows)

    def _take_rows(self) -> None:
        if not self._added.takes_rows:
            self._change(added=replace(self._added, takes_rows=True))

    def _decode_columns(
        self, tokens: Tokens, positions: Any, seq_ids: Any, wanted: Any, rows: Floats | None = None
    ) -> None:
        """Append entries of one sequence each, in compute steps of n_ubatch."""
        self._begin_outputs()
        starts = range(0, len(tokens), self.n_ubatch)
        for start in starts:
            self._check_abort(int(seq_ids[start]))
            part = slice(start, start + self.n_ubatch)
            columns = tokens[part], positions[part], seq_ids[part], wanted[part]
            if rows is None:
                self._column_step(*columns)
            else:
                give_rows(self._request, rows[part])
                try:
                    self._column_step(*columns)
                finally:
                    give_rows(self._request, rows[:0])
            self._take_outputs(last=start == starts[-1])
        if self._embeddings:
            vectors = self._hidden_all.all()
            for s in np.unique(seq_ids).tolist():
                self._hidden[s] = vectors[seq_ids == s]
        self.n_evaluated += len(tokens)

    def _column_step(self, tokens: Tokens, positions: Any, seq_ids: Any, wanted: Any) -> None:  # noqa: ARG002
        """Append what one step takes; on failure nothing is appended."""
        self._step(tokens, int(seq_ids[0]), np.flatnonzero(wanted), self._wanted(tokens))

    def _identity(self) -> dict[str, Any]:
        """What must agree beyond what the core compares: it is set by backend options."""
        names = ("form", "inference_precision", "dynamic_quantization_group_size", "type_k")
        return {name: self.effective[name] for name in names}

    def _wanted(self, tokens: Tokens) -> Any:
        return np.arange(len(tokens) if self._embeddings else 0)

    def _begin_outputs(self) -> None:
        self._logits.begin()
        self._hidden_all.begin()
        self._hidden = {}

    def _take_outputs(self, *, last: bool) -> None:
        rows = self._request.get_output_tensor(0).data
        self._logits.add(rows.reshape(-1, rows.shape[-1]), last=last)
        if self._embeddings:
            hidden = self._request.get_output_tensor(1).data
            self._hidden_all.add(hidden.reshape(-1, hidden.shape[-1]), last=last)

    def logits(self, i: int) -> Floats:
        """Return row ``i`` of the last call, a view."""
        row: Floats = self._logits.all()[i]
        return row

    def logits_rows(self, n: int) -> Floats:
        """Return the first ``n`` rows of the last call, a view."""
        return self._logits.all()[:n]

    # -- embeddings ----------------------------------------------------------------------------

    def set_embeddings(self, on: bool) -> None:  # noqa: FBT001  (the contract's signature)
        """Make hidden states from now on, or no longer."""
        self._embeddings = on
        self.effective["embeddings"] = on

    def embedding(self, seq_id: int) -> Floats:
        """Return the pooled output of the sequence's tokens of the last call."""
        return pooled(self._settings.pooling, self._hidden[seq_id])

    def embeddings(self) -> Floats:
        """Return the output of each token of the last call."""
        return self._hidden_all.all()

    # -- cancelling ----------------------------------------------------------------------------

    def abort(self) -> None:
        """End the call that runs before its next compute step; from any thread."""
        self._aborted = True

    def clear_abort(self) -> None:
        """Forget an earlier `abort`."""
        self._aborted = False

    def set_abort_callback(self, callback: Callable[[], bool] | None) -> None:
        """Ask ``callback`` before each compute step."""
        self._abort_callback = callback

    def _check_abort(self, seq_id: int) -> None:
        callback = self._abort_callback
        if self._aborted or (callback is not None and callback()):
            n_past = self.n_past(seq_id)
            raise DecodeAbortedError("cancelled between two steps", resident_tokens=n_past)

    # -- the end -------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Nothing is ever queued: each call returns when its work is done."""

    def close(self) -> None:
        """Drop the request and give the compiled graph back."""
        self._begin_outputs()
        self._request = None
        self._graphs.give_back(self._compiled)
