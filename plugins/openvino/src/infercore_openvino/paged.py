"""The context over paged attention: any part removed, forks that share, batches of sequences."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore import Capabilities, UnsupportedFeatureError
from infercore_openvino import state
from infercore_openvino.base import BaseContext
from infercore_openvino.cache import SCRATCH_BLOCK, KvCache
from infercore_openvino.compiled import NOTHING
from infercore_openvino.engine import BACKEND
from infercore_openvino.paged_request import PagedRequest
from infercore_openvino.probe import keys_rotate
from infercore_openvino.settings import FLASH_ATTENTION, POOLING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from infercore_openvino.additions import Additions
    from infercore_openvino.base import Tokens
    from infercore_openvino.blocks import Positions
    from infercore_openvino.compiled import Compiled, CompiledGraphs
    from infercore_openvino.graph import Graph
    from infercore_openvino.settings import Settings

_NO_MASK = "the engine's paged attention takes no mask; leave form out, or give 'stateful'"


def capabilities(settings: Settings, graph: Graph, *, shift: bool) -> Capabilities:
    """Return what a paged context can do; ``shift`` says whether keys can be turned exactly.

    Windows and biases count slots, not positions: holes would change them, so none are offered.
    """
    return Capabilities(
        kv_remove="suffix" if graph.counts_slots else "any",
        kv_copy="full" if graph.counts_slots else "any",
        kv_shift=shift and not graph.counts_slots,
        kv_divide=shift and not graph.counts_slots,
        multi_sequence=True,
        state=True,
        sequence_state=True,
        logits_all=True,
        embeddings=True,
        pooling=POOLING,
        abort=True,
        live_threads=True,
        lora=True,
        kv_types=settings.kv_types,
        flash_attention=FLASH_ATTENTION,
    )


class PagedContext(BaseContext):
    """Sequences over one pool of KV blocks."""

    takes_views = True
    _why_no_other_attention = _NO_MASK

    @staticmethod
    def check(settings: Settings) -> None:
        """Refuse float16, in which attention gives NaN, and attention that is not causal."""
        if not settings.causal:
            hint = _NO_MASK
            raise UnsupportedFeatureError(
                f"attention_type='non-causal' is not supported in the paged form; {hint}",
                feature="attention_type",
                backend=BACKEND,
                hint=hint,
            )
        if settings.inference != "f16":
            return
        hint = "the engine's paged attention gives no numbers in it; give 'bf16', 'f32' or "
        hint += "form='stateful'"
        raise UnsupportedFeatureError(
            f"inference_precision='f16' is not supported in the paged form; {hint}",
            feature="inference_precision",
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
        s = settings
        per_sequence = s.n_ctx if s.kv_unified else -(-s.n_ctx // s.n_seq_max)
        self._cache = KvCache(
            compiled.caches(),
            n_cells=s.n_ctx,
            # each sequence may leave one block partly empty
            n_extra=s.n_seq_max,
            n_seq=s.n_seq_max,
        )
        self._tables = self._cache.tables
        self._sequences = self._tables.tables
        self._paged = PagedRequest(compiled.engine, self._request, compiled.n_threads)
        self._cache.on_grown = self._bind_cache
        self._bind_cache()
        size = self._tables.block_size
        self.effective["n_ctx"] = (
            -(-per_sequence // size) * size * (1 if s.kv_unified else s.n_seq_max)
        )
        if compiled.rotates is None:
            compiled.rotates = keys_rotate(self._cache, self._paged, compiled.graph.inv_freq)
        self.capabilities = capabilities(settings, compiled.graph, shift=compiled.rotates)

    def _bind_cache(self) -> None:
        self._paged.bind_cache(self._cache.arrays)

    def _move_to(self, compiled: Compiled, request: Any, added: Additions) -> PagedRequest:  # noqa: ARG002
        paged = PagedRequest(compiled.engine, request, compiled.n_threads)
        paged.bind_cache(self._cache.arrays)
        return paged

    # -- queries -------------------------------------------------------------------------------

    def n_past(self, seq_id: int) -> int:
        """Return the sequence's next position."""
        return self._sequences[seq_id].next

    def seq_pos_min(self, seq_id: int) -> int:
        """Return the first position held, -1 when empty."""
        positions = self._tables.positions(seq_id)
        return int(positions.min()) if len(positions) else -1

    def seq_pos_max(self, seq_id: int) -> int:
        """Return the last position held, -1 when empty."""
        return self._sequences[seq_id].next - 1

    # -- appending -----------------------------------------------------------------------------

    def _step(self, tokens: Tokens, seq_id: int, out_rows: Any, hidden_rows: Any) -> None:
        table = self._sequences[seq_id]
        past = table.n
        try:
            self._cache.change(lambda: self._tables.append(seq_id, len(tokens)))
            self._paged.run(
                tokens, table.positions[past:], [past], [len(tokens)], [table.blocks],
                (out_rows, hidden_rows),
            )  # fmt: skip
        except BaseException:
            self._tables.trim(seq_id, past)
            raise

    def decode_one(self, token: int, *, seq_id: int) -> None:
        """Append one token and make its logits."""
        self._check_abort(seq_id)
        table = self._sequences[seq_id]
        past, position = table.n, table.next
        try:
            self._cache.change(lambda: self._tables.append(seq_id, 1))
            self._paged.run_one(token, position, past, table, seq_id)
        except BaseException:
            self._tables.trim(seq_id, past)
            raise
        self._begin_outputs()
        rows = self._request.get_output_tensor(0).data
        self._logits.add(rows.reshape(1, -1), last=True)
        self.n_evaluated += 1

    def decode_batch(
        self,
        tokens: Tokens,
        positions: npt.NDArray[np.int32],
        seq_ids: Sequence[Sequence[int]],
        wanted: npt.NDArray[np.bool_],
    ) -> None:
        """Append tokens of several sequences, in compute steps of n_ubatch entries."""
        self._begin_outputs()
        starts = range(0, len(tokens), self.n_ubatch)
        for start in starts:
            self._check_abort(seq_ids[start][0])
            part = slice(start, start + self.n_ubatch)
            self._batch_step(tokens[part], positions[part], seq_ids[part], wanted[part])
            self._take_outputs(last=start == starts[-1])
        if self._embeddings:
            self._share_out(seq_ids)
        self.n_evaluated += len(tokens)

    def _batch_step(
        self, tokens: Tokens, positions: Any, seq_ids: Sequence[Sequence[int]], wanted: Any
    ) -> None:
        """Run one step: a token of several sequences is worked out for each of them."""
        places = [(s, i) for i, ids in enumerate(seq_ids) for s in ids]
        order = sorted(range(len(places)), key=lambda k: places[k][0])
        row_of = {places[k]: row for row, k in enumerate(order)}
        entries = [places[k][1] for k in order]
        involved = sorted({s for s, _ in places})
        past = {s: self._sequences[s].n for s in involved}
        first = [row_of[ids[0], i] for i, ids in enumerate(seq_ids)]
        try:
            for s, i in places:
                self._append(s, int(positions[i]))
            self._paged.run(
                tokens[entries],
                positions[entries],
                [past[s] for s in involved],
                [self._sequences[s].n - past[s] for s in involved],
                [self._sequences[s].blocks for s in involved],
                (np.array(first)[wanted], first if self._embeddings else []),
            )
        except BaseException:
            for s in involved:
                self._tables.trim(s, past[s])
            raise

    def decode_spans(
        self,
        tokens: Tokens,
        positions: npt.NDArray[np.int32],
        seq_ids: npt.NDArray[np.int32],
        wanted: npt.NDArray[np.bool_],
    ) -> None:
        """`decode_batch` by columns: entries of one sequence each, one sequence after the other."""
        self._decode_columns(tokens, positions, seq_ids, wanted)

    def _column_step(self, tokens: Tokens, positions: Any, seq_ids: Any, wanted: Any) -> None:
        begins = np.flatnonzero(np.diff(seq_ids, prepend=-1))
        involved = seq_ids[begins].tolist()
        lengths = np.diff(begins, append=len(tokens)).tolist()
        firsts = positions[begins].tolist()
        past = [self._sequences[s].n for s in involved]
        try:
            for s, n, first in zip(involved, lengths, firsts, strict=True):
                self._cache.change(partial(self._tables.append, s, n, first))
            self._paged.run(
                tokens, positions, past, lengths, [self._sequences[s].blocks for s in involved],
                (np.flatnonzero(wanted), self._wanted(tokens)),
            )  # fmt: skip
        except BaseException:
            for s, n in zip(involved, past, strict=True):
                self._tables.trim(s, n)
            raise

    def _append(self, seq_id: int, position: int) -> None:
        self._cache.change(lambda: self._tables.append(seq_id, 1, position))

    def _share_out(self, seq_ids: Sequence[Sequence[int]]) -> None:
        """Give each sequence the hidden states of its entries."""
        vectors = self._hidden_all.all()
        for s in {s for ids in seq_ids for s in ids}:
            self._hidden[s] = vectors[[s in ids for ids in seq_ids]]

    # -- changing ------------------------------------------------------------------------------

    def seq_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        """Remove positions [p0, p1); what lies behind moves up in its blocks."""
        self._cache.change(lambda: self._tables.remove(seq_id, p0, p1))
        return True

    def seq_copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Let ``dst`` hold what ``src`` holds in [p0, p1), shared until one of them changes it."""
        self._cache.change(lambda: self._tables.copy(src, dst, p0, p1))

    def seq_shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add ``delta`` to the positions in [p0, p1)."""
        mask = self._tables.select(seq_id, p0, p1)
        self._move(seq_id, mask, self._tables.positions(seq_id)[mask] + delta)

    def seq_divide(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions in [p0, p1) by ``d``."""
        mask = self._tables.select(seq_id, p0, p1)
        self._move(seq_id, mask, self._tables.positions(seq_id)[mask] // d)

    def _move(self, seq_id: int, mask: Any, positions: Positions) -> None:
        inv_freq = self._compiled.graph.inv_freq
        assert inv_freq is not None  # noqa: S101  (the capability is not declared without)
        self._cache.move(seq_id, mask, positions, inv_freq)

    def clear(self) -> None:
        """Remove everything."""
        self._tables.clear()

    # -- state ---------------------------------------------------------------------------------

    def save_state(self) -> memoryview:
        """Return all sequences as bytes."""
        held = [s for s, table in enumerate(self._sequences) if table.n]
        return state.save(self._cache, held, self._identity())

    def load_state(self, data: bytes | memoryview) -> None:
        """Restore what `save_state` returned."""
        self.clear()
        state.load(self._cache, data, self._identity())

    def save_sequence(self, seq_id: int) -> memoryview:
        """Return one sequence as bytes."""
        return state.save(self._cache, [seq_id], self._identity())

    def load_sequence(self, seq_id: int, data: bytes | memoryview) -> None:
        """Restore what `save_sequence` returned."""
        self._tables.trim(seq_id, 0)
        state.load(self._cache, data, self._identity(), seq_id=seq_id)

    # -- the rest ------------------------------------------------------------------------------

    def warmup(self) -> None:
        """Run a token in a block that no sequence holds."""
        self._paged.run([0], [0], [0], [1], [[SCRATCH_BLOCK]], ([0], []))

    def close(self) -> None:
        """Drop the blocks, the request and the use of the compiled graph."""
        self._cache.drop()
        self._paged.drop()
        super().close()
