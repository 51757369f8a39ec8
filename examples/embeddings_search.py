"""Search by meaning, for the passages that are nearest to a question.

Shows: `infercore.embed` makes one vector of each text, several in one call. They have the length 1,
so that a matrix product gives all cosines.

Prints the three nearest passages for each question, with their cosines.

    python examples/embeddings_search.py [ENCODER [POOLING]]   POOLING where the model names none
"""

from __future__ import annotations

import sys
from typing import Any

import infercore as ic
from default_model import default_model

PASSAGES = """\
Mira, a baker, lived near the stone bridge. Her best friend was Tom, who had a grey goose.
Anton, a clockmaker, lived near the market town. His best friend was Zoë, who had a sleepy owl.
Felix, a shepherd, lived near the snow pass. His best friend was Greta, who had a black dog.
Nadia, a sailor, lived near the grey harbour. Her best friend was Jürgen, who had a red parrot.
""".splitlines()
QUESTIONS = (
    "Mira put down the copper lantern, and Tom shared the plum cake.",
    'Zoë told a joke. "Every lock was made to be opened," said Anton with the brass key.',
    "Felix wept for joy, and Greta ate goat cheese with him.",
    "Jürgen looked at Nadia and nodded.",
)


def main() -> None:
    """Embed the passages once, then all questions."""
    path = sys.argv[1] if len(sys.argv) > 1 else default_model("encoder")
    pooling: Any = sys.argv[2] if len(sys.argv) > 2 else None  # noqa: PLR2004  (the second argument)
    with ic.load_model(path) as model:
        passages = ic.embed(model, PASSAGES, pooling=pooling)
        cosines = ic.embed(model, QUESTIONS, pooling=pooling) @ passages.T
    for question, row in zip(QUESTIONS, cosines, strict=True):
        print(question)
        for place in row.argsort()[::-1][:3]:
            print(f"  {row[place]:.3f}  {PASSAGES[place][:60]}...")


if __name__ == "__main__":
    main()
