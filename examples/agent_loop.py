"""An agent that acts twenty times, and keeps its instructions and its journal warm.

Shows: each turn the agent asks with its whole journal as the prefix and the question as the suffix;
`ensure_prefix` evaluates only what the engine does not hold already. The answer decides what is
asked next: here the agent walks along a road, and the model knows which place comes after which.

Prints a line a turn: tokens of the prefix, how many of them were reused, how many tokens were
evaluated before the first one came, after how many milliseconds, and where the agent is now. Then
what twenty cold prompts would have cost.

    python examples/agent_loop.py [MODEL]
"""

from __future__ import annotations

import sys
import time

import infercore as ic
from default_model import default_model

N_TURNS = 20
INSTRUCTIONS = """You are a careful guide who knows the road. There are twelve places, and the \
road goes round. Each time you are asked, name the place that comes next and nothing else.

The road begins at the stone bridge."""


def main() -> None:
    """Ask, walk on, write it down; twenty times."""
    path = sys.argv[1] if len(sys.argv) > 1 else default_model()
    journal, place = INSTRUCTIONS, "the stone bridge"
    asked = evaluated = 0
    print("turn  prefix  reused  evaluated  first token  now at")
    with ic.load_model(path) as model, model.new_session(n_ctx=1024) as session:
        for turn in range(1, N_TURNS + 1):
            question = f" After {place}"
            started = time.perf_counter()
            prefix = session.ensure_prefix(journal)
            suffix = session.prefill_suffix(question)
            answer, first_ms = "", 0.0
            for chunk in session.decode(max_tokens=16, temperature=0, stop=["."]):
                if not answer:
                    first_ms = (time.perf_counter() - started) * 1e3
                answer += chunk.text

            journal += f"{question}{answer}."
            place = answer.partition(" the ")[2] or place  # "comes the old mill"
            place = place if place.startswith("the ") else f"the {place}"
            fresh = prefix.prefilled_tokens + suffix.prefilled_tokens
            print(
                f"{turn:4}  {prefix.prefix_tokens:6}  {prefix.reused_tokens:6}  {fresh:9}  "
                f"{first_ms:8.1f} ms  {place}"
            )
            evaluated += fresh
            asked += prefix.prefix_tokens + suffix.suffix_tokens
    print(f"evaluated {evaluated} of {asked} prompt tokens: {asked / evaluated:.1f} times less")


if __name__ == "__main__":
    main()
