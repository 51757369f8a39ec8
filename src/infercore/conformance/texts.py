"""The texts that laws use unless a rig brings its own."""

STORY = """\
Once upon a time there was a baker named Mira who lived in a small village by the river. Every \
morning she rose before the sun, lit the big oven and made bread for everyone in the village. \
One cold day a boy came to the door. He had no coat and he was hungry. Mira gave him a warm loaf \
and a cup of milk. The boy smiled and told her about a lost dog in the forest. So Mira took her \
lantern and they went out together. They walked past the old mill, over the bridge and along the \
stream. The wind was loud and the trees were dark, but they were not afraid. At last they heard a \
soft bark behind a rock. The dog was there, wet and tired. The boy held him close and laughed. \
On the way home they sang an old song, and the whole village came out to hear it. From that day \
the boy came every morning to help with the bread, and the dog slept beside the oven. In spring \
they planted a tree near the door, and when it grew tall the children sat in its shade and asked \
for the story of the night in the forest. Mira told it again and again, and each time the wind \
was a little louder and the dog a little braver. And they were all happy and never hungry again."""

TEXTS = (
    "a",
    " leading and trailing blanks  ",
    "line\nbreak\r\n\ttab",
    "naïve café, fünf Bücher",
    "Привет, мир",
    "こんにちは世界",
    "🙂👩‍👩‍👧 flags 🇩🇪",
    "e\u0301 combined, \u202eright to left אבג",
    "null \0 inside",
    "0123456789 {}[]()<>|&^%$#@!~`",
)
"""Texts that must survive encode and decode."""

PIECES = ("🙂", "語", "é", "naïve", "日本語テキスト")
"""Texts whose characters may be split over tokens."""
