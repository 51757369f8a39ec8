"""Reads what transformers makes of texts with an encoder of the pack, in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from infercore_models._catalogue import ENCODERS, UnknownModelError, folder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class GoldenText:
    """One text and what the encoder makes of it.

    `tokens` are the ids of `text` with the special ones around it, `rows` the last hidden states,
    a read-only float32 array [n_tokens, n_embd]. Their mean is the embedding, not normalised.
    """

    text: str
    tokens: tuple[int, ...]
    rows: NDArray[np.float32]


def golden_texts(name: str) -> tuple[GoldenText, ...]:
    """The texts of that encoder with their ids and hidden states.

    Raises `UnknownModelError`, a `LookupError`, also for a model that is no encoder.
    """
    import numpy as np

    if name not in ENCODERS:
        raise UnknownModelError(name, ENCODERS)
    with np.load(folder(name) / "golden.npz", allow_pickle=False) as arrays:
        texts = [str(text) for text in arrays["texts"]]
        return tuple(_text(arrays, i, text) for i, text in enumerate(texts))


def _text(arrays: np.lib.npyio.NpzFile, number: int, text: str) -> GoldenText:
    rows: NDArray[np.float32] = arrays[f"rows_{number}"]
    rows.setflags(write=False)
    return GoldenText(text, tuple(arrays[f"tokens_{number}"].tolist()), rows)
