"""The texts of the demo, in the world that the storyteller model was trained on."""

from __future__ import annotations

N_CTX = 1024
"""The window of the demo's sessions, in tokens: the model's trained one."""

MAX_TOKENS = 384
"""The most that a turn may generate; prefix and suffix fill the rest of the window."""


def _joined(text: str) -> str:
    """Undo the line breaks inside the paragraphs of ``text``."""
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))


PREFIX = (
    _joined("""
Once upon a time there was a painter named Lien, who lived near the pine forest. Lien was very
quiet, and everyone on the road knew it. Her best friend was Pavel, who never went anywhere
without a white cat.

One evening a letter came under the door. It was sealed with the sign 🎨 and it said: "Whoever
walks the road for three days will find the last colour." "Look twice and speak once," said
Lien. So she packed a silk brush and some rice with honey, called Pavel, and the two friends
closed the door without a sound.

On the first day they came to the old mill. Its wheel had not turned since the great storm. Out
of it came a dusty ghost, who was tired of the silence. Pavel looked at Lien and nodded. Lien
put down the silk brush and cleaned the wheel until it turned again. "How clever you are," said
the dusty ghost, and gave them a cup of white flour. That night they slept between two warm
sacks, and they shared the rice with honey.

On the second day the road led them to the market town. Forty coloured roofs leaned over one
crooked street. There they met a nervous mayor, who had forgotten how to ring the tower bell.
"That can be mended," said Pavel. Lien put down the silk brush and pulled the bell until every
window opened. "Thank you, friends," said the nervous mayor, and gave them a ribbon of yellow
silk. That night they slept above the rope shop, and Pavel told a joke.

On the third day they reached the glass lake. The water was so still that the clouds seemed to
swim in it. Right beside it sat an ancient pike, who wanted to hear news from the land. "That
can be mended," said Pavel. Lien put down the silk brush and told it all the news of the year.
"I will not forget it," said the ancient pike, and gave them a scale that shone like a coin.
That night they slept in a dry boat, and the white cat snored.

When the fourth morning came, something shone behind the glass lake. It was the last colour!
Lien could hardly believe it, and the white cat danced in a circle. They carried it home, and
at the door Lien said once more: "Look twice and speak once." From that day on she was faithful
to a friend. The end.
""")
    + "\n\n"
)
"""One whole story: what stays the same, 579 tokens of the storyteller's tokenizer."""

TURNS = {
    "cold": _joined("""
Once upon a time there was a baker named Mira, who lived near the stone bridge. Mira was very
patient, and everyone on the road knew it. Her best friend was
"""),
    "warm": _joined("""
Once upon a time there was a shepherd named Felix, who lived near the snow pass. Felix was very
careful, and even the birds knew it. His best friend was
"""),
}
"""What changes: how the next story begins, about 40 tokens each."""

WARM_UP = "Hello"
"""Generated from once before anything is measured; no beginning of it is in `PREFIX`."""
