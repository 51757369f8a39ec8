"""The hot path: tokens in, logits and embeddings out."""

from __future__ import annotations

import ctypes
import itertools
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore import (
    ContextOverflowError,
    DecodeAbortedError,
    InferCoreError,
    InvalidStateError,
    OutputNotAvailableError,
)
from infercore_llamacpp import capabilities, log
from infercore_llamacpp.abort import AbortSwitch
from infercore_llamacpp.batch import Batch, OneToken
from infercore_llamacpp.library import api, bind, bind_quick, pointer
from infercore_llamacpp.memory import SHIFTS, Memory
from infercore_llamacpp.settings import refuse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from infercore_llamacpp.model import LlamaModel
    from infercore_llamacpp.owned import Owned

    Ints = npt.NDArray[np.int32]
    Floats = npt.NDArray[np.float32]

NO_ROOM, _ABORTED = 1, 2
_FIRST_ROW = (0,)
_NEEDS_IDS = ("graniteswitch",)  # without ids the engine ends the process
_EITHER = ("lfm2", "lfm2moe")  # of these it computes no logits where it makes embeddings

# What runs once a token takes `pointer(handle)`. Addresses come as numbers: a view over one costs
# half of what ctypes pointers take.
_decode = bind("llama_decode", ctypes.c_int32)
_logits_row = bind("llama_get_logits_ith", ctypes.c_void_p)
# Without a GPU there is nothing to wait for: to give up the interpreter for it takes far longer.
_quick_row = bind_quick("llama_get_logits_ith", ctypes.c_void_p)
_token_row = bind("llama_get_embeddings_ith", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
_pooled_row = bind("llama_get_embeddings_seq", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)


def _no_row(*_: object) -> int:
    hint = "llama.cpp computes either of this model; call set_embeddings(False) and decode again"
    raise refuse("logits beside embeddings", hint)


class Decoding:
    """The part of a context that evaluates tokens and keeps the outputs of the last call.

    It has at most 30 attributes: Python keeps more in a dictionary, where each takes longer.

    ``handle`` is the engine's context, which ``owned`` frees. Arguments have been checked by the
    caller.
    """

    def __init__(
        self, model: LlamaModel, handle: int, owned: Owned, effective: dict[str, Any]
    ) -> None:
        self.handle = handle
        self._pointer = pointer(handle)
        self._owned: Owned | None = owned
        self.model = model
        traits = model.traits
        self.memory = Memory(handle, effective, traits)
        self._effective = effective
        self.effective: Mapping[str, Any] = MappingProxyType(effective)
        self.capabilities = capabilities.of_context(traits, effective, self.memory.handle)
        self.tolerance = capabilities.tolerance(traits, effective)
        self.n_batch: int = effective["n_batch"]
        self.n_ubatch: int = effective["n_ubatch"]
        self._make_embeddings(effective["embeddings"])
        self._needs_encoder_output = traits.info.has_encoder and traits.has_memory
        self._batch = Batch(self.n_batch)
        self._scratch = Batch(1)  # a batch of the caller's may be filled already
        self._one = OneToken()
        self._rows: Sequence[int] = ()
        # The last marks of rows that nobody can change, all of which are set, and those rows.
        self._all_wanted: npt.NDArray[np.bool_] | None = None
        self._every: Sequence[int] = ()
        self._n_tokens = 0
        # Vectors copied out of the engine: of sequences, or of tokens where none is pooled.
        self._vectors: dict[int, Floats] | None = None
        self._is_read = False  # whether `_view` is over the rows of the last call
        self._look_at(np.empty((1, 0), np.float32), 0)
        self._kept: Sequence[int] | None = None  # the rows, if they were copied out of the engine
        self._switch = AbortSwitch(handle)
        self._decode = _decode

    def _make_embeddings(self, on: bool) -> None:  # noqa: FBT001
        """Make vectors from now on, or no longer; they are those of one engine call.

        Without them a model with a sliding window gets a call for each compute step: the engine
        places all steps of a call before it computes the first one, and lets go of what a later
        one's window has passed, though the first still reads it.
        """
        self._embeddings = on
        if on and self.model.traits.info.architecture in _EITHER:
            self._row_at = _no_row
        else:
            self._row_at = _logits_row if self.model.traits.has_gpu else _quick_row
        slides = self.model.traits.info.sliding_window is not None
        self._n_most = self.n_ubatch if slides and not on else self.n_batch

    def n_past(self, seq_id: int) -> int:
        """Return the sequence's next position."""
        return self.memory.pos_max(seq_id) + 1

    def seq_pos_max(self, seq_id: int) -> int:
        """Return the last position held, -1 when empty."""
        return self.memory.pos_max(seq_id)

    def seq_pos_min(self, seq_id: int) -> int:
        """Return the first position held, -1 when empty."""
        return self.memory.pos_min(seq_id)

    @property
    def shares_cells(self) -> bool:
        """Whether copies share the cells of one cache that all sequences use."""
        return bool(self._effective["kv_unified"])

    @property
    def couples_sequences(self) -> bool:
        """Whether a token may belong to several sequences of a call."""
        return self.shares_cells or int(self._effective["n_seq_max"]) == 1

    def native_handle(self) -> int:
        """Return the address of the ``llama_context``."""
        return self.handle

    # -- tokens in -----------------------------------------------------------------------------

    def decode(self, tokens: Ints, *, seq_id: int, logits: str) -> None:
        """Append 1 to ``n_batch`` tokens; rows of the "last", of "all" or of "none"."""
        n = len(tokens)
        if n > self._n_most:
            wanted = np.full(n, logits == "all")
            wanted[-1] |= logits == "last"
            positions = np.arange(self.n_past(seq_id), self.n_past(seq_id) + n, dtype=np.int32)
            self._decode_steps(tokens, positions, [(seq_id,)] * n, wanted)
            return
        batch = self._batch.fill(
            tokens,
            self.n_past(seq_id),
            seq_id,
            every=logits == "all" or self._embeddings,
            last=logits == "last",
        )
        self._run(batch, n)
        self._rows = range(n) if logits == "all" else (n - 1,) if logits == "last" else ()

    def decode_one(self, token: int, *, seq_id: int = 0) -> None:
        """Append one token and make its row."""
        one, pending = self._one, self.memory.pending
        one.token.value, one.seq_id.value = token, seq_id
        if self._needs_encoder_output:
            raise _nothing_encoded()
        if pending:
            self._rows = ()
            self._carry_out_shifts()
        code = self._decode(self._pointer, one.struct)
        if code:
            self._rows, self._n_tokens, self._vectors = (), 0, None
            self._check(code, 1)
        self._rows, self._n_tokens, self._is_read, self._vectors = _FIRST_ROW, 1, False, None
        if pending:
            self.memory.pending = 0
        if log.was_raised:
            log.raise_kept()

    def decode_batch(
        self,
        tokens: Ints,
        positions: Ints,
        seq_ids: Sequence[tuple[int, ...]],
        wanted: npt.NDArray[np.bool_],
    ) -> None:
        """Append tokens of several sequences in one call; rows of those wanted, in order.

        Where the engine couples no sequences, one of several is put in for each. Raises
        `UnsupportedFeatureError` where they are more than ``n_batch`` then, or where embeddings of
        each token were asked for.
        """
        places = [i for i, ids in enumerate(seq_ids) for _ in ids]
        if len(places) > len(tokens) and not self.couples_sequences:
            if len(places) > self.n_batch or self._embeddings:
                hint = "sequences share no cells here; decode them one after the other"
                raise refuse("tokens of several sequences", hint)
            is_first = np.diff(places, prepend=-1) > 0
            seq_ids = [(seq_id,) for ids in seq_ids for seq_id in ids]
            tokens, positions, wanted = tokens[places], positions[places], wanted[places] & is_first
        if len(tokens) > self._n_most:
            self._decode_steps(tokens, positions, seq_ids, wanted)
            return
        flags = np.ones_like(wanted) if self._embeddings else wanted
        batch = self._batch.mixed(tokens, positions, seq_ids, flags)
        self._run(batch, len(tokens))
        self._rows = np.flatnonzero(wanted).tolist()

    def decode_spans(
        self, tokens: Ints, positions: Ints, seq_ids: Ints, wanted: npt.NDArray[np.bool_]
    ) -> None:
        """`decode_batch` by columns: entries of one sequence each."""
        if len(tokens) > self._n_most:
            self._decode_steps(tokens, positions, [(int(s),) for s in seq_ids], wanted)
            return
        flags = np.ones_like(wanted) if self._embeddings else wanted
        batch = self._batch.columns(tokens, positions, seq_ids, flags)
        n = len(tokens)
        if wanted is self._all_wanted:  # as in most steps of a pool
            self._run(batch, n)
            self._rows = self._every
            return
        marks = wanted.tobytes()  # NumPy's own ways to look at few take far longer
        self._run(batch, n)
        if marks.count(1) < n:
            self._rows = [i for i, mark in enumerate(marks) if mark]
            return
        self._rows = range(n)
        if wanted.base is None and not wanted.flags.writeable:  # a view's base may be written to
            self._all_wanted, self._every = wanted, self._rows

    def _decode_steps(
        self,
        tokens: Ints,
        positions: Ints,
        seq_ids: Sequence[tuple[int, ...]],
        wanted: npt.NDArray[np.bool_],
    ) -> None:
        """`decode_batch` in calls of one compute step each.

        Tokens of which no row is wanted come first, so that the last call makes the rows, as far as
        each sequence allows it; else they are copied.
        """
        n, most = len(tokens), self._n_most
        order = np.argsort(wanted, kind="stable") if _end_in_rows(seq_ids, wanted) else np.arange(n)
        bounds = [*range(0, n - most, most), n - most, n]
        kept: list[Floats] = []
        for start, end in itertools.pairwise(bounds):
            at = order[start:end]
            ids, own = [seq_ids[i] for i in at], wanted[at]
            self._run(self._batch.mixed(tokens[at], positions[at], ids, own), len(at))
            self._rows = np.flatnonzero(own).tolist()
            kept += [self.logits(i).copy() for i in range(len(self._rows)) if kept or end < n]
        if kept:
            self._look_at(np.array(kept), 0)
            self._rows = self._kept = np.flatnonzero(wanted).tolist()
            self._is_read = True

    def decode_vectors(
        self, rows: Floats, positions: Ints, seq_ids: Ints, wanted: npt.NDArray[np.bool_]
    ) -> None:
        """`decode_spans` of rows of numbers, which are not looked up."""
        traits = self.model.traits
        if traits.n_embd_inp != traits.info.n_embd or traits.info.architecture in _NEEDS_IDS:
            hint = f"this model takes {traits.n_embd_inp} numbers a row, with those of later layers"
            if traits.info.architecture in _NEEDS_IDS:
                hint = "this model chooses its weights by token"
            raise refuse("rows of numbers in place of tokens", hint)
        flags = np.ones_like(wanted) if self._embeddings else wanted
        batch = self._batch.vectors(rows, positions, seq_ids, flags, traits.n_pos)
        self._run(batch, len(rows))
        self._rows = wanted.nonzero()[0].tolist()

    def encode(self, tokens: Ints) -> None:
        """Run the encoder over ``tokens``."""
        batch = self._batch.fill(tokens, 0, 0, every=True, last=True)
        self._rows, self._n_tokens = (), 0
        encode = api.llama_decode if self.memory.handle is None else api.llama_encode
        self._check(encode(self.handle, batch), len(tokens))
        self._n_tokens, self._vectors = len(tokens), None
        self._needs_encoder_output = False

    def _run(self, batch: Any, n_tokens: int) -> None:
        self._rows, self._n_tokens = (), 0
        if self._needs_encoder_output:
            raise _nothing_encoded()
        if self.memory.pending:
            self._carry_out_shifts()
        code = self._decode(self._pointer, batch)
        self._vectors = None
        if code:
            self._check(code, n_tokens)
        self._n_tokens, self._is_read = n_tokens, False
        self.memory.pending = 0
        if log.was_raised:
            log.raise_kept()

    # -- what the engine puts off --------------------------------------------------------------

    def _carry_out_shifts(self) -> None:
        """Let no abort fall into a shift: half of the layers would be turned, and later again."""
        if self.memory.pending & SHIFTS:
            self._carry_out_pending()

    def _carry_out_pending(self) -> None:
        """Let the engine carry out the copies and shifts that it puts off until it next decodes.

        It does so before it evaluates anything. So a token is decoded, in an empty sequence where
        there is one, and removed again, whatever is raised meanwhile.
        """
        if not self.memory.pending:
            return
        self._keep_rows()
        self._try_beside(self.memory.seq_for_scratch())

    def _try_beside(self, seq_id: int) -> int:
        """Decode a token behind ``seq_id`` and remove it again; return the engine's code.

        That is 0, or `NO_ROOM`.
        """
        end = self.n_past(seq_id)
        batch = self._scratch.fill(
            np.zeros(1, np.int32), end, seq_id, every=self._embeddings, last=False
        )
        try:
            with self._switch.off():
                code: int = self._decode(self._pointer, batch)
        finally:
            self.memory.take_back(seq_id, end)
        if code not in (0, NO_ROOM):
            self._check(code, 1)
        self.memory.pending = 0
        return code

    def _check(self, code: int, n_tokens: int) -> None:
        """Raise what a return code of ``llama_decode`` means; 0 is success.

        The core puts the count of resident tokens in.
        """
        log.raise_kept()
        if code == 0:
            return
        if code == _ABORTED:
            raise DecodeAbortedError("aborted", resident_tokens=0)
        if code == NO_ROOM:
            raise log.explain(
                ContextOverflowError(
                    stage="engine",
                    resident_tokens=0,
                    additional_tokens=n_tokens,
                    n_ctx=self._effective["n_ctx"],
                )
            )
        raise log.explain(InferCoreError(f"llama.cpp failed to decode: it returned {code}"))

    # -- outputs -------------------------------------------------------------------------------

    def batch_index(self, row: int) -> int:
        """Return the place in the last batch of output row ``row``."""
        if self._rows is self._kept:
            raise self._unavailable(f"logits({row})")
        if self._row_at is _no_row:
            _no_row()
        return self._rows[row]

    def logits(self, i: int) -> Floats:
        """Return output row ``i``, a view that the next call overwrites."""
        rows = self._rows
        if i >= len(rows):
            raise self._unavailable(f"logits({i})")
        if not self._is_read:
            self._read_rows()
        if self._embeddings and rows is not self._kept:  # the engine made one for every token
            i = rows[i]
        row: Floats = self._view[i] if i else self._first
        return row

    def logits_rows(self, n: int) -> Floats:
        """Return the first ``n`` output rows as one array, a view that the next call overwrites."""
        if not self._is_read:
            self._read_rows()
        return self._view[:n]

    def _read_rows(self) -> None:
        """Let the view be over the rows of the last call, which lie one behind the other.

        Where they lie changes seldom, so the view before mostly serves.
        """
        rows = range(self._n_tokens) if self._embeddings else self._rows
        address = self._row_at(self._pointer, rows[0])
        if not address:
            raise self._unavailable("logits")
        n = len(rows)
        if address != self._view_at or n > len(self._view):
            n_vocab = self.model.traits.info.n_vocab
            memory: Any = (ctypes.c_float * (n_vocab * n)).from_address(address)
            if self._owned is not None:
                memory.use = self._owned.use()  # who keeps a row keeps what it lies in
            self._look_at(np.frombuffer(memory, np.float32).reshape(n, n_vocab), address)
        self._is_read = True

    def _keep_rows(self) -> None:
        """Copy rows and vectors, as the engine is about to compute something of its own."""
        self._keep_vectors()
        if not self._rows or self._rows is self._kept or self._row_at is _no_row:
            return
        self._look_at(np.array([self.logits(i) for i in range(len(self._rows))]), 0)
        self._rows = self._kept = list(self._rows)

    def _keep_vectors(self) -> None:
        if not self._embeddings or self._vectors is not None:
            return
        pooled = self._effective["pooling_type"] != "none"
        n = self._effective["n_seq_max"] if pooled else self._n_tokens
        row, read = (_pooled_row, self.embedding) if pooled else (_token_row, self._token_vector)
        made = [i for i in range(n) if self._n_tokens and row(self.handle, i)]
        self._vectors = {i: read(i) for i in made}

    def _look_at(self, rows: Floats, address: int) -> None:
        self._view, self._view_at = rows, address
        self._first: Floats = rows[0]

    def _drop_rows(self) -> None:
        self._rows = ()
        self._look_at(np.empty((1, 0), np.float32), 0)

    def embedding(self, seq_id: int) -> Floats:
        """Return the pooled embedding of a sequence, or its score a class with rank pooling."""
        traits = self.model.traits
        if self._vectors is not None:
            return self._kept_vector(seq_id)
        ranks = self._effective["pooling_type"] == "rank"
        address = _pooled_row(self.handle, seq_id) if self._embeddings else None
        return self._copy(address, traits.n_cls_out if ranks else traits.n_embd_out)

    def embeddings(self) -> Floats:
        """Return the embedding of each token of the last call, [n_tokens, n_embd]."""
        found = np.empty((self._n_tokens, self.model.traits.n_embd_out), dtype=np.float32)
        for i in range(self._n_tokens):
            found[i] = self._token_vector(i)
        return found

    def _token_vector(self, i: int) -> Floats:
        if self._vectors is not None:
            return self._kept_vector(i)
        address = _token_row(self.handle, i) if self._embeddings else None
        return self._copy(address, self.model.traits.n_embd_out)

    def _kept_vector(self, at: int) -> Floats:
        if self._vectors is None or not self._embeddings or at not in self._vectors:
            raise self._unavailable("embedding")
        return self._vectors[at].copy()

    def _copy(self, address: int | None, length: int) -> Floats:
        if not address:
            raise self._unavailable("embedding")
        return np.array((ctypes.c_float * length).from_address(address), dtype=np.float32)

    def _unavailable(self, operation: str) -> OutputNotAvailableError:
        return OutputNotAvailableError(
            f"{operation} is not available: the last call made {len(self._rows)} rows of logits "
            f"(embeddings {'on' if self._embeddings else 'off'})",
            operation=operation,
            state=f"{len(self._rows)} output rows",
        )


def _end_in_rows(seq_ids: Sequence[tuple[int, ...]], wanted: npt.NDArray[np.bool_]) -> bool:
    """Whether behind a token whose row is wanted its sequences have no other tokens."""
    ended: set[int] = set()
    for ids, is_wanted in zip(seq_ids, wanted.tolist(), strict=True):
        if is_wanted:
            ended.update(ids)
        elif not ended.isdisjoint(ids):
            return False
    return True


def _nothing_encoded() -> InvalidStateError:
    return InvalidStateError(
        "decode needs the encoder's output; call encode() first",
        operation="decode",
        state="nothing encoded",
    )
