"""Draws the pictures of the documentation: ``python docs/diagrams/draw.py``.

The files in ``docs/images`` are what this writes; a test compares them.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from canvas import Canvas

IMAGES = Path(__file__).parents[1] / "images"


def tape() -> Canvas:
    """The parts of a session's tape."""
    c = Canvas("The token tape of a session", 250)
    c.text(30, 34, "The tape: every token that the engine holds, in order", "bold")
    parts = (
        (30, 240, "blue", "prefix", "ensure_prefix"),
        (270, 120, "green", "suffix", "prefill_suffix"),
        (390, 130, "amber", "generated", "decode"),
        (520, 110, "ghost", "warm tail", "still held"),
    )
    for x, width, colour, label, note in parts:
        c.box(x, 60, width, 62, colour, label, note, "bold")
    c.box(630, 60, 100, 62, "page", "free")
    c.brace(30, 520, 130, "logical context: what statuses and reports count")
    c.brace(520, 630, 130, "lazy truncation")
    c.brace(630, 730, 130, "available")
    c.text(30, 190, "A call compares the tokens it wants with the tape, from the start:", "small")
    c.text(30, 210, "equal tokens stand; from the first difference on they are evaluated,", "small")
    c.text(30, 230, "and what lay there is dropped.", "small")
    return c


def turns() -> Canvas:
    """What two turns cost, cold and warm."""
    c = Canvas("Two turns over one prefix, without and with a warm prefix", 300)
    c.text(30, 34, "Two turns over one prefix", "bold")
    c.text(160, 62, "tokens of the prompt", "small")
    rows = (
        (74, "each turn cold", (("red", 370, "prefix"), ("red", 90, "suffix 1"))),
        (116, "", (("red", 370, "prefix"), ("red", 110, "suffix 2"))),
        (186, "kept warm", (("red", 370, "prefix"), ("red", 90, "suffix 1"))),
        (228, "", (("green", 370, "prefix: resident"), ("red", 110, "suffix 2"))),
    )
    for i, (y, title, parts) in enumerate(rows):
        c.text(30, y + 22, title, "bold")
        x = 160.0
        for colour, width, label in parts:
            c.box(x, y, width, 34, colour, label)
            x += width
        c.text(x + 12, y + 22, f"turn {i % 2 + 1}", "small")
    c.text(
        30,
        286,
        "Red goes through the engine, green does not. The longer the prefix, the more it saves.",
        "small",
    )
    return c


def seam() -> Canvas:
    """A token that crosses from prefix to suffix."""
    c = Canvas("A token that crosses the seam between prefix and suffix", 300)
    c.text(30, 34, "The seam: tokens are those of the whole text", "bold")
    c.text(30, 66, 'after ensure_prefix("… there was a ba")', "code")
    c.box(30, 76, 130, 36, "blue", "… there was")
    c.box(160, 76, 60, 36, "blue", " a")
    c.box(220, 76, 60, 36, "red", " ba")
    c.text(300, 99, "held; but no token of the whole text ends here", "small")
    c.text(30, 150, 'prefill_suffix("ker named Mira")', "code")
    c.box(30, 160, 130, 36, "blue", "… there was")
    c.box(160, 160, 60, 36, "blue", " a")
    c.box(220, 160, 100, 36, "green", " baker")
    c.box(320, 160, 100, 36, "green", " named")
    c.box(420, 160, 100, 36, "green", " Mira")
    c.brace(30, 220, 202, "prefix_tokens: these stand")
    c.brace(220, 520, 202, "suffix_tokens: evaluated")
    c.text(540, 175, "the prefix gave way", "small")
    c.text(540, 192, "by seam_tokens = 1", "small")
    c.text(
        30,
        268,
        'A cold run of the text has exactly these tokens. With boundary="split" the two',
        "small",
    )
    c.text(30, 286, "texts are tokenized apart, and the red token stays.", "small")
    return c


