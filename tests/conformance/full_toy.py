"""A toy that declares nearly everything: wrong backends are made from it, and run in no time.

Its logits are a hash of the tokens and positions held, so that any wrong cache shows at once.
"""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from infercore.api import CoreBackend
from infercore.conformance import Observation, Rig
from infercore.errors import (
    DecodeAbortedError,
    ModelFormatError,
    ModelNotFoundError,
    UnsupportedFeatureError,
)
from infercore.protocols.hooks import API_VERSION
from infercore.sampling.factory import new_portable_sampler
from infercore.testing import engine_of
from infercore.testing.toy import N_CTX_TRAIN, N_VOCAB, ToyTokenizer, toy_logits
from infercore.values import checks
from infercore.values.config import ContextConfig, refuse_unhonoured
from infercore.values.info import BackendDescriptor, Capabilities, MemoryPlan, ModelInfo

N_EMBD = 8
N_ENCODED = 256
DECLARED = Capabilities(
    kv_remove="any",
    kv_copy="any",
    kv_shift=True,
    kv_divide=True,
    multi_sequence=True,
    state=True,
    sequence_state=True,
    logits_all=True,
    embeddings=True,
    pooling=("none", "mean", "cls", "last"),
    abort=True,
    live_threads=True,
    kv_types=("f32", "f16"),
    flash_attention=("off",),
    lora=True,
    native_sampler=True,
    perf=True,
)
CHOICES = {
    "type_k": ("f32", "f16"),
    "type_v": ("f32", "f16"),
    "flash_attn": ("off",),
    "pooling_type": ("none", "mean", "cls", "last"),
    "attention_type": ("causal",),
}
DEFAULTS = {"type_k": "f32", "type_v": "f32", "flash_attn": "off", "pooling_type": "none",
            "attention_type": "causal"}  # fmt: skip
FREE = ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch", "embeddings",
        "kv_unified", "no_perf", "on_oom", "n_ctx_min", "backend_options", "adapters")  # fmt: skip


def resolve(config: ContextConfig) -> dict[str, Any]:
    """Return the value in force of every field that the toy knows."""
    for field in attrs.fields(ContextConfig):
        value = getattr(config, field.name)
        known = field.name in FREE or value is None or value in CHOICES.get(field.name, ())
        if not known:
            raise UnsupportedFeatureError(feature=f"{field.name}={value!r}", backend="toy")
    kinds = FullContext.capabilities
    if config.embeddings and not kinds.embeddings:
        raise UnsupportedFeatureError(feature="embeddings", backend="toy")
    if config.pooling_type is not None and config.pooling_type not in kinds.pooling:
        raise UnsupportedFeatureError(feature="pooling", backend="toy")
    n_batch = config.n_batch or max(64, config.n_ubatch or 0)
    chosen = {name: getattr(config, name) or default for name, default in DEFAULTS.items()}
    pooled = chosen["pooling_type"] != "none"
    return {
        **chosen,
        "n_ctx": config.n_ctx,
        "n_batch": n_batch,
        "n_ubatch": min(config.n_ubatch or n_batch, n_batch),
        "n_seq_max": config.n_seq_max or 1,
        "n_threads": config.n_threads or 1,
        "n_threads_batch": config.n_threads_batch or 1,
        "embeddings": pooled if config.embeddings is None else config.embeddings,
        "kv_unified": config.kv_unified is True,
        "no_perf": config.no_perf is True,
        "adapters": config.adapters,
    }


def hidden(positions: Any, tokens: Any) -> Any:
    """Return a vector of what is held."""
    data = json.dumps([list(positions), list(tokens)]).encode()
    raw = hashlib.shake_256(data).digest(2 * N_EMBD)
    return np.frombuffer(raw, dtype="<u2").astype(np.float32) / 65536


