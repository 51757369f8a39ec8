"""llama.cpp driven by hand through ctypes: the loop that a careful user would write."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING

import llama_cpp.llama_cpp as llama
import numpy as np
import rivals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_SILENT = llama.llama_log_callback(lambda *_: None)
"""Kept here, as the engine calls it after a loop was closed, too."""


class RawLoop:
    """One token a call, argmax over the row in place."""

    def __init__(
        self,
        path: str,
        n_ctx: int,
        n_threads: int,
        *,
        n_gpu_layers: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        llama.llama_log_set(_SILENT, None)
        llama.llama_backend_init()
        loading = llama.llama_model_default_params()
        loading.n_gpu_layers = n_gpu_layers
        kept = rivals.lay_out(loading, path)
        self._model = model = llama.llama_model_load_from_file(path.encode(), loading)
        del kept
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = n_ctx, n_threads, n_threads
        params.n_batch = self.n_batch = min(rivals.N_BATCH, n_ctx)
        params.n_ubatch = min(rivals.N_UBATCH, n_ctx)
        params.flash_attn_type = -1 if n_gpu_layers else 0
        self._clock = clock
        self._context = llama.llama_init_from_model(model, params)
        self._memory = llama.llama_get_memory(self._context)
        self._n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._batch = llama.llama_batch_init(self.n_batch, 0, 1)

    def close(self) -> None:
        """Free the context, the model and the batch."""
        llama.llama_batch_free(self._batch)
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)

    def run(self, prompt: Sequence[int], n_tokens: int) -> tuple[list[int], float]:
        """Return the greedy tokens after ``prompt``, and the seconds they took."""
        llama.llama_memory_clear(self._memory, True)
        self._decode(prompt, 0)
        started = self._clock()
        tokens, position = [], len(prompt)
        for _ in range(n_tokens):
            token = self._argmax()
            tokens.append(token)
            self._decode_one(token, position)
            position += 1
        return tokens, self._clock() - started

    def prefill_s(self, prompt: Sequence[int]) -> float:
        """Return the seconds that ``prompt`` takes in an empty context."""
        llama.llama_memory_clear(self._memory, True)
        started = self._clock()
        for begin in range(0, len(prompt), self.n_batch):
            self._decode(prompt[begin : begin + self.n_batch], begin)
        llama.llama_synchronize(self._context)
        return self._clock() - started

    def _decode(self, tokens: Sequence[int], position: int) -> None:
        batch = self._batch
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i == len(tokens) - 1
        batch.n_tokens = len(tokens)
        assert llama.llama_decode(self._context, batch) == 0  # noqa: S101

    def _decode_one(self, token: int, position: int) -> None:
        batch = self._batch
        batch.n_tokens = 1
        batch.token[0], batch.pos[0], batch.logits[0] = token, position, True
        llama.llama_decode(self._context, batch)

    def _argmax(self) -> int:
        row = llama.llama_get_logits_ith(self._context, -1)
        array = (ctypes.c_float * self._n_vocab).from_address(ctypes.addressof(row.contents))
        return int(np.frombuffer(array, dtype=np.float32).argmax())
