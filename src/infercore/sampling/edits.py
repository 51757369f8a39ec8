"""Steps that change the logits of the whole vocabulary in place: bias and penalties.

They come right after the constraint mask (see `infercore.sampling.constraints`) and before any
token is dropped; `infercore.sampling.dry` holds the last of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from infercore.sampling.candidates import FloatArray, IdArray


_MOST = float(np.finfo(np.float32).max)


def apply_bias(logits: FloatArray, ids: IdArray, amounts: FloatArray) -> None:
    """Add ``amounts`` [m] to the logits [n_vocab] at ``ids`` [m], which are distinct; in place.

    An amount of -inf forbids the token. Source: ``logit_bias`` in llama.cpp's
    ``llama_sampler_init_logit_bias``.
    """
    logits[ids] += amounts


def apply_no_repeat(logits: FloatArray, tokens: npt.NDArray[np.int32], n: int) -> None:
    """Forbid the tokens that would make ``n`` of ``tokens`` [m] in a row appear again, in place.

    Source: ``NoRepeatNGramLogitsProcessor`` of Hugging Face's transformers.
    """
    n_starts = tokens.size - n + 1
    if n_starts < 1:
        return
    again = np.ones(n_starts, dtype=np.bool_)
    for i, token in enumerate(tokens[tokens.size - n + 1 :]):
        again &= tokens[i : n_starts + i] == token
    logits[tokens[n - 1 :][again]] = -np.inf


def apply_penalties(
    logits: FloatArray,
    window: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
    *,
    repeat: float,
    frequency: float,
    presence: float,
) -> None:
    """Lower the logits [n_vocab] of the tokens in ``window`` [m], in place.

    ``counts`` [m] says how often ``window[i]`` stands in the window; a token may stand there
    several times and is still penalised once. A positive logit is divided by ``repeat``, any
    other multiplied by it, then ``count * frequency + presence`` is subtracted.

    Source: repetition penalty of CTRL (Keskar et al. 2019, section 4.1) with the sign rule of
    llama.cpp's ``llama_sampler_init_penalties``; frequency and presence as in OpenAI's API.
    """
    if window.size == 0:
        return
    before = logits[window].astype(np.float64)
    by, each, once = float(repeat), float(frequency), float(presence)
    with np.errstate(over="ignore"):  # what is beyond float32 is forbidden, or the most there is
        after = np.where(before > 0, before / by, before * by) - (counts * each + once)
        logits[window] = np.minimum(after, _MOST)
