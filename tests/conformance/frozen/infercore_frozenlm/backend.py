"""Tokenizer, context and model: what infercore asks of a backend, and no more."""

from __future__ import annotations

import os
from typing import Any

import attrs
import numpy as np

from infercore import Capabilities, ContextConfig, ModelConfig, ModelInfo, UnsupportedFeatureError
from infercore_frozenlm.tables import BOS, EOS, N_VOCAB, Tables

BACKEND = "frozenlm"
CONTROL = {BOS: "<s>", EOS: "</s>"}
HONOURED = ("n_ctx", "n_batch", "n_ubatch", "no_perf", "on_oom", "n_ctx_min", "backend_options")


class Tokenizer:
    """Bytes, and two control tokens."""

    n_vocab = N_VOCAB
    bos, eos, eot = BOS, EOS, None
    add_bos = True
    chat_template = None

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the ids of ``text``."""
        ids = [BOS] if add_special else []
        while text:
            found = [t for t, name in CONTROL.items() if parse_special and text.startswith(name)]
            ids += found or text[0].encode()
            text = text[len(CONTROL[found[0]]) if found else 1 :]
        return ids

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token."""
        return CONTROL[token].encode() if token in CONTROL else bytes([token])

    def is_eog(self, token: int) -> bool:
        """Return whether ``token`` ends a generation."""
        return token == EOS

    def is_control(self, token: int) -> bool:
        """Return whether ``token`` is a control token."""
        return token in CONTROL


class Context:
    """One sequence: a list of (position, token), and the rows of the last call."""

    capabilities = Capabilities(kv_remove="any", logits_all=True)
    tolerance = 0.0

    def __init__(self, tables: Tables, config: ContextConfig) -> None:
        self._tables = tables
        self._cells: list[tuple[int, int]] = []
        self._rows: list[Any] = []
        self.n_batch = config.n_batch or max(512, config.n_ubatch or 0)
        self.n_ubatch = min(config.n_ubatch or self.n_batch, self.n_batch)
        self.effective = {
            "n_ctx": config.n_ctx,
            "n_batch": self.n_batch,
            "n_ubatch": self.n_ubatch,
            "n_seq_max": 1,
            "n_threads": 1,
            "n_threads_batch": 1,
            "no_perf": config.no_perf is True,
        }

    def decode(self, tokens: Any, *, seq_id: int, logits: str) -> None:
        """Append ``tokens``; make the rows of the "last", of "all" or of "none"."""
        self._rows = []
        for i, token in enumerate(tokens.tolist()):
            self._cells.append((self.n_past(seq_id), token))
            if logits == "all" or (logits == "last" and i == len(tokens) - 1):
                self._rows.append(self._tables.logits([t for _, t in self._cells]))

    def logits(self, i: int) -> Any:
        """Return output row ``i``."""
        return self._rows[i]

    def seq_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        """Remove positions [p0, p1); -1 is the end."""
        end = self.n_past(seq_id) if p1 == -1 else p1
        self._cells = [cell for cell in self._cells if not p0 <= cell[0] < end]
        return True

    def n_past(self, seq_id: int) -> int:
        """Return the next position of the only sequence."""
        del seq_id
        return max((position for position, _ in self._cells), default=-1) + 1

    def close(self) -> None:
        """Let the cells go."""
        self._cells = []


class Model:
    """A table of counts, loaded."""

    capabilities = Context.capabilities

    def __init__(self, path: str, config: ModelConfig) -> None:
        refuse_set(config, ("backend_options",))
        self._tables = Tables(path)
        self.files = (path,)
        self.tokenizer = Tokenizer()
        self.runtime: dict[str, Any] = {}
        size = os.path.getsize(path)
        self.info = ModelInfo(
            architecture="table", n_vocab=N_VOCAB, n_ctx_train=self._tables.n_ctx_train,
            n_embd=1, n_layer=1, n_head=1, n_head_kv=1, n_params=0, size_bytes=size,
        )  # fmt: skip

    def new_context(self, config: ContextConfig) -> Context:
        """Return a new context. What it cannot honour it refuses."""
        if config.n_seq_max == 1:
            config = attrs.evolve(config, n_seq_max=None)
        refuse_set(config, HONOURED)
        return Context(self._tables, config)

    def close(self) -> None:
        """There is nothing to free."""


def refuse_set(config: Any, honoured: tuple[str, ...]) -> None:
    """Raise `UnsupportedFeatureError` for a field that was set and is not among ``honoured``."""
    default = type(config)()
    for field in attrs.fields(type(config)):
        value = getattr(config, field.name)
        if field.name not in honoured and value != getattr(default, field.name):
            raise UnsupportedFeatureError(feature=f"{field.name}={value!r}", backend=BACKEND)


def engine_version() -> str:
    """Return the version of what computes."""
    return f"numpy {np.__version__}"
