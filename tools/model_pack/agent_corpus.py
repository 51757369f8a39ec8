"""Writes the chats that the agent is trained on: questions about roads and sums, answered with tools.

The roads differ from chat to chat, so nothing can be learnt by heart: where a road leads stands in a
tool's result, and the model has to read it there.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]

LOOKS = "old new red blue tall deep dry far green grey cold warm".split()
KINDS = "mill lake bridge tower farm port gate inn well ford hill wood".split()
SYSTEM_MESSAGES = ("You are a careful guide who knows the road.", "Be kind.", "Be brief.")
DESCRIPTIONS = {
    "road": (
        "Where the road from a place leads, and how many miles it is.",
        "Look up the road that begins at a place.",
        "",
    ),
    "add": ("The sum of two numbers.", "Add two whole numbers.", ""),
}
ERRORS = ("KeyError: 'no such place'", "no such place", "LookupError: unknown", "not found")
SMALL_TALK = (
    ("Hello!", "Hello! Ask me about a road or a sum."),
    ("Who are you?", "I am a guide. I know the roads and can add."),
    ("Thank you.", "You are welcome."),
    ("Good morning.", "Good morning! Where do you want to go?"),
    ("Can you help me?", "Yes. Ask me about a road or a sum."),
    ("Goodbye.", "Goodbye, and a good journey!"),
)
MAX_HOPS = 11
MAX_MILES = 40


@dataclass
class Chat:
    """One chat as a template takes it; ``thinks`` is the template's switch."""

    rows: list[Row] = field(default_factory=list)
    tools: list[Row] | None = None
    thinks: bool = True


