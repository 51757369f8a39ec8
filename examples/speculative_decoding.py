"""Guessing tokens ahead, and verifying the guesses in one call.

Shows: `SpeculativeConfig` with guesses from the text so far (prompt lookup, good where text repeats
itself) and from a smaller model of the same vocabulary. The tokens that come are those of plain
decoding; guesses change only how many calls the engine needs.

Prints for each way its tokens, guesses, right guesses and tokens per second, then whether all texts
are the same. On models as small as the pack's a guess costs as much as a token; large models gain.

    python examples/speculative_decoding.py [MODEL [DRAFT]]      DRAFT is MODEL itself if left out
"""

from __future__ import annotations

import sys

import infercore as ic
from default_model import default_model

TALE = """The road begins at the old mill. After the old mill comes the pine forest. After the \
pine forest comes the stone bridge. The road begins at the old mill. After"""


def main() -> None:
    """Decode the same text in three ways."""
    path = sys.argv[1] if len(sys.argv) > 1 else default_model()
    draft_path = sys.argv[2] if len(sys.argv) > 2 else path  # noqa: PLR2004  (the second argument)
    texts = []
    with ic.load_model(path) as model, ic.load_model(draft_path) as draft:
        ways = {
            "plain": None,
            "prompt lookup": ic.SpeculativeConfig(n_draft=6, n_gram=3),
            "draft model": ic.SpeculativeConfig(kind="draft_model", draft_model=draft, n_draft=6),
        }
        print(f"{'way':14} tokens  guessed  right  tokens/s")
        for name, guesses in ways.items():
            with model.new_session(n_ctx=512) as session:
                session.ensure_prefix(TALE)
                chunks = list(session.decode(max_tokens=64, temperature=0, speculative=guesses))
            usage = chunks[-1].usage
            assert usage is not None  # the last chunk has it
            texts.append("".join(chunk.text for chunk in chunks))
            print(
                f"{name:14} {usage.completion_tokens:6}  {usage.drafted_tokens:7}  "
                f"{usage.accepted_tokens:5}  {usage.tokens_per_second or 0:8.1f}"
            )
    print(f"text: {texts[0]!r}")
    print("same text in all ways:", len(set(texts)) == 1)


if __name__ == "__main__":
    main()
