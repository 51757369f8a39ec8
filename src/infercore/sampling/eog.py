"""Which tokens end a generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from infercore.sampling.per_tokenizer import PerTokenizer

if TYPE_CHECKING:
    from infercore.protocols.public import Tokenizer
    from infercore.sampling.candidates import IdArray


def _find(tokenizer: Tokenizer) -> IdArray:
    ids = [token for token in range(tokenizer.n_vocab) if tokenizer.is_eog(token)]
    found = np.array(ids, dtype=np.intp)
    found.setflags(write=False)
    return found


eog_ids = PerTokenizer(_find)
"""Return all end-of-generation ids of a tokenizer, ascending; found once for each tokenizer."""