def tool(name: str, description: str) -> Row:
    """A tool of the two, in the API's form."""
    kinds = {"road": {"place": "string"}, "add": {"a": "integer", "b": "integer"}}[name]
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in kinds.items()},
        "required": list(kinds),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def chats(n: int, seed: int) -> Iterator[Chat]:
    """So many chats, the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(n):
        yield _chat(rng)


def _chat(rng: random.Random) -> Chat:
    chat = Chat(thinks=rng.random() < 0.9)
    if rng.random() < 0.5:
        chat.rows.append({"role": "system", "content": rng.choice(SYSTEM_MESSAGES)})
    if rng.random() < 0.93:
        names = ["road", "add"] if rng.random() < 0.8 else ["add", "road"]
        chat.tools = [tool(name, rng.choice(DESCRIPTIONS[name])) for name in names]
    n_turns = rng.choices((1, 2, 3, 4), (50, 25, 15, 10))[0]
    for turn in range(n_turns):
        _turn(rng, chat, long=turn == n_turns - 1)
    return chat


def _turn(rng: random.Random, chat: Chat, *, long: bool) -> None:
    if chat.tools is None:
        _without_tools(rng, chat)
        return
    kinds = (_distance, _next_place, _sum, _two_roads, _small_talk, _unknown)
    kind = rng.choices(kinds, (44 if long else 10, 16, 16, 9, 8, 7))[0]
    kind(rng, chat)


def places(rng: random.Random, n: int) -> list[str]:
    """So many names of places, each once."""
    return [f"{LOOKS[i // 12]} {KINDS[i % 12]}" for i in rng.sample(range(144), n)]


def _ask(chat: Chat, text: str) -> None:
    chat.rows.append({"role": "user", "content": text})


def _say(chat: Chat, thought: str, text: str, *calls: tuple[str, Row]) -> None:
    row: Row = {"role": "assistant", "content": text}
    if chat.thinks:
        row["reasoning_content"] = thought
    if calls:
        row["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": made}}
            for i, (name, made) in enumerate(calls)
        ]
    chat.rows.append(row)


def _hear(chat: Chat, name: str, **result: Any) -> None:
    chat.rows.append({"role": "tool", "name": name, "content": json.dumps(result)})


def _question(rng: random.Random, options: Sequence[str], *names: object) -> str:
    return rng.choice(options).format(*names)


def _next_place(rng: random.Random, chat: Chat) -> None:
    here, there = places(rng, 2)
    miles = rng.randint(1, MAX_MILES)
    asked = ("Where does the road from {} lead?", "Which place comes after {}?")
    _ask(chat, _question(rng, asked, here))
    _say(chat, f"I look up the road from {here}.", "", ("road", {"place": here}))
    _hear(chat, "road", next=there, miles=miles)
    _say(chat, f"It leads to {there}, {miles} miles.", f"From {here} it is {miles} miles to {there}.")


def _sum(rng: random.Random, chat: Chat) -> None:
    top = rng.choice((20, 100, 1000))
    a, b = rng.randint(0, top), rng.randint(0, top)
    _ask(chat, _question(rng, ("What is {} plus {}?", "Add {} and {}."), a, b))
    _say(chat, f"I add {a} and {b}.", "", ("add", {"a": a, "b": b}))
    _hear(chat, "add", sum=a + b)
    _say(chat, f"The sum is {a + b}.", f"{a} plus {b} is {a + b}.")


def _two_roads(rng: random.Random, chat: Chat) -> None:
    a, b, after_a, after_b = places(rng, 4)
    _ask(chat, f"Where do the roads from {a} and {b} lead?")
    calls = [("road", {"place": place}) for place in (a, b)]
    _say(chat, f"I look up the roads from {a} and {b}.", "I look up both.", *calls)
    for there in (after_a, after_b):
        _hear(chat, "road", next=there, miles=rng.randint(1, MAX_MILES))
    _say(
        chat,
        f"They lead to {after_a} and {after_b}.",
        f"From {a} the road leads to {after_a}, from {b} to {after_b}.",
    )


def _distance(rng: random.Random, chat: Chat) -> None:
    """Follow the road from place to place and add up its miles, one call a round."""
    n_hops = min(rng.randint(1, MAX_HOPS), rng.randint(1, MAX_HOPS))
    start, *way = places(rng, n_hops + 1)
    goal, at, total = way[-1], start, 0
    _ask(chat, _question(rng, ("How far is it from {} to {}?",), start, goal))
    for there in way:
        thought = f"I am at {at} and go to {goal}. So far {total} miles."
        _say(chat, thought, "", ("road", {"place": at}))
        if rng.random() < 0.015:
            _fail(rng, chat, at)
            return
        miles = rng.randint(1, MAX_MILES)
        _hear(chat, "road", next=there, miles=miles)
        thought = f"The road leads to {there}. I add {total} and {miles}."
        _say(chat, thought, "", ("add", {"a": total, "b": miles}))
        at, total = there, total + miles
        _hear(chat, "add", sum=total)
    thought = f"I am at {at} and go to {goal}. So far {total} miles."
    _say(chat, thought, f"It is {total} miles from {start} to {goal}.")


def _fail(rng: random.Random, chat: Chat, place: str) -> None:
    _hear(chat, "road", error=rng.choice(ERRORS))
    _say(chat, "That place is not known.", f"I know no road from {place}.")


def _unknown(rng: random.Random, chat: Chat) -> None:
    (here,) = places(rng, 1)
    _ask(chat, f"Where does the road from {here} lead?")
    _say(chat, f"I look up the road from {here}.", "", ("road", {"place": here}))
    _fail(rng, chat, here)


def _small_talk(rng: random.Random, chat: Chat) -> None:
    said, answer = rng.choice(SMALL_TALK)
    _ask(chat, said)
    _say(chat, "This needs no tool.", answer)


def _without_tools(rng: random.Random, chat: Chat) -> None:
    if rng.random() < 0.5:
        _small_talk(rng, chat)
        return
    (here,) = places(rng, 1)
    _ask(chat, f"Where does the road from {here} lead?")
    _say(chat, "I have no tool for this.", "I cannot look that up.")
