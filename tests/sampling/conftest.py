"""A vocabulary of single bytes, and samplers over it or over a few tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from infercore.sampling import PortableSampler
from infercore.values.config import SamplingConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class ByteTokenizer:
    """256 bytes, then extra words, then end of sequence, end of turn and a control token."""

    def __init__(self, words: Sequence[bytes] = ()) -> None:
        self.words = [*(bytes([byte]) for byte in range(256)), *words]
        self.eos, self.eot, self.control = (len(self.words) + n for n in range(3))
        self.n_vocab = len(self.words) + 3
        self.bos = None
        self.eog_questions = 0

    def token_bytes(self, token: int) -> bytes:
        return (*self.words, b"<eos>", b"<eot>", b"[control]")[token]

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> Any:
        rest, found = text.encode(), []
        while rest:
            word = max((word for word in self.words if rest.startswith(word)), key=len)
            found.append(self.words.index(word))
            rest = rest[len(word) :]
        return found

    def is_eog(self, token: int) -> bool:
        self.eog_questions += 1
        return token in (self.eos, self.eot)

    def is_control(self, token: int) -> bool:
        return token >= len(self.words)


@pytest.fixture
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture(scope="session")
def make_tokenizer() -> type[ByteTokenizer]:
    return ByteTokenizer


PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}


@pytest.fixture
def make(tokenizer: ByteTokenizer) -> Callable[..., PortableSampler]:
    """Return ``make(n_vocab, constraint=..., **config)``: every step off that is not named."""

    def make(
        n_vocab: int | None = None, *, own: dict[str, Any] | None = None, **fields: Any
    ) -> PortableSampler:
        config = SamplingConfig(**{**PLAIN, **fields})
        size = tokenizer.n_vocab if n_vocab is None else n_vocab
        return PortableSampler(config, tokenizer=tokenizer, n_vocab=size, **(own or {}))

    return make


@pytest.fixture
def row() -> np.ndarray[Any, Any]:
    """Return logits [259] of a fixed random row, read-only as a context gives them."""
    logits = np.random.default_rng(3).standard_normal(259).astype(np.float32) * 2
    logits.setflags(write=False)
    return logits
