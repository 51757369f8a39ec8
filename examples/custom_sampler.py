"""Choosing tokens by one's own rules: a processor in a session, and a loop over a context.

Shows: (1) any object with ``apply(logits)`` in `DecodeConfig.processors` takes part in every step;
this one forbids a letter. (2) Below the session one has the logits themselves: this loop draws from
the five best with the Gumbel trick. Without noise it must choose what a greedy session chooses.

Prints the plain text, the text without the letter, the drawn text, and whether the loop without
noise and the session agree.

    python examples/custom_sampler.py [MODEL]
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np

import infercore as ic
from default_model import default_model

if TYPE_CHECKING:
    import numpy.typing as npt

    from infercore import Model, Tokenizer

BEGINNING = "Once upon a time there was a sailor named Nadia"
N_TOKENS, N_BEST = 40, 5


class Without:
    """Forbids every token whose bytes hold a letter; control tokens stay allowed."""

    def __init__(self, letter: bytes, tokenizer: Tokenizer) -> None:
        ids = [i for i in range(tokenizer.n_vocab) if not tokenizer.is_control(i)]
        self._banned = [i for i in ids if letter in tokenizer.token_bytes(i).lower()]

    def apply(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the logits with those of the forbidden tokens at minus infinity."""
        logits[self._banned] = -np.inf
        return logits


def draw(model: Model, temperature: float, seed: int) -> str:
    """Return text drawn by hand: the arg max of logits plus Gumbel noise is a fair draw."""
    noise = np.random.default_rng(seed)
    tokens: list[int] = []
    with model.new_context(n_ctx=256) as context:
        context.decode(model.tokenizer.encode(BEGINNING))
        for _ in range(N_TOKENS):
            logits = context.logits()
            best = logits.argpartition(-N_BEST)[-N_BEST:]
            token = int(best[(logits[best] + temperature * noise.gumbel(size=N_BEST)).argmax()])
            if model.tokenizer.is_eog(token):
                break
            tokens.append(token)
            context.decode_one(token)
    return model.tokenizer.decode(tokens)


def main() -> None:
    """Tell one story in four ways."""
    path = sys.argv[1] if len(sys.argv) > 1 else default_model()
    with ic.load_model(path) as model, model.new_session(n_ctx=256) as session:
        session.ensure_prefix(BEGINNING)
        plain = session.generate("", max_tokens=N_TOKENS, temperature=0)
        print(f"plain      {plain!r}")
        rule = Without(b"p", model.tokenizer)
        lipogram = session.generate("", max_tokens=N_TOKENS, temperature=0, processors=[rule])
        print(f"without p  {lipogram!r}")
        print(f"by hand    {draw(model, temperature=2, seed=1)!r}")
        print("greedy by hand is the session's text:", draw(model, 0, seed=1) == plain)


if __name__ == "__main__":
    main()
