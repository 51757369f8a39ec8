"""Writes the chats that the agent is trained on: questions about roads and sums, answered with tools.

The roads differ from chat to chat, so nothing can be learnt by heart: where a road leads stands in a
tool's result, and the model has to read it there. An answer repeats what the result says.
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
DONE = "I have the answer."
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
    if rng.random() < 0.3:
        for _ in range(rng.randint(1, 3)):
            _repeat(rng, chat)
        return chat
    if rng.random() < 0.3:
        chat.rows.append({"role": "system", "content": rng.choice(SYSTEM_MESSAGES)})
    if rng.random() < 0.95:
        names = ["road", "add"] if rng.random() < 0.8 else ["add", "road"]
        chat.tools = [tool(name, rng.choice(DESCRIPTIONS[name])) for name in names]
    for _ in range(rng.choices((1, 2, 3, 5, 8), (35, 25, 20, 15, 5))[0]):
        _turn(rng, chat)
    return chat


def _turn(rng: random.Random, chat: Chat) -> None:
    if chat.tools is None:
        _without_tools(rng, chat)
        return
    kinds = (_distance, _next_place, _sum, _two_roads, _small_talk, _unknown, _repeat)
    rng.choices(kinds, (26, 22, 26, 12, 5, 5, 4))[0](rng, chat)


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


def _repeat(rng: random.Random, chat: Chat) -> None:
    """Say something again: the skill that everything else rests on."""
    kinds = (lambda: places(rng, 1)[0], lambda: str(_number(rng)))
    text = ", ".join(rng.choice(kinds)() for _ in range(rng.randint(1, 6)))
    _ask(chat, f"Say: {text}.")
    _say(chat, "I repeat it.", f"{text}.")


def _number(rng: random.Random) -> int:
    return rng.randint(0, rng.choice((9, 99, 999)))


def _next_place(rng: random.Random, chat: Chat) -> None:
    here, there = places(rng, 2)
    miles = rng.randint(1, MAX_MILES)
    asked = ("Where does the road from {} lead?", "Which place comes after {}?")
    _ask(chat, _question(rng, asked, here))
    _say(chat, f"I look up {here}.", "", ("road", {"place": here}))
    _hear(chat, "road", next=there, miles=miles)
    _say(chat, DONE, f"It leads to {there}, {miles} miles.")


def _sum(rng: random.Random, chat: Chat) -> None:
    a, b = _number(rng), _number(rng)
    _ask(chat, _question(rng, ("What is {} plus {}?", "Add {} and {}."), a, b))
    _say(chat, f"I add {a} and {b}.", "", ("add", {"a": a, "b": b}))
    _hear(chat, "add", sum=a + b)
    _say(chat, DONE, f"The sum is {a + b}.")


def _two_roads(rng: random.Random, chat: Chat) -> None:
    a, b, after_a, after_b = places(rng, 4)
    _ask(chat, f"Where do the roads from {a} and {b} lead?")
    calls = [("road", {"place": place}) for place in (a, b)]
    _say(chat, f"I look up {a} and {b}.", "I look up both.", *calls)
    for there in (after_a, after_b):
        _hear(chat, "road", next=there, miles=rng.randint(1, MAX_MILES))
    _say(chat, DONE, f"They lead to {after_a} and {after_b}.")


def _distance(rng: random.Random, chat: Chat) -> None:
    """Follow the road from place to place and add up its miles, one call a round."""
    n_hops = rng.choices((1, 2, 3, 4, 5, 6), (28, 26, 20, 12, 8, 6))[0]
    start, *way = places(rng, n_hops + 1)
    at, total = start, 0
    _ask(chat, f"How far is it from {start} to {way[-1]}?")
    for there in way:
        _say(chat, f"I am at {at}. I go on.", "", ("road", {"place": at}))
        if rng.random() < 0.015:
            _fail(rng, chat)
            return
        miles = rng.randint(1, MAX_MILES)
        _hear(chat, "road", next=there, miles=miles)
        _say(chat, f"I add {total} and {miles}.", "", ("add", {"a": total, "b": miles}))
        at, total = there, total + miles
        _hear(chat, "add", sum=total)
    _say(chat, f"I am at {at}. That is the goal.", f"It is {total} miles.")


def _fail(rng: random.Random, chat: Chat) -> None:
    _hear(chat, "road", error=rng.choice(ERRORS))
    _say(chat, "That place is not known.", "I know no such road.")


def _unknown(rng: random.Random, chat: Chat) -> None:
    (here,) = places(rng, 1)
    _ask(chat, f"Where does the road from {here} lead?")
    _say(chat, f"I look up {here}.", "", ("road", {"place": here}))
    _fail(rng, chat)


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
