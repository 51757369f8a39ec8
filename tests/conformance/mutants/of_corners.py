"""Wrong backends over real attention: right in each feature alone, wrong where two meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np

from conformance.mutants import around, breaks
from infercore.errors import DecodeAbortedError
from infercore.testing import reference_base
from infercore.testing.reference_base import Base
from infercore.testing.reference_context import ReferenceContext
from infercore.testing.reference_sampler import ReferenceSampler
from infercore.testing.reference_tokenizer import ReferenceTokenizer

real = {"base": "reference"}


@breaks("DEC-47", **real)
def rows_are_counted_by_tokens_while_embeddings_are_made(m: Any) -> None:
    def decode(old: Any, self: Any, tokens: Any, positions: Any, seq_ids: Any, wanted: Any) -> None:
        n = int(np.count_nonzero(wanted))
        every = self.effective["embeddings"] and n > 1
        old(self, tokens, positions, seq_ids, np.ones_like(wanted) if every else wanted)
        self._rows = self._rows[:n]

    around(m, ReferenceContext, "_decode", decode)


@breaks("KV-47", **real)
def an_abort_leaves_half_a_shift(m: Any) -> None:
    def shift(old: Any, self: Any, *args: Any) -> None:
        old(self, *args)
        self.owed = args[0]

    def step(old: Any, self: Any, *args: Any) -> Any:
        owed, self.owed = getattr(self, "owed", None), None
        try:
            return old(self, *args)
        except DecodeAbortedError:
            if owed is not None:
                cells = self.sequences[owed]
                turned = cells.k.copy()
                turned[0] = -turned[0]  # of the first layer, and not of the others
                self.sequences[owed] = attrs.evolve(cells, k=turned)
            raise

    around(m, ReferenceContext, "seq_shift", shift)
    around(m, ReferenceContext, "_step", step)


@breaks("THREAD-30", **real)
def threads_given_at_opening_are_not_used(m: Any) -> None:
    def init(old: Any, self: Any, matrices: Any, n_embd: int, effective: Any) -> None:
        effective["n_threads"] = effective["n_threads_batch"] = 1
        old(self, matrices, n_embd, effective)

    around(m, Base, "__init__", init)


@breaks("TOK-39", **real)
def texts_end_after_8192_tokens(m: Any) -> None:
    def encode(old: Any, self: Any, text: str, **fields: Any) -> Any:
        return list(old(self, text, **fields))[:8192]

    around(m, ReferenceTokenizer, "encode", encode)


@breaks("LORA-29", **real)
def adapters_are_known_by_their_name(m: Any) -> None:
    known: dict[str, Any] = {}
    read = reference_base.lora.read

    def by_name(adapter: Any, target: Any) -> Any:
        name = Path(adapter.path).name
        return known.setdefault(name, read(adapter, target))

    m.setattr(reference_base.lora, "read", by_name)


@breaks("MEM-30", **real)
def closed_samplers_stay(m: Any) -> None:
    kept: list[Any] = []

    def init(old: Any, self: Any, *args: Any) -> None:
        old(self, *args)
        kept.append(bytearray(b"x") * 2**21)

    around(m, ReferenceSampler, "__init__", init)


@breaks("SAMP-23", **real)
def windows_end_after_64_tokens(m: Any) -> None:
    def penalise(old: Any, self: Any, row: Any) -> None:
        whole, self._history = self._history, self._history[-64:]
        old(self, row)
        self._history = whole

    around(m, ReferenceSampler, "_penalise", penalise)


@breaks("SAMP-23", **real)
def penalties_come_after_the_cuts(m: Any) -> None:
    def penalise(old: Any, self: Any, row: Any) -> None:
        if self.config.temperature == 0 or self.config.top_k != 1:
            old(self, row)

    around(m, ReferenceSampler, "_penalise", penalise)


@breaks("CAP-35", **real)
def the_token_for_padding_is_the_end(m: Any) -> None:
    def init(old: Any, self: Any, *args: Any) -> None:
        old(self, *args)
        self.pad = self.bos

    around(m, ReferenceTokenizer, "__init__", init)
