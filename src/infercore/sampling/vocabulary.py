"""The vocabulary in the form that llguidance reads, made once for each tokenizer."""

from __future__ import annotations

import importlib
import weakref
from typing import TYPE_CHECKING, Any

from infercore.errors import UnsupportedFeatureError
from infercore.sampling.eog import eog_ids
from infercore.sampling.per_tokenizer import PerTokenizer
from infercore.values import install

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from infercore.protocols.public import Tokenizer


def llguidance() -> ModuleType:
    """Return the module, imported when first needed.

    Raises `UnsupportedFeatureError` where it is not installed; nothing is changed.
    """
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise UnsupportedFeatureError(
            feature="response_format", hint=f"run: {install.of_extra('constraints')}"
        ) from error


class Vocabulary:
    """What ``llguidance.TokenizerWrapper`` asks of a tokenizer; its names are fixed there.

    ``tokens`` are the bytes of each id; ``special_token_ids`` never stand for text. A tokenizer
    without an end-of-generation token gets one beyond its vocabulary, which nothing can choose.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.n_vocab)
        self.eog = _eos_first(eog_ids(tokenizer).tolist(), tokenizer.eos)
        self.tokens = [tokenizer.token_bytes(token) for token in ids]
        self.special_token_ids = sorted({*filter(tokenizer.is_control, ids), *self.eog})
        if not self.eog:
            self.eog = [tokenizer.n_vocab]
            self.tokens.append(b"<end>")
            self.special_token_ids.append(tokenizer.n_vocab)
        self.eos_token_id = self.eog[0]
        self.bos_token_id = tokenizer.bos
        self._tokenizer = _weakly(tokenizer)

    def __call__(self, text: str) -> Sequence[int]:
        """Return the tokens of ``text``, which join to exactly its bytes."""
        if not isinstance(text, str):
            raise TypeError("text is a str")  # so the wrapper learns that bytes are not taken
        wanted = text.encode()
        tokens: Sequence[int] = self._tokenizer().encode(
            text, add_special=False, parse_special=False
        )
        if b"".join(self.tokens[token] for token in tokens) == wanted:
            return tokens
        return self._longest_matches(wanted)

    def _longest_matches(self, rest: bytes) -> list[int]:
        """Return a tokenization for tokenizers that change a text's beginning (a space before)."""
        special = set(self.special_token_ids)
        ids = {word: token for token, word in enumerate(self.tokens) if token not in special}
        longest = max(map(len, ids))
        found: list[int] = []
        while rest:
            size = next((n for n in range(longest, 0, -1) if rest[:n] in ids), 0)
            if size == 0:
                break
            found.append(ids[rest[:size]])
            rest = rest[size:]
        return found


def _eos_first(eog: list[int], eos: int | None) -> list[int]:
    return sorted(eog, key=lambda token: (token != eos, token))


def _weakly(tokenizer: Tokenizer) -> Callable[[], Any]:
    try:
        return weakref.ref(tokenizer)
    except TypeError:
        return lambda: tokenizer


def _build(tokenizer: Tokenizer) -> Any:
    module = llguidance()
    vocabulary = Vocabulary(tokenizer)
    return module.LLTokenizer(module.TokenizerWrapper(vocabulary), eos_token=vocabulary.eog)


ll_tokenizer = PerTokenizer(_build)
"""Return the ``llguidance.LLTokenizer`` of a tokenizer, built once; keep the tokenizer alive."""
