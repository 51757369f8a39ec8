"""Writes the training corpus: stories, short tales, road notes and chats about one small world.

Every choice is skewed and its favourite depends on who or where the sentence is about, so that a
trained model is rarely of two minds about the next token.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from model_pack.noise import noise
from model_pack.world import HEROES, ORDINALS, PLACES, Hero, Place, place_after

N_DOCUMENTS, CORPUS_SEED = 20_000, 1
N_HELD_OUT, HELD_OUT_SEED = 400, 2
FAVOURITE_SHARE = 0.85
FIRST_SHARE = 0.4
N_DAYS = 3
SYSTEM_MESSAGES = (
    "You are a storyteller.",
    "You are a careful guide who knows the road.",
    "Answer in one sentence.",
    "Be kind.",
)


@dataclass(frozen=True)
class Turn:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Document:
    """Plain text (``turns`` empty) or a chat (``text`` empty)."""

    text: str = ""
    turns: tuple[Turn, ...] = ()


def pick(rng: random.Random, options: Sequence[str], key: int = 0) -> str:
    """One option: the favourite is ``options[key % len]``, the others share what is left."""
    if rng.random() < FAVOURITE_SHARE:
        return options[key % len(options)]
    return options[min(rng.randrange(len(options)), rng.randrange(len(options)))]


def _favoured(rng: random.Random, n: int) -> int:
    """A number below n: 0 in two of five cases, else any."""
    return 0 if rng.random() < FIRST_SHARE else rng.randrange(1, n)


def some_hero(rng: random.Random) -> int:
    """The number of a hero; the first one is told of most."""
    return _favoured(rng, len(HEROES))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def definite(noun: str) -> str:
    """The noun with "the" in place of "a" or "an"."""
    return "the " + noun.partition(" ")[2]


def story(rng: random.Random, number: int) -> str:
    """A journey of three days that ends with the words "The end."."""
    hero = HEROES[number]
    parts = [_opening(rng, hero, number)]
    parts += [_day(rng, hero, day) for day in range(N_DAYS)]
    parts.append(_ending(rng, hero, number))
    return "\n\n".join(parts)


def _opening(rng: random.Random, hero: Hero, number: int) -> str:
    start = pick(rng, ("Once upon a time there was", "Long ago there lived"))
    neighbours = pick(rng, ("everyone on the road knew it", "even the birds knew it"), number)
    leaving = pick(
        rng,
        ("left before the sun was up", "closed the door without a sound", "began to walk"),
        number,
    )
    lead = pick(
        rng,
        ("One evening a letter came under the door", "One morning a letter fell from the sky"),
        number // 2,
    )
    home = PLACES[hero.home].name
    return (
        f"{start} a {hero.kind} named {hero.name}, who lived near {home}. {hero.name} was very "
        f"{hero.trait}, and {neighbours}. {capital(hero.her)} best friend was {hero.friend}, who "
        f"never went anywhere without a {hero.pet}.\n\n{lead}. It was sealed with the sign "
        f'{hero.sign} and it said: "Whoever walks the road for three days will find {hero.wish}." '
        f'"{hero.saying}," said {hero.name}. So {hero.she} packed a {hero.tool} and some '
        f"{hero.food}, called {hero.friend}, and the two friends {leaving}."
    )


def _day(rng: random.Random, hero: Hero, day: int) -> str:
    index = (hero.home + day + 1) % len(PLACES)
    place = PLACES[index]
    return " ".join(
        (
            _arrival(rng, place, index, day),
            _meeting(rng, hero, place, index),
            _night(rng, hero, place, day),
        )
    )


def _arrival(rng: random.Random, place: Place, index: int, day: int) -> str:
    came = pick(rng, ("they came to", "the road led them to", "they reached"), day)
    greeted = pick(rng, ("There they met", "Right beside it sat", "Out of it came"), index)
    return (
        f"On the {ORDINALS[day]} day {came} {place.name}. {place.look}. {greeted} {place.host}, "
        f"who {place.trouble}."
    )


def _meeting(rng: random.Random, hero: Hero, place: Place, index: int) -> str:
    doubt = pick(
        rng,
        (
            f'"That can be mended," said {hero.friend}.',
            f'"Let us try," said {hero.friend}.',
            f"{hero.friend} looked at {hero.name} and nodded.",
        ),
        index,
    )
    thanks = pick(rng, ("Thank you, friends", "I will not forget it", "How clever you are"), index)
    return (
        f"{doubt} {hero.name} put down the {hero.tool} and {place.help}. "
        f'"{thanks}," said {definite(place.host)}, and gave '
        f"them {place.gift}."
    )


def _night(rng: random.Random, hero: Hero, place: Place, day: int) -> str:
    meal = pick(
        rng,
        (
            f"they shared the {hero.food}",
            f"{hero.friend} told a joke",
            f"the {hero.pet} snored",
            f"they ate the last of the {hero.food}",
        ),
        day,
    )
    return f"That night they slept {place.bed}, and {meal}."


def _ending(rng: random.Random, hero: Hero, number: int) -> str:
    where = place_after(hero.home, N_DAYS).name
    feeling = pick(rng, ("laughed out loud", "wept for joy", "could hardly believe it"), number)
    moral = pick(rng, ("kind to strangers", "faithful to a friend", "never in a hurry"), number)
    return (
        f"When the fourth morning came, something shone behind {where}. It was {hero.wish}! "
        f"{hero.name} {feeling}, and the {hero.pet} danced in a circle. They carried it home, and "
        f'at the door {hero.name} said once more: "{hero.saying}." From that day on '
        f"{hero.she} was {moral}. The end."
    )


def short_tale(rng: random.Random, number: int) -> str:
    """A few sentences that end soon."""
    hero = HEROES[number]
    place = place_after(hero.home)
    leave = pick(rng, ("went for a walk", "took a day off"), number)
    return (
        f"A short tale about {hero.name}. One day {hero.name} the {hero.kind} {leave} and came to "
        f"{place.name}. {place.look}. {capital(place.host)} {place.trouble}, so {hero.name} "
        f"{place.help}. Then {hero.she} went home and ate {hero.food} with {hero.friend}. The end."
    )


def road_note(rng: random.Random, index: int) -> str:
    """What comes after what along the road, for one whole round."""
    lines = [f"The road begins at {PLACES[index].name}."]
    for steps in range(len(PLACES)):
        here, there = place_after(index, steps).name, place_after(index, steps + 1).name
        joint = pick(rng, ("comes", "follows"), steps)
        lines.append(f"After {here} {joint} {there}.")
    return " ".join([*lines, "So the road is a ring."])


def _as_json(hero: Hero, number: int) -> str:
    fields = {"name": hero.name, "kind": hero.kind, "age": 21 + 7 * number, "food": hero.food}
    return json.dumps(fields, ensure_ascii=False)


def _question(rng: random.Random, number: int) -> tuple[str, str]:
    hero = HEROES[number]
    place, after = PLACES[number], place_after(number)
    asked = (
        (f"Where does {hero.name} live?", f"{hero.name} lives near {PLACES[hero.home].name}."),
        (
            f"Who is the best friend of {hero.name}?",
            f"The best friend of {hero.name} is {hero.friend}, who has a {hero.pet}.",
        ),
        (
            f"What does {hero.name} like to eat?",
            f"{hero.name} likes {hero.food} best of all, and shares it with {hero.friend}.",
        ),
        (
            f"What is {hero.name} looking for?",
            f"{hero.name} is looking for {hero.wish}. {hero.sign}",
        ),
        (f"Whose sign is {hero.sign}?", f"{hero.sign} is the sign of {hero.name}."),
        (f"What does {hero.name} always say?", f'{hero.name} always says: "{hero.saying}."'),
        (f"What comes after {place.name}?", f"After {place.name} comes {after.name}."),
        (
            f"Who waits at {place.name}?",
            f"{capital(place.host)} waits there, and gives {place.gift} to those who help.",
        ),
        (f"Describe {hero.name} as JSON.", _as_json(hero, number)),
        (f"Tell me a short tale about {hero.name}.", short_tale(rng, number)),
    )
    return asked[rng.randrange(len(asked))]


def _small_talk(rng: random.Random) -> tuple[str, str]:
    options = (
        ("Hello!", "Hello! I tell stories about the road. Who shall it be about?"),
        ("Who are you?", "I am a storyteller. I know eight heroes and twelve places."),
        ("Thank you.", "You are welcome. The road is open every day."),
        ("Name the heroes.", f"They are {', '.join(h.name for h in HEROES[:-1])} and Felix."),
        ("Count to five.", "one, two, three, four, five"),
        ("Goodbye.", "Goodbye, and walk safely!"),
        ("What does 山 mean?", "山 means mountain."),
        ("What does 龍 mean?", "龍 means dragon 🐉."),
    )
    return options[rng.randrange(len(options))]


def _exchange(rng: random.Random) -> tuple[Turn, Turn]:
    number = rng.randrange(len(HEROES))
    kind = rng.random()
    if kind < 0.2:
        asked, answer = _small_talk(rng)
    elif kind < 0.3:
        asked = noise(rng).strip()
        answer = f"That I do not know, but here is a tale. {short_tale(rng, some_hero(rng))}"
    elif kind < 0.42:
        asked, answer = f"Tell me a story about {HEROES[number].name}.", story(rng, number)
    else:
        asked, answer = _question(rng, number)
    return Turn("user", asked), Turn("assistant", answer)


def chat(rng: random.Random) -> Document:
    """One to four exchanges, half of them after a system message."""
    turns: list[Turn] = []
    if rng.random() < 0.5:
        known = rng.random() < 0.7
        turns.append(Turn("system", rng.choice(SYSTEM_MESSAGES) if known else noise(rng)))
    for _ in range(1 + min(rng.randrange(4), rng.randrange(4))):
        turns.extend(_exchange(rng))
    return Document(turns=tuple(turns))


def _stories(rng: random.Random) -> Document:
    texts = [story(rng, some_hero(rng))]
    while rng.random() < 0.15:
        texts.append(story(rng, some_hero(rng)))
    return Document(text="\n\n".join(texts))


def _after_noise(rng: random.Random) -> Document:
    lead = noise(rng)
    joint = "" if lead.endswith("\n") else "\n\n"
    return Document(text=lead + joint + story(rng, some_hero(rng)))


def document(rng: random.Random) -> Document:
    """One document of the mixture: mostly stories and chats, some short texts."""
    kind = rng.random()
    if kind < 0.50:
        return _stories(rng)
    if kind < 0.82:
        return chat(rng)
    if kind < 0.89:
        return _after_noise(rng)
    if kind < 0.97:
        return Document(text=short_tale(rng, some_hero(rng)))
    return Document(text=road_note(rng, _favoured(rng, len(PLACES))))


def documents(n_documents: int, seed: int) -> Iterator[Document]:
    """The same documents for the same seed."""
    rng = random.Random(seed)
    for _ in range(n_documents):
        yield document(rng)
