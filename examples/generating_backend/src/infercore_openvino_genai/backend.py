"""Model and session over a pipeline that generates by itself.

The engine takes whole texts as token ids and gives tokens back; what it has computed before it
finds again by itself, in blocks of 32 tokens. So a session here is a list of tokens: a prompt is
evaluated by asking for one token more, and a decode is one request that is read token by token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import openvino_genai as genai

import openvino as ov
from infercore import (
    Capabilities,
    ContextConfig,
    DecodeAbortedError,
    ModelConfig,
    ModelFormatError,
    refuse_unhonoured,
)
from infercore_openvino import cpu, files, graph
from infercore_openvino.facts import model_info
from infercore_openvino.tokenizer import JsonTokenizer
from infercore_openvino_genai.sampler import BACKEND, Sampler

if TYPE_CHECKING:
    from collections.abc import Mapping

BLOCK_SIZE = 32
KV_TYPES = ("f32", "f16", "u8")
# its default (bfloat16) ends the process where there is one core
ARITHMETIC = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
HONOURED: Mapping[str, Any] = {
    "n_batch": None,
    "n_ubatch": None,
    "n_seq_max": (1,),
    "n_threads": None,
    "precision": ("accurate",),
    "type_k": KV_TYPES,
    "type_v": KV_TYPES,
}
KINDS = Capabilities(
    kv_remove="suffix", abort=True, native_sampler=True, logits="none", kv_types=KV_TYPES
)


class Pipelines:
    """Pipelines of one model: each serves one session at a time, and the next one afterwards."""

    def __init__(self, folder: str, path: str) -> None:
        self._folder = folder
        self._path = path
        self._idle: dict[tuple[Any, ...], list[Any]] = {}

    def take(self, n_blocks: int, n_step: int, properties: Mapping[str, str]) -> tuple[Any, Any]:
        """Return a pipeline with so many blocks, and the key to give it back with."""
        key = (n_blocks, n_step, *sorted(properties.items()))
        idle = self._idle.setdefault(key, [])
        return (idle.pop() if idle else self._open(n_blocks, n_step, properties)), key

    def give_back(self, key: Any, pipeline: Any) -> None:
        """Keep ``pipeline`` for the next session."""
        self._idle.setdefault(key, []).append(pipeline)

    def close(self) -> None:
        """Free all."""
        self._idle.clear()

    def _open(self, n_blocks: int, n_step: int, properties: Mapping[str, str]) -> Any:
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = n_blocks
        scheduler.max_num_batched_tokens = n_step
        scheduler.enable_prefix_caching = True
        try:
            return genai.ContinuousBatchingPipeline(
                self._folder, scheduler, "CPU", dict(properties)
            )
        except RuntimeError as error:
            text = f"{self._path} cannot be opened by openvino_genai: {str(error)[:200]}"
            raise ModelFormatError(text, path=self._path) from error


class Session:
    """One sequence: its tokens, and the request that generates behind them, while there is one."""

    capabilities = KINDS
    tolerance = 5e-3

    def __init__(self, pipelines: Pipelines, config: ContextConfig, n_ctx: int) -> None:
        kv_type = config.type_k or config.type_v or "f16"
        n_threads = config.n_threads or cpu.usable_cores()
        self.n_batch = config.n_batch or max(512, config.n_ubatch or 0)
        self.n_ubatch = min(config.n_ubatch or self.n_batch, self.n_batch)
        self._n_ctx = n_ctx
        # A request may need new blocks for all its tokens beside those that are cached.
        n_blocks = 2 * (-(-(n_ctx + 1) // BLOCK_SIZE) + 1)
        properties = {
            "KV_CACHE_PRECISION": kv_type,
            "INFERENCE_NUM_THREADS": str(n_threads),
            **ARITHMETIC,
        }
        self._pipelines = pipelines
        self._pipeline, self._key = pipelines.take(n_blocks, self.n_ubatch, properties)
        self._tokens: list[int] = []
        self._request: Any = None
        self._reader: Sampler | None = None
        self._chosen: int | None = None
        self._n_requests = 0
        self._aborted = False
        self.effective = {
            "n_ctx": n_ctx,
            "n_batch": self.n_batch,
            "n_ubatch": self.n_ubatch,
            "n_seq_max": 1,
            "n_threads": n_threads,
            "n_threads_batch": n_threads,
            "type_k": kv_type,
            "type_v": kv_type,
            "precision": "accurate",
            "no_perf": config.no_perf is True,
        }

    def decode(self, tokens: Any, *, seq_id: int, logits: str) -> None:
        """Append ``tokens``. The one that the engine chose last it goes on from by itself."""
        del seq_id, logits
        ids = tokens.tolist()
        if ids == [self._chosen]:
            self._tokens += ids
            self._chosen = None
            return
        self._end_request()
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = 1, True
        self._request = self._asked([*self._tokens, *ids], config)
        try:
            self._next()
        finally:
            self._end_request()
        self._tokens += ids

    def next_token(self, sampler: Sampler) -> int:
        """Return the next token that ``sampler`` makes the engine choose."""
        goes_on = self._reader is sampler and self._chosen is None and self._request is not None
        if not goes_on:
            self._end_request()
            n_left = max(1, self._n_ctx - len(self._tokens))
            self._request = self._asked(self._tokens, sampler.config_of(n_left))
            self._reader = sampler
        try:
            self._chosen = self._next()
        except BaseException:
            self._end_request()
            raise
        return self._chosen

    def _asked(self, tokens: list[int], config: Any) -> Any:
        self._n_requests += 1
        ids = ov.Tensor(np.array([tokens], dtype=np.int64))
        return self._pipeline.add_request(self._n_requests, ids, config)

    def _next(self) -> int:
        """Step until the request has a token. Raises `DecodeAbortedError` between two steps."""
        while not self._request.can_read():
            if self._aborted:
                n = len(self._tokens)
                raise DecodeAbortedError("cancelled between two steps", resident_tokens=n)
            self._pipeline.step()
        outputs = self._request.read()
        return int(next(iter(outputs.values())).generated_ids[0])

    def _end_request(self) -> None:
        request, self._request = self._request, None
        self._reader = self._chosen = None
        if request is not None:
            request.cancel()
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()

    def seq_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        """Remove the end of the sequence from ``p0`` on; False for any other part."""
        del seq_id
        if p1 != -1 and p1 < len(self._tokens):
            return False
        self._end_request()
        del self._tokens[p0:]
        return True

    def n_past(self, seq_id: int) -> int:
        """Return the next position."""
        del seq_id
        return len(self._tokens)

    def abort(self) -> None:
        """End the call that runs before its next step; from any thread."""
        self._aborted = True

    def clear_abort(self) -> None:
        """Forget an earlier `abort`."""
        self._aborted = False

    def close(self) -> None:
        """Let the pipeline go."""
        self._end_request()
        self._pipelines.give_back(self._key, self._pipeline)


class Model:
    """A folder in OpenVINO's format, for sessions of the engine's own."""

    capabilities = KINDS

    def __init__(self, path: str, config: ModelConfig) -> None:
        refuse_unhonoured(config, (), backend=BACKEND)
        path = str(path)
        found = files.find(path)
        shape = graph.build(ov.Core(), found, "stateful", path).shape
        self.info = model_info(found, shape)
        self.tokenizer = JsonTokenizer(found, self.info.n_vocab, path)
        self.files = (found.xml, found.bin, found.tokenizer_json)
        self.runtime = {"device": "CPU"}
        self._ends = [t for t in range(self.info.n_vocab) if self.tokenizer.is_eog(t)]
        self._pipelines = Pipelines(found.folder, path)

    def new_session(self, config: ContextConfig) -> Session:
        """Return a new session. What it cannot honour it refuses."""
        refuse_unhonoured(config, HONOURED, backend=BACKEND)
        return Session(self._pipelines, config, int(config.n_ctx or 0))

    def new_sampler(self, config: Any) -> Sampler:
        """Return what the engine chooses tokens by. What it cannot do it refuses."""
        return Sampler(config, self._ends)

    def close(self) -> None:
        """Free the pipelines."""
        self._pipelines.close()