class FullContext:
    """Cells (position, token) of each sequence, and the rows of the last call."""

    capabilities = DECLARED
    tolerance = 0.0

    def __init__(self, config: ContextConfig) -> None:
        self.effective = resolve(config)
        self.n_batch: int = self.effective["n_batch"]
        self.n_ubatch: int = self.effective["n_ubatch"]
        self.cells: list[list[tuple[int, int]]] = [[] for _ in range(self.effective["n_seq_max"])]
        self.evaluated = 0
        self.rows: list[Any] = []
        self.vectors: list[Any] = []
        self.owners: list[tuple[int, ...]] = []
        self.stop = threading.Event()
        self.ask: Any = None
        self.strength = 0.0
        self.threads = (self.effective["n_threads"], self.effective["n_threads_batch"])
        self.set_adapters(config.adapters)

    def decode(self, tokens: Any, *, seq_id: int, logits: str) -> None:
        n = len(tokens)
        start = self.n_past(seq_id)
        wanted = [logits == "all" or (logits == "last" and i == n - 1) for i in range(n)]
        self.decode_batch(tokens, range(start, start + n), [(seq_id,)] * n, wanted)

    def decode_batch(self, tokens: Any, positions: Any, seq_ids: Any, wanted: Any) -> None:
        self.rows, self.vectors, self.owners = [], [], []
        for i, token in enumerate(np.asarray(tokens).tolist()):
            if i % self.n_ubatch == 0:
                self.check_abort()
            self.append(token, int(positions[i]), seq_ids[i], want=bool(wanted[i]))

    def append(self, token: int, position: int, seq_ids: Any, *, want: bool) -> None:
        self.evaluated += 1
        for seq_id in seq_ids:
            self.cells[seq_id].append((position, token))
        held = self.cells[seq_ids[0]]
        where, what = zip(*held, strict=True)
        if want:
            distances = [position - where[0] for position in where]  # all that counts, as with rope
            self.rows.append(self.kept(toy_logits(what, distances)) + self.changed(what))
        self.vectors.append(hidden(where, what))
        self.owners.append(tuple(seq_ids))

    def kept(self, row: Any) -> Any:
        """Return the row as a cache of this type has it."""
        rounds = self.effective["type_k"] == "f16"
        return row.astype(np.float16).astype(np.float32) if rounds else row

    def changed(self, tokens: Any) -> Any:
        """Return what adapters add to the logits after ``tokens``."""
        return np.float32(self.strength) * toy_logits([*tokens, 0])

    def check_abort(self) -> None:
        if self.stop.is_set() or (self.ask is not None and self.ask()):
            raise DecodeAbortedError("the toy was stopped", resident_tokens=0)

    def logits(self, i: int) -> Any:
        return self.rows[i]

    def embeddings(self) -> Any:
        return np.array(self.vectors)

    def embedding(self, seq_id: int) -> Any:
        pairs = zip(self.vectors, self.owners, strict=True)
        own = np.array([vector for vector, ids in pairs if seq_id in ids])
        kind = self.effective["pooling_type"]
        return own.mean(axis=0) if kind == "mean" else own[0 if kind == "cls" else -1]

    def set_embeddings(self, on: bool) -> None:
        self.effective["embeddings"] = on

    def n_past(self, seq_id: int) -> int:
        return max((position for position, _ in self.cells[seq_id]), default=-1) + 1

    def seq_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        self.cells[seq_id] = [c for c in self.cells[seq_id] if not inside(c, p0, p1)]
        return True

    def seq_copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        both = self.cells[dst] + [c for c in self.cells[src] if inside(c, p0, p1)]
        self.cells[dst] = sorted(both, key=lambda cell: cell[0])

    def seq_shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        self.move(seq_id, p0, p1, lambda position: position + delta)

    def seq_divide(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        self.move(seq_id, p0, p1, lambda position: position // d)

    def move(self, seq_id: int, p0: int, p1: int, change: Any) -> None:
        own = self.cells[seq_id]
        self.cells[seq_id] = [(change(c[0]), c[1]) if inside(c, p0, p1) else c for c in own]

    def clear(self) -> None:
        self.cells = [[] for _ in self.cells]

    def save_state(self) -> bytes:
        return json.dumps(self.cells).encode()

    def load_state(self, data: bytes) -> None:
        found = [[tuple(c) for c in own] for own in json.loads(data)]
        if len(found) != len(self.cells):
            raise ValueError(f"{len(found)} sequences")
        self.cells = found

    def save_sequence(self, seq_id: int) -> bytes:
        return json.dumps(self.cells[seq_id]).encode()

    def load_sequence(self, seq_id: int, data: bytes) -> None:
        self.cells[seq_id] = [tuple(c) for c in json.loads(data)]

    def set_threads(self, n: int, n_batch: int) -> None:
        self.threads = (n, n_batch)
        self.effective.update(n_threads=n, n_threads_batch=n_batch)

    def set_adapters(self, adapters: Any) -> None:
        self.strength = sum(adapter.scale * strength_of(adapter.path) for adapter in adapters)
        self.effective["adapters"] = tuple(adapters)

    def abort(self) -> None:
        self.stop.set()

    def clear_abort(self) -> None:
        self.stop.clear()

    def set_abort_callback(self, callback: Any) -> None:
        self.ask = callback

    def warmup(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        self.cells = []


def strength_of(path: str) -> float:
    """Return what a toy adapter is made of."""
    if not Path(path).exists():
        raise ModelNotFoundError(f"no adapter at {path}", path=path)
    try:
        return float(json.loads(Path(path).read_text())["adapter"])
    except (OSError, ValueError, KeyError) as error:
        raise ModelFormatError(f"no adapter: {path}", path=path) from error


def inside(cell: tuple[int, int], p0: int, p1: int) -> bool:
    """Whether a cell lies in [p0, p1); -1 is the end."""
    return p0 <= cell[0] and (p1 == -1 or cell[0] < p1)


class NativeSampler:
    """The engine's own sampler, which is the portable one."""

    def __init__(self, sampler: Any) -> None:
        self.portable = sampler
        self.seed = sampler.seed

    def sample(self, context: Any, i: int) -> int:
        return int(self.portable.sample_logits(context.logits(i)))

    def observe(self, tokens: Any) -> None:
        self.portable.observe(tokens)

    def reset(self) -> None:
        self.portable.reset()

    def clone(self) -> NativeSampler:
        return NativeSampler(self.portable.clone())

    def close(self) -> None:
        self.portable.close()


class FullModel:
    """Weights that are the bytes of a JSON file."""

    context = FullContext
    sampler = NativeSampler

    def __init__(self, path: str) -> None:
        data = Path(path).read_bytes()
        json.loads(data)
        self.files = (path,)
        self.digest = hashlib.sha256(data).hexdigest()
        self.tokenizer = ToyTokenizer()
        self.runtime: dict[str, Any] = {}
        self.info = ModelInfo(
            architecture="toy", n_vocab=N_VOCAB, n_ctx_train=N_CTX_TRAIN, n_embd=N_EMBD,
            n_layer=1, n_head=1, n_head_kv=1, n_params=0, size_bytes=len(data),
        )  # fmt: skip

    @property
    def capabilities(self) -> Capabilities:
        return self.context.capabilities

    def new_context(self, config: ContextConfig) -> Any:
        return self.context(config)

    def new_sampler(self, config: Any) -> Any:
        portable = attrs.evolve(config, implementation="portable")
        return self.sampler(new_portable_sampler(portable, self.tokenizer, N_VOCAB))

    def plan_memory(self, config: ContextConfig) -> MemoryPlan:
        kv, n_ctx = 16 * (config.n_ctx or 0), config.n_ctx or 0
        weights = self.info.size_bytes
        return MemoryPlan(weights_bytes=weights, kv_bytes=kv, compute_bytes=1,
                          peak_bytes=weights + kv + 1, n_ctx=n_ctx,
                          kv_bytes_by_kind={"full": kv})  # fmt: skip

    def close(self) -> None:
        pass


ENCODES = Capabilities(
    multi_sequence=True,
    embeddings=True,
    pooling=("none", "mean", "cls", "last"),
    encoder=True,
    perf=True,
)


OF_ENCODERS: dict[str, Any] = {
    **dict.fromkeys(("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch")),
    "pooling_type": ENCODES.pooling, "attention_type": ("non-causal",), "embeddings": (True,),
    "kv_unified": None,
}  # fmt: skip


class EncoderContext:
    """The vectors of whole texts: a token's is a hash of the text and of its place in it."""

    capabilities = ENCODES
    tolerance = 0.0

    def __init__(self, config: ContextConfig) -> None:
        if (config.n_ctx or 0) > N_ENCODED:
            raise checks.refuse("n_ctx", config.n_ctx, f"at most {N_ENCODED}")
        refuse_unhonoured(config, OF_ENCODERS, backend="toy")
        n_batch = config.n_batch or config.n_ctx or 64
        self.n_batch, self.n_ubatch = n_batch, min(config.n_ubatch or n_batch, n_batch)
        self.effective = {
            "n_ctx": config.n_ctx, "n_batch": self.n_batch, "n_ubatch": self.n_ubatch,
            "n_seq_max": config.n_seq_max or 1, "n_threads": config.n_threads or 1,
            "n_threads_batch": config.n_threads_batch or 1,
            "pooling_type": config.pooling_type or "mean", "attention_type": "non-causal",
            "embeddings": True, "kv_unified": config.kv_unified is True,
        }  # fmt: skip
        self.vectors: dict[int, Any] = {}

    def encode(self, tokens: Any) -> None:
        self.decode(tokens, seq_id=0, logits="none")

    def decode(self, tokens: Any, *, seq_id: int, logits: str) -> None:
        self.vectors = {seq_id: self.text(tokens)}

    def decode_batch(self, tokens: Any, positions: Any, seq_ids: Any, wanted: Any) -> None:
        every = {s for ids in seq_ids for s in ids}
        own = {s: np.array([s in ids for ids in seq_ids]) for s in every}
        self.vectors = {s: self.text(tokens[mask]) for s, mask in own.items()}

    def text(self, tokens: Any) -> Any:
        ids = [int(token) for token in tokens]
        return np.array([hidden([i], ids) for i in range(len(ids))])

    def embeddings(self) -> Any:
        return np.concatenate(list(self.vectors.values()))

    def embedding(self, seq_id: int) -> Any:
        own, kind = self.vectors[seq_id], self.effective["pooling_type"]
        return own.mean(axis=0) if kind == "mean" else own[0 if kind == "cls" else -1]

    def set_embeddings(self, on: bool) -> None:
        if not on:
            raise UnsupportedFeatureError(feature="set_embeddings(False)", backend="toy")

    def n_past(self, seq_id: int) -> int:
        return 0

    def seq_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        return True

    def logits(self, i: int) -> Any:
        raise AssertionError("the guard knows that there are none")

    def close(self) -> None:
        pass


class EncoderModel(FullModel):
    """A model that encodes texts."""

    context = EncoderContext

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.info = attrs.evolve(self.info, has_encoder=True, n_ctx_train=N_ENCODED)


def load(path: str, _config: Any) -> Any:
    """Return the toy, or the toy that encodes."""
    return EncoderModel(path) if "encoder" in Path(path).name else FullModel(path)


BACKEND = CoreBackend(
    BackendDescriptor(
        name="toy",
        api_version=API_VERSION,
        match=lambda _path: 0.0,
        loader=load,
        engine_version=lambda: "1",
    )
)


def observe(context: Any, seq_id: int) -> Observation:
    """Return what the cells hold."""
    engine = engine_of(context)
    tokens = tuple(token for _, token in engine.cells[seq_id])
    return Observation(
        resident=len(tokens), evaluated=engine.evaluated, tokens=tokens, threads=engine.threads
    )


def toy_rig(path: Path, **fields: Any) -> Rig:
    """Return a rig of the toy, whose files are written to ``path`` and beside it first."""
    adapter, encoder = path.with_name("adapter.json"), path.with_name("encoder.json")
    if not path.exists():
        path.write_text(json.dumps({"toy": "x" * 1000}))
        adapter.write_text(json.dumps({"adapter": 0.5}))
        encoder.write_text(json.dumps({"toy": "y" * 1000}))
    given = {
        "backend": "toy",
        "open_model": lambda: BACKEND.load_model(str(path)),
        "open_path": BACKEND.load_model,
        "path": str(path),
        "adapter": str(adapter),
        "encoder": str(encoder),
        "tolerance": 0.0,
        "suite_version": "1.2",
        "observe": observe,
    }
    return Rig(**{**given, **fields})