def altitudes() -> Canvas:
    """Who calls whom."""
    c = Canvas("The two altitudes of infercore", 400)
    c.box(250, 20, 260, 44, "grey", "your code", "", "bold")
    c.box(
        60, 104, 280, 56, "violet", "Session, AsyncSession", "text: prefix, suffix, decode", "bold"
    )
    c.box(
        420,
        104,
        280,
        56,
        "blue",
        "Model, Context, Tokenizer, Sampler",
        "tokens, positions, logits",
        "",
    )
    c.arrow(300, 64, 300, 104)
    c.arrow(460, 64, 460, 104)
    c.box(
        60,
        200,
        640,
        56,
        "blue",
        "guard",
        "checks, ownership, chunks, windows, the books: written once",
        "bold",
    )
    c.arrow(200, 160, 200, 200)
    c.arrow(560, 160, 560, 200)
    columns = (
        (60, "green", "infercore-llamacpp", "amber", "llama.cpp"),
        (285, "green", "infercore-openvino", "amber", "OpenVINO"),
        (510, "ghost", "your plugin", "ghost", "your engine"),
    )
    for x, colour, plugin, below, engine in columns:
        c.box(x, 288, 190, 40, colour, plugin)
        c.arrow(x + 95, 256, x + 95, 288)
        c.box(x, 346, 190, 36, below, engine)
        c.arrow(x + 95, 328, x + 95, 346)
    return c


def layers() -> Canvas:
    """The packages, each on those that it may import."""
    c = Canvas("The layers of the package infercore", 420)
    c.text(30, 34, "Each layer imports only what stands below it", "bold")
    rows = (
        ("violet", ("cli", "conformance", "testing")),
        ("violet", ("api", "embedding")),
        ("blue", ("session",)),
        ("blue", ("sampling", "chat")),
        ("blue", ("engine: the guard",)),
        ("green", ("registry",)),
        ("green", ("protocols",)),
        ("grey", ("values",)),
        ("grey", ("errors",)),
    )
    for i, (colour, names) in enumerate(rows):
        width = (560 - 10 * (len(names) - 1)) / len(names)
        for j, name in enumerate(names):
            c.box(30 + j * (width + 10), 50 + i * 40, width, 32, colour, name)
    c.arrow(640, 60, 640, 400)
    c.text(655, 235, "may import", "small")
    return c


def states() -> Canvas:
    """What becomes of an object after an error."""
    c = Canvas("The four states after an error", 230)
    c.box(30, 80, 110, 50, "grey", "an error", "", "bold")
    rows = (
        (20, "green", "unchanged", "as before: correct the call and go on"),
        (70, "amber", "partial", "resident_tokens are kept: ask again, it goes on"),
        (120, "amber", "cleared", "tokens are gone: begin with ensure_prefix"),
        (170, "red", "closed", "open a new one"),
    )
    for y, colour, label, note in rows:
        c.box(240, y, 120, 38, colour, label, "", "bold")
        c.arrow(190, y + 19, 240, y + 19)
        c.text(376, y + 24, note, "small")
    c.arrow(140, 105, 188, 105)
    c.spine(190, 39, 189)
    return c


def sampling() -> Canvas:
    """The steps from a row of logits to a token."""
    c = Canvas("The order of sampling", 250)
    c.text(30, 34, "From one row of logits to one token", "bold")
    groups = (
        ("blue", "the whole vocabulary", ("processors", "mask", "bias", "penalties", "dry")),
        ("amber", "fewer candidates", ("top_n_sigma", "top_k", "typical", "top_p", "min_p", "xtc")),
        ("green", "one token", ("temperature", "selection")),
    )
    for i, (colour, title, steps) in enumerate(groups):
        y = 52 + i * 64
        c.text(30, y + 27, title, "small")
        width = 88 if len(steps) > 2 else 110  # noqa: PLR2004
        for j, step in enumerate(steps):
            x = 165 + j * (width + 10)
            c.box(x, y, width, 42, colour, step, style="step")
            if j:
                c.arrow(x - 10, y + 21, x, y + 21)
    return c


DRAWINGS = (tape, turns, seam, altitudes, layers, states, sampling)


def drawings() -> dict[str, str]:
    """Return the text of every picture by the name of its file."""
    return {f"{draw.__name__}.svg": draw().svg() for draw in DRAWINGS}


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, text in drawings().items():
        (IMAGES / name).write_text(text, encoding="utf-8")
