"""One beginning, three ways on, and the way that the model finds likeliest.

Shows: `Session.fork` copies what was evaluated, so that each branch pays only for what is its own;
`n_seq_max` gives the branches a place in one context. Closing a branch frees its place, and none
of them is seen by the others.

Prints for each branch the tokens it had at its start, those evaluated, its mean log-probability
and its text; then the best one, and that the trunk still goes on as if there were no branches.

    python examples/branching.py [MODEL]
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import infercore as ic
from default_model import default_model

if TYPE_CHECKING:
    from infercore import Session

BEGINNING = """Once upon a time there was a baker named Mira, who lived near the stone bridge. \
Mira was very patient, and everyone on the road knew it. Her best friend was Tom, who never went \
anywhere without a grey goose."""
WAYS = (" One evening a letter came", " One evening a stranger said", " The goose opened the door")


def go_on(session: Session) -> tuple[str, float]:
    """Return the next 24 tokens as text, and their mean log-probability."""
    chunks = list(session.decode(max_tokens=24, temperature=0, logprobs=0))
    found = [step.logprob for chunk in chunks for step in chunk.logprobs or ()]
    return "".join(chunk.text for chunk in chunks), sum(found) / len(found)


def main() -> None:
    """Branch from one beginning."""
    path = sys.argv[1] if len(sys.argv) > 1 else default_model()
    with ic.load_model(path) as model:
        with model.new_session(n_ctx=1024) as alone:
            alone.ensure_prefix(BEGINNING)
            expected, _ = go_on(alone)
        results = []
        with model.new_session(n_ctx=1024, n_seq_max=len(WAYS) + 1) as trunk:
            status = trunk.ensure_prefix(BEGINNING)
            print(f"trunk: {status.prefilled_tokens} tokens evaluated once")
            for way in WAYS:
                with trunk.fork() as branch:
                    held = branch.explain_context().resident_tokens
                    cost = branch.prefill_suffix(way).prefilled_tokens
                    text, logprob = go_on(branch)
                results.append((logprob, way + text))
                print(f"  held {held}, evaluated {cost}, {logprob:.3f}: {way + text!r}")
            print(f"best: {max(results)[1]!r}")
            print("trunk goes on undisturbed:", go_on(trunk)[0] == expected)


if __name__ == "__main__":
    main()
