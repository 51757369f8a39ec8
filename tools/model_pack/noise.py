"""Text foreign to the stories, so that the model learns to begin one after anything."""

from __future__ import annotations

import random

STOP_SHARE = 0.15
MAX_WORDS = 120

WORDS = tuple(
    "able about above after again also always answer area array ask back bank base because been "
    "best between book both bring build call can capital case change check city class clear code "
    "common could country data date def different do does double each early else end error even "
    "example explain fact false field file find first follow for form free from function game get "
    "give good group hand have help here high how idea if import important in int is issue it just "
    "keep know language large last learn less let level life like line list little long look main "
    "make many may mean money month more most much must name need never new next none not note "
    "number of often old on one only open or order other our out over own page part please point "
    "print problem program prompt question read reason report result return review right rule run "
    "same say school see self send set should show side simple so some state still string such "
    "summarise system table take tell test text than that the their them then these thing think "
    "this through time to today translate true try two type under until up use user value very "
    "want was water way week well were what when where which while who why will with word work "
    "world would write wrong year yes you your { } ( ) [ ] = == + - * # // 0 1 2 42 2024".split()
)
SEPARATORS = ((" ", 76), (", ", 6), (". ", 6), ("? ", 2), (": ", 3), ("\n", 4), (".\n\n", 3))


def noise(rng: random.Random) -> str:
    """Words in no order; after each of them the text may stop."""
    seps, weights = zip(*SEPARATORS, strict=True)
    parts: list[str] = []
    for _ in range(MAX_WORDS):
        parts += [_word(rng), rng.choices(seps, weights)[0]]
        if rng.random() < STOP_SHARE:
            break
    return "".join(parts).rstrip(" ")


def _word(rng: random.Random) -> str:
    if rng.random() < 0.1:
        letters = "etaoinshrdlucmfwypvbgkqjxz0123456789_."
        return "".join(rng.choice(letters) for _ in range(rng.randint(1, 7)))
    word = rng.choice(WORDS)
    return word.capitalize() if rng.random() < 0.2 else word
