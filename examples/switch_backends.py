"""The same code on every engine that is here, and the same text.

Shows: nothing in `tell` knows which engine it runs on. The portable sampler draws the same tokens
from the same seed wherever the logits agree, so that not only the greedy text is equal.

Prints for each engine its greedy and its sampled text; at the end whether they are the same. Models
that are named should be one model in the formats of several engines.

    python examples/switch_backends.py [MODEL ...]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import infercore as ic
from default_model import default_models

if TYPE_CHECKING:
    from infercore import Model

BEGINNING = "Once upon a time there was a clockmaker named Anton"


def tell(model: Model) -> tuple[str, str]:
    """Return what the model tells: greedily, and drawn with a seed."""
    with model.new_session(n_ctx=512) as session:
        session.ensure_prefix(BEGINNING)
        greedy = "".join(chunk.text for chunk in session.decode(max_tokens=40, temperature=0))
        session.ensure_prefix(BEGINNING)
        drawn = session.decode(max_tokens=40, temperature=1.2, top_k=20, top_p=1, seed=7)
        return greedy, "".join(chunk.text for chunk in drawn)


def main() -> None:
    """Tell the story on each engine."""
    told = []
    for path in sys.argv[1:] or default_models():
        with ic.load_model(path) as model:
            told.append(tell(model))
            print(f"{model.backend} ({Path(path).name})")
        print(f"  greedy  {told[-1][0]!r}\n  seed 7  {told[-1][1]!r}")
    if len(told) == 1:
        print("only one engine is here; install another to compare: infercore backends")
    else:
        print("same text on all:", all(texts == told[0] for texts in told))


if __name__ == "__main__":
    main()
