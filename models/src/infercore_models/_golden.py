"""Reads the outputs that were computed with transformers, in float32, from the model's weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infercore_models._catalogue import STORYTELLERS, UnknownModelError, folder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class GoldenPrompt:
    """One prompt and what the model makes of it.

    `tokens` are the ids of `text` with the leading BOS. `logits` is a read-only float32 array
    [n_tokens, n_vocab]; row i predicts the token after ``tokens[i]``. `greedy` are the ids that
    argmax appends, without the end token; `ended` tells whether one came, else the limit cut it
    off.
    """

    text: str
    tokens: tuple[int, ...]
    logits: NDArray[np.float32]
    greedy: tuple[int, ...]
    ended: bool


@dataclass(frozen=True, eq=False)
class Golden:
    """The golden outputs of one model; `max_new_tokens` is the limit of every ``greedy``."""

    prompts: tuple[GoldenPrompt, ...]
    max_new_tokens: int


def golden(name: str) -> Golden:
    """The prompts of that model with their logits and greedy continuations.

    Raises `UnknownModelError`, a `LookupError`, also for an encoder: see `golden_texts`.
    """
    import numpy as np

    if name not in STORYTELLERS:
        raise UnknownModelError(name, STORYTELLERS)
    with np.load(folder(name) / "golden.npz", allow_pickle=False) as arrays:
        limit = int(arrays["max_new_tokens"])
        texts = [str(text) for text in arrays["prompts"]]
        return Golden(tuple(_prompt(arrays, i, t, limit) for i, t in enumerate(texts)), limit)


def _prompt(arrays: np.lib.npyio.NpzFile, number: int, text: str, limit: int) -> GoldenPrompt:
    logits: NDArray[np.float32] = arrays[f"logits_{number}"]
    logits.setflags(write=False)
    greedy = tuple(arrays[f"greedy_{number}"].tolist())
    tokens = tuple(arrays[f"tokens_{number}"].tolist())
    return GoldenPrompt(text, tokens, logits, greedy, ended=len(greedy) < limit)


@dataclass(frozen=True)
class GoldenBeam:
    """One beam: its ids without the end token, whether one came, and its score.

    The score is the sum of log-probabilities, the end token's included, over the number of ids
    (with the end) to the power of the length penalty; None of a search with one beam.
    """

    tokens: tuple[int, ...]
    ended: bool
    score: float | None


@dataclass(frozen=True)
class GoldenBeams:
    """A beam search over one prompt, and all its beams, best first."""

    text: str
    tokens: tuple[int, ...]
    n_beams: int
    max_tokens: int
    length_penalty: float
    early_stopping: bool
    beams: tuple[GoldenBeam, ...]


def golden_beams(name: str) -> tuple[GoldenBeams, ...]:
    """Beam searches of that model, as transformers does them.

    Raises `UnknownModelError`, a `LookupError`.
    """
    if name != "storyteller":
        raise UnknownModelError(name, ("storyteller",))
    text = (folder(name) / "beams.json").read_text(encoding="utf-8")
    return tuple(map(_search, json.loads(text)))


def _search(plain: dict[str, Any]) -> GoldenBeams:
    beams = tuple(
        GoldenBeam(tuple(beam["tokens"]), beam["ended"], beam["score"]) for beam in plain["beams"]
    )
    return GoldenBeams(**{**plain, "tokens": tuple(plain["tokens"]), "beams": beams})
