"""The model itself: how often each byte followed each few bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

BOS, EOS = 256, 257
N_VOCAB = 258
ORDER = 3
FLOOR = 1e-4
FORMAT = "tablelm 1"
KEYS = {"format", "n_ctx_train", "tables"}


class Tables:
    """Tables read from a file; a token's logits come from up to three tokens before it."""

    def __init__(self, path: str) -> None:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not found.keys() >= KEYS or found["format"] != FORMAT:
            raise ValueError("this is no table of tablelm 1")
        self.n_ctx_train: int = found["n_ctx_train"]
        self._shares = {key: _shares(counts) for key, counts in found["tables"].items()}

    def logits(self, tokens: list[int]) -> Any:
        """Return float32 [n_vocab] after ``tokens``: longer matches weigh more."""
        mixed = np.full(N_VOCAB, FLOOR, dtype=np.float64)
        for n in range(min(ORDER, len(tokens)) + 1):
            key = " ".join(map(str, tokens[len(tokens) - n :]))
            if key in self._shares:
                mixed += 10.0**n * self._shares[key]
        return np.log(mixed / mixed.sum()).astype(np.float32)


def _shares(counts: dict[str, int]) -> Any:
    shares = np.zeros(N_VOCAB)
    for token, n in counts.items():
        shares[int(token)] = n
    return shares / shares.sum()
