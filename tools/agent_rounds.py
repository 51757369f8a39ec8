"""Lets the pack's agent call its tools for some rounds, and prints what each round reused.

    python tools/agent_rounds.py [--backend NAME] [--rounds N] [--seed S]

A round is one answer of the model: calls, whose results go back to it, or text, after which the
next question is asked. The table shows the calls and how many tokens of the prompt were resident.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import attrs

import infercore as ic

FORMATS = {"llamacpp": "gguf-f32", "openvino": "openvino"}
PLACES = tuple(f"{look} {kind}" for look in ("old", "red", "tall") for kind in ("mill", "inn"))
ROADS = {  # from each place to the next one, and from the last to the first
    place: (PLACES[(i + 1) % len(PLACES)], 5 * i + 3) for i, place in enumerate(PLACES)
}


def tool(name: str, description: str, **kinds: str) -> dict[str, Any]:
    """Return a tool whose arguments are all needed."""
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in kinds.items()},
        "required": list(kinds),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    tool("road", "Where the road from a place leads, and how many miles it is.", place="string"),
    tool("add", "The sum of two numbers.", a="integer", b="integer"),
]
QUESTIONS = (
    ("How far is it from old mill to red mill?", "It is 11 miles."),
    ("What is 17 plus 25?", "The sum is 42."),
    ("Where do the roads from red inn and tall mill lead?", "They lead to tall mill and tall inn."),
    ("Where does the road from old inn lead?", "It leads to red mill, 8 miles."),
)


def result(call: ic.ToolCall) -> dict[str, Any]:
    """Return what a tool gives: the sum, or where the road leads."""
    if call.name == "add":
        return {"sum": call.arguments["a"] + call.arguments["b"]}
    there, miles = ROADS.get(call.arguments["place"], ("", 0))
    return {"next": there, "miles": miles} if there else {"error": "no such place"}


@attrs.frozen
class Round:
    """What a round said, whether it holds a call that could not be read, and what it cost."""

    text: str
    calls: tuple[ic.ToolCall, ...]
    usage: Any
    expected: str

    @property
    def is_malformed(self) -> bool:
        """Whether something begins like a call and was none."""
        return "tool_call>" in self.text

    @property
    def is_right(self) -> bool:
        """Whether it answers the question as the tools do."""
        return not self.calls and self.text.strip() == self.expected

    @property
    def shown(self) -> str:
        """The calls, or else the text."""
        calls = ", ".join(f"{call.name}{json.dumps(call.arguments)}" for call in self.calls)
        return calls or " ".join(self.text.split())


def rounds(session: ic.Session, n_rounds: int, **decode: Any) -> list[Round]:
    """Return so many rounds of one conversation."""
    messages = [ic.Message(role="user", content=QUESTIONS[0][0])]
    found: list[Round] = []
    n_asked, expected = 1, QUESTIONS[0][1]
    for _ in range(n_rounds):
        chunks = list(session.chat(messages, tools=TOOLS, max_tokens=150, **decode))
        text = "".join(chunk.text for chunk in chunks)
        thought = "".join(chunk.reasoning for chunk in chunks)
        calls = tuple(call for chunk in chunks for call in chunk.tool_calls)
        found.append(Round(text, calls, chunks[-1].usage, expected))
        messages.append(
            ic.Message(role="assistant", content=text, tool_calls=calls, reasoning=thought or None)
        )
        for call in calls:
            content = json.dumps(result(call))
            messages.append(
                ic.Message(role="tool", name=call.name, tool_call_id=call.id, content=content)
            )
        if not calls:
            question, expected = QUESTIONS[n_asked % len(QUESTIONS)]
            messages.append(ic.Message(role="user", content=question))
            n_asked += 1
    return found


def main() -> int:
    """Print the table; the exit status tells whether all calls were valid."""
    import infercore_models  # noqa: PLC0415  (the test brings its own model)

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="llamacpp", choices=sorted(FORMATS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    path = infercore_models.path("agent", FORMATS[given.backend])
    with ic.open_session(path, backend=given.backend, n_ctx=2048, n_threads=1) as session:
        found = rounds(session, given.rounds, seed=given.seed, temperature=0.8)
    print("round  prompt  reused  evaluated  said")
    for number, one in enumerate(found, 1):
        usage = one.usage
        evaluated = usage.prompt_tokens - usage.cached_tokens
        print(
            f"{number:5}  {usage.prompt_tokens:6}  {usage.cached_tokens:6}  {evaluated:9}  "
            f"{one.shown}"
        )
    n_calls = sum(len(one.calls) for one in found)
    n_malformed = sum(one.is_malformed for one in found)
    n_answers = sum(not one.calls for one in found)
    n_right = sum(one.is_right for one in found)
    print(
        f"{given.backend}: {n_calls} calls, all valid; {n_malformed} malformed; "
        f"{n_right} of {n_answers} answers right"
    )
    return int(n_malformed > 0 or n_calls == 0)


if __name__ == "__main__":
    sys.exit(main())
