"""An agent that calls Python functions, several rounds, until it can answer.

Shows: `Session.run_tools` offers functions to the model, runs what it calls, gives it the results,
and goes on until it answers. Types and docstrings are what the model is told of a function. The
conversation stays in the session, so each round evaluates only what came on top.

Prints the conversation, and what of it the session still held at the end.

    python examples/agent.py [MODEL]    (its chat template must know tools)
"""

from __future__ import annotations

import sys

import infercore as ic
from default_model import default_model

ROADS = {
    "old mill": ("red bridge", 12),
    "red bridge": ("cold inn", 7),
    "cold inn": ("deep lake", 30),
    "deep lake": ("green hill", 5),
    "tall gate": ("old mill", 9),
}
QUESTIONS = (
    "How far is it from old mill to green hill?",
    "What is 17 plus 25?",
    "Where do the roads from tall gate and cold inn lead?",
    "Where does the road from far port lead?",
)


def road(place: str) -> dict[str, object]:
    """Where the road from a place leads, and how many miles it is."""
    there, miles = ROADS[place]  # an error goes to the model, which may do better
    return {"next": there, "miles": miles}


def add(a: int, b: int) -> dict[str, int]:
    """The sum of two numbers."""
    return {"sum": a + b}


def show(message: ic.Message) -> None:
    """Print a message: the thought in brackets, calls as Python writes them."""
    if message.reasoning:
        print(f"    ({message.reasoning})")
    for call in message.tool_calls:
        arguments = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
        print(f"    {call.name}({arguments})")
    if message.content:
        print(f"{'    -> ' if message.role == 'tool' else '  '}{message.content}")


def main() -> None:
    """Ask all questions in one conversation."""
    path = sys.argv[1] if len(sys.argv) > 1 else default_model("agent")
    with ic.open_session(path, n_ctx=2048) as session:
        messages: list[ic.Message] = []
        for question in QUESTIONS:
            print(question)
            messages.append(ic.Message(role="user", content=question))
            came = session.run_tools(
                messages, [road, add], max_rounds=12, max_tokens=200, temperature=0
            )
            messages += came
            for message in came:
                show(message)
        print(f"{len(messages)} messages, {session.explain_context().resident_tokens} tokens held")


if __name__ == "__main__":
    main()
