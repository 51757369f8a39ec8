"""A model without files: its tokens are bytes, its logits a hash of all it has read.

Small and complete: the least that a backend must have (tokenize, decode, logits, remove, close),
everything else refused. A token's logits depend on every token before it and on its position,
so a wrong KV cache shows at once.
"""

from __future__ import annotations

import hashlib
import os
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from infercore import api
from infercore.errors import UnsupportedFeatureError
from infercore.protocols.hooks import API_VERSION
from infercore.testing.reference import wrapped
from infercore.values.config import ContextConfig
from infercore.values.info import BackendDescriptor, Capabilities, ModelInfo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infercore.protocols.public import Model
    from infercore.protocols.spi import FloatArray, TokenArray
    from infercore.testing.faults import Faults

BOS, EOS, EOT = 256, 257, 258
CONTROL = {BOS: "<s>", EOS: "</s>", EOT: "<|end|>"}
MERGES = {259: b"the ", 260: "é".encode(), 261: b"\xf0\x9f", 262: b"\x98\x80"}
N_VOCAB = 264
N_CTX_TRAIN = 1024
HONOURED = ("n_ctx", "n_batch", "n_ubatch", "no_perf", "on_oom", "n_ctx_min", "backend_options")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
_DEFAULTS = ContextConfig(n_seq_max=1)


class ToyTokenizer:
    """Bytes, three control tokens, and a few merges; two of them split a character."""

    n_vocab = N_VOCAB
    bos, eos, eot = BOS, EOS, EOT
    add_bos = True
    chat_template = CHAT_TEMPLATE

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> Sequence[int]:
        """Return the ids of ``text``: the first piece that fits, from left to right."""
        pieces = {piece: token for token, piece in MERGES.items()}
        if parse_special:
            pieces.update({name.encode(): token for token, name in CONTROL.items()})
        data = text.encode()
        tokens = [BOS] if add_special else []
        while data:
            piece = next((piece for piece in pieces if data.startswith(piece)), data[:1])
            tokens.append(pieces.get(piece, data[0]))
            data = data[len(piece) :]
        return tokens

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token."""
        if token in CONTROL:
            return CONTROL[token].encode()
        return bytes([token]) if token < BOS else MERGES.get(token, b"")

    def is_eog(self, token: int) -> bool:
        """Return whether ``token`` ends a generation."""
        return token in {EOS, EOT}

    def is_control(self, token: int) -> bool:
        """Return whether ``token`` is a control token."""
        return token in CONTROL


def toy_logits(tokens: Sequence[int], positions: Sequence[int] | None = None) -> FloatArray:
    """Return the toy's logits [n_vocab] after ``tokens`` (at 0, 1, 2, ... by default).

    Usually the likeliest token is a letter, a blank or an end.
    """
    where = range(len(tokens)) if positions is None else positions
    pairs = np.array([*zip(where, tokens, strict=True)], dtype="<i8")
    seed = hashlib.sha256(pairs.tobytes()).digest()
    numbers = np.frombuffer(hashlib.shake_256(seed).digest(2 * N_VOCAB), dtype="<u2")
    logits = (numbers / 6553.6).astype(np.float32)
    logits[ord("a") : ord("z") + 1] += 4
    logits[[ord(" "), ord(".")]] += 5
    return logits


class ToyContext:
    """The tokens of one sequence with their positions, and the rows of the last call."""

    capabilities = Capabilities(kv_remove="any", logits_all=True)
    tolerance = 0.0

    def __init__(self, config: ContextConfig) -> None:
        self.n_batch = config.n_batch or 64
        self.n_ubatch = config.n_ubatch or self.n_batch
        self.effective: Mapping[str, Any] = MappingProxyType(
            {
                "n_ctx": config.n_ctx,
                "n_batch": self.n_batch,
                "n_ubatch": self.n_ubatch,
                "n_seq_max": 1,
                "n_threads": 1,
                "n_threads_batch": 1,
                "no_perf": config.no_perf is True,
            }
        )
        self.cells: list[tuple[int, int]] = []
        self._rows: list[FloatArray] = []

    def decode(self, tokens: TokenArray, *, seq_id: int, logits: str) -> None:
        """Append tokens; rows of the "last", of "all" or of "none"."""
        del seq_id
        self._rows = []
        for i, token in enumerate(tokens.tolist()):
            self.cells.append((self.n_past(0), token))
            if logits == "all" or (logits == "last" and i == len(tokens) - 1):
                positions, held = zip(*self.cells, strict=True)
                self._rows.append(toy_logits(held, positions))

    def logits(self, i: int) -> FloatArray:
        """Return output row ``i``."""
        return self._rows[i]

    def seq_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        """Remove positions [p0, p1)."""
        del seq_id
        end = self.n_past(0) if p1 == -1 else p1
        self.cells = [cell for cell in self.cells if not p0 <= cell[0] < end]
        return True

    def n_past(self, seq_id: int) -> int:
        """Return the next position."""
        del seq_id
        return max((position for position, _ in self.cells), default=-1) + 1

    def close(self) -> None:
        """Let the cells go."""
        self.cells = []


class ToyModel:
    """An `EngineModel` that needs no files."""

    capabilities = ToyContext.capabilities
    digest = hashlib.sha256(b"infercore toy 1").hexdigest()
    files = ()

    def __init__(self) -> None:
        self.tokenizer = ToyTokenizer()
        self.runtime: Mapping[str, Any] = {}
        self.info = ModelInfo(
            architecture="toy",
            n_vocab=N_VOCAB,
            n_ctx_train=N_CTX_TRAIN,
            n_embd=1,
            n_layer=1,
            n_head=1,
            n_head_kv=1,
            n_params=0,
            size_bytes=0,
        )

    def new_context(self, config: ContextConfig) -> ToyContext:
        """Return a new context; options beyond sizes are refused."""
        for field in attrs.fields(ContextConfig):
            value = getattr(attrs.evolve(config, n_seq_max=config.n_seq_max or 1), field.name)
            if field.name not in HONOURED and value != getattr(_DEFAULTS, field.name):
                raise UnsupportedFeatureError(feature=f"{field.name}={value!r}", backend="toy")
        return ToyContext(config)

    def close(self) -> None:
        """There is nothing to free."""


def load_toy_model(*, faults: Faults | None = None, **capabilities: Any) -> Model:
    """Return a guarded toy model; keywords as in `load_reference_model`."""

    def load(_path: str, _config: Any) -> Any:
        return wrapped(ToyModel(), attrs.evolve(ToyModel.capabilities, **capabilities), faults)

    descriptor = BackendDescriptor(
        name="toy",
        api_version=API_VERSION,
        match=lambda _path: 0.0,
        loader=load,
        engine_version=lambda: "1",
        tries_in_child=False,
    )
    return api.CoreBackend(descriptor).load_model(os.curdir)  # any path: no file is read
