"""The small world that the storyteller tells about: heroes, and places along one round road.

Everything about a hero or a place is fixed, so that a text follows from what stands before it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hero:
    """Someone a story can be about; every field follows from the name."""

    name: str
    kind: str
    she: str
    her: str
    home: int
    friend: str
    pet: str
    tool: str
    food: str
    trait: str
    wish: str
    saying: str
    sign: str


@dataclass(frozen=True)
class Place:
    """A stop on the road; the road leads from each place to the next one and back to the first."""

    name: str
    look: str
    host: str
    trouble: str
    help: str
    gift: str
    bed: str


HEROES = (
    Hero(
        "Mira",
        "baker",
        "she",
        "her",
        0,
        "Tom",
        "grey goose",
        "copper lantern",
        "plum cake",
        "patient",
        "the silver bell",
        "Small steps climb tall hills",
        "🌙",
    ),
    Hero(
        "Anton",
        "clockmaker",
        "he",
        "his",
        3,
        "Zoë",
        "sleepy owl",
        "brass key",
        "onion soup",
        "curious",
        "the lost hour",
        "Every lock was made to be opened",
        "⏰",
    ),
    Hero(
        "Nadia",
        "sailor",
        "she",
        "her",
        6,
        "Jürgen",
        "red parrot",
        "long rope",
        "salted fish",
        "brave",
        "the blue pearl",
        "No wind blows for ever",
        "⚓",
    ),
    Hero(
        "Oskar",
        "gardener",
        "he",
        "his",
        9,
        "Ruth",
        "fat hedgehog",
        "green shovel",
        "apple bread",
        "gentle",
        "the winter rose",
        "What is watered will grow",
        "🌱",
    ),
    Hero(
        "Lien",
        "painter",
        "she",
        "her",
        1,
        "Pavel",
        "white cat",
        "silk brush",
        "rice with honey",
        "quiet",
        "the last colour",
        "Look twice and speak once",
        "🎨",
    ),
    Hero(
        "Bruno",
        "miller",
        "he",
        "his",
        4,
        "Ines",
        "old donkey",
        "flour sack",
        "barley porridge",
        "strong",
        "the golden grain",
        "Slow water turns the wheel",
        "🌾",
    ),
    Hero(
        "Selma",
        "fiddler",
        "she",
        "her",
        7,
        "André",
        "brown bear",
        "cherry fiddle",
        "walnut pie",
        "merry",
        "the song of the deep",
        "A tune is lighter than a stone",
        "🎻",
    ),
    Hero(
        "Felix",
        "shepherd",
        "he",
        "his",
        10,
        "Greta",
        "black dog",
        "willow whistle",
        "goat cheese",
        "careful",
        "the lamb of stars",
        "Count them all before you sleep",
        "🐑",
    ),
)

PLACES = (
    Place(
        "the stone bridge",
        "It crossed a loud river in three wide arches",
        "a river troll",
        "had dropped a hat into the water",
        "fished the hat out of the foam",
        "a round white pebble",
        "under the middle arch",
    ),
    Place(
        "the pine forest",
        "The trees stood so close that noon looked like evening",
        "a lost squirrel",
        "could not find the way to its own nest",
        "counted the trees until the nest was found",
        "a bag of pine nuts",
        "on a bed of moss",
    ),
    Place(
        "the old mill",
        "Its wheel had not turned since the great storm",
        "a dusty ghost",
        "was tired of the silence",
        "cleaned the wheel until it turned again",
        "a cup of white flour",
        "between two warm sacks",
    ),
    Place(
        "the market town",
        "Forty coloured roofs leaned over one crooked street",
        "a nervous mayor",
        "had forgotten how to ring the tower bell",
        "pulled the bell until every window opened",
        "a ribbon of yellow silk",
        "above the rope shop",
    ),
    Place(
        "the glass lake",
        "The water was so still that the clouds seemed to swim in it",
        "an ancient pike",
        "wanted to hear news from the land",
        "told it all the news of the year",
        "a scale that shone like a coin",
        "in a dry boat",
    ),
    Place(
        "the Café Lumière",
        "A small sign over the door said that soup was free on rainy days",
        "a cheerful cook",
        "had more guests than spoons",
        "carved nine spoons out of one branch",
        "a jar of pepper",
        "beside the kitchen stove",
    ),
    Place(
        "the grey harbour",
        "Ships from seven countries creaked at their ropes",
        "a blind captain",
        "could no longer read the stars",
        "named each star from west to east",
        "a map drawn on leather",
        "inside a coil of rope",
    ),
    Place(
        "the whale cave",
        "Every word spoken there came back three times",
        "a shy bat",
        "was afraid of its own echo",
        "sang with the echo until it sounded kind",
        "a tooth of green amber",
        "on a shelf of smooth rock",
    ),
    Place(
        "the salt desert",
        "The ground was white and flat as far as anyone could see",
        "a thirsty camel",
        "had walked past the well in the dark",
        "dug in the sand until water rose",
        "a crystal of pink salt",
        "in the shadow of a dune",
    ),
    Place(
        "the mountain gate",
        "Over the gate stood the old word 山, which means mountain",
        "a stern guard",
        "let nobody pass without a riddle",
        "answered the riddle with a smile",
        "an iron ring",
        "behind the guard house",
    ),
    Place(
        "the snow pass",
        "Two walls of ice held a narrow path between them",
        "a frozen traveller",
        "had lost both gloves in the snow",
        "made a fire and warmed the cold hands",
        "a pair of wool socks",
        "in a hole dug out of the snow",
    ),
    Place(
        "the dragon tower",
        "On its door somebody had painted the sign 龍 in red 🐉",
        "a young dragon",
        "had a cough and could not breathe fire",
        "cooked a tea of seven herbs",
        "a warm black scale",
        "on the lowest step of the stairs",
    ),
)

ORDINALS = ("first", "second", "third")


def place_after(index: int, steps: int = 1) -> Place:
    """The place that many steps further along the road, which is a ring."""
    return PLACES[(index + steps) % len(PLACES)]
