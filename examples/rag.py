"""Answer questions from documents, and name the passages that the answer rests on.

Shows: an encoder makes a vector of each passage, once. For a question the nearest passages go into
the system message, numbered, and the model answers from them. Sessions stay warm: what two prompts
begin with is evaluated once.

Prints each question, the answer, and its sources with their cosines.

    python examples/rag.py [MODEL [ENCODER]]
"""

from __future__ import annotations

import sys

import infercore as ic
from default_model import default_model

DOCUMENTS = {
    "bakers.txt": "Mira, a baker, lived near the stone bridge. Her best friend was Tom, who had a "
    "grey goose.",
    "clocks.txt": "Anton, a clockmaker, lived near the market town. His best friend was Zoë, who "
    "had a sleepy owl.",
    "harbour.txt": "Nadia, a sailor, lived near the grey harbour. Her best friend was Jürgen, who "
    "had a red parrot.",
    "sheep.txt": "Felix, a shepherd, lived near the snow pass. His best friend was Greta, who had "
    "a black dog.",
}
QUESTIONS = (
    "Nadia told Jürgen a joke. Where does Nadia live?",
    "Greta looked at Felix. Where does Felix live?",
    "Tom shared the plum cake with Mira. Where does Mira live?",
)
N_SOURCES = 2


class Index:
    """Documents with their vectors."""

    def __init__(self, encoder: ic.Model, documents: dict[str, str]) -> None:
        self._encoder = encoder
        self._names, self._texts = list(documents), list(documents.values())
        self._vectors = ic.embed(encoder, self._texts)

    def nearest(self, question: str, n: int) -> list[tuple[str, str, float]]:
        """Return name, text and cosine of the ``n`` nearest documents, the nearest first."""
        cosines = self._vectors @ ic.embed(self._encoder, [question])[0]
        best = cosines.argsort()[::-1][:n]
        return [(self._names[i], self._texts[i], float(cosines[i])) for i in best]


def prompt(question: str, found: list[tuple[str, str, float]]) -> list[ic.Message]:
    """Return the chat that asks ``question`` of the passages that were found."""
    passages = "\n".join(f"[{i}] {text}" for i, (_, text, _) in enumerate(found, 1))
    rules = f"Answer in one sentence, from these passages alone:\n{passages}"
    return [ic.Message(role="system", content=rules), ic.Message(role="user", content=question)]


def main() -> None:
    """Embed the documents once, then answer all questions."""
    model_path = sys.argv[1] if len(sys.argv) > 1 else default_model()
    encoder_path = sys.argv[2] if len(sys.argv) > 2 else default_model("encoder")  # noqa: PLR2004
    with ic.load_model(encoder_path) as encoder, ic.open_session(model_path) as session:
        index = Index(encoder, DOCUMENTS)
        for question in QUESTIONS:
            found = index.nearest(question, N_SOURCES)
            chunks = session.chat(prompt(question, found), temperature=0, max_tokens=60)
            print(f"{question}\n  {''.join(chunk.text for chunk in chunks)}")
            for name, _, cosine in found:
                print(f"  source: {name} ({cosine:.2f})")


if __name__ == "__main__":
    main()
