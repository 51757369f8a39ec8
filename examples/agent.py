"""An agent that calls Python functions, several rounds, until it can answer.

Shows: `Session.run_tools` offers functions to the model, runs what it calls, gives it the results,
and goes on until it answers. The model sees each function's types and docstring. The
conversation stays in the session, so each round evaluates only what came on top. The pack's model
is tiny: it adds and looks up one road, and gets longer ways wrong.

Prints each conversation, and how much the session holds at the end.

    python examples/agent.py [MODEL]    (its chat template must know tools)
"""

from __future__ import annotations

import sys

import infercore as ic
from default_model import default_model

PLACES = ("old mill", "red bridge", "cold inn", "deep lake", "green hill")
QUESTIONS = (
    "What is 17 plus 25?",
    "Where does the road from old mill lead?",
    "Which place comes after deep lake?",
    "What is 386 plus 47?",
)


def road(place: str) -> dict[str, object]:
    """Where the road from a place leads, and how many miles it is."""
    if place not in PLACES:  # an error goes to the model, which may do better
        raise LookupError(f"there is no {place}; there are {', '.join(PLACES)}")
    number = PLACES.index(place)
    return {"next": PLACES[(number + 1) % len(PLACES)], "miles": 5 + number}


def add(a: int, b: int) -> dict[str, int]:
    """The sum of two numbers."""
    return {"sum": a + b}


def show(message: ic.Message) -> None:
    """Print a message: the thought in brackets, calls as Python writes them."""
    if message.reasoning:
        print(f"    ({message.reasoning})")
    for call in message.tool_calls:
        assert isinstance(call, ic.ToolCall)  # in what comes from a chat
        arguments = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
        print(f"    {call.name}({arguments})")
    if message.content:
        print(f"{'    -> ' if message.role == 'tool' else '  '}{message.content}")


def main() -> None:
    """Ask the questions, one conversation each."""
    path = sys.argv[1] if len(sys.argv) > 1 else default_model("agent")
    with ic.open_session(path, n_ctx=2048) as session:
        for question in QUESTIONS:
            print(question)
            asked = ic.Message(role="user", content=question)
            for message in session.run_tools([asked], [road, add], max_rounds=6, temperature=0):
                show(message)
        print(f"{session.explain_context().resident_tokens} tokens are held")


if __name__ == "__main__":
    main()
