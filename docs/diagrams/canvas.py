"""A small SVG writer: boxes, texts and arrows in named colours, for light and dark pages.

Each drawing paints its own background and follows the reader's colour scheme, so that it can be
read on any page.
"""

from __future__ import annotations

from html import escape

WIDTH = 760
STYLE = """
svg { color-scheme: light dark; }
text { font: 14px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1b2330; }
.small { font-size: 12px; fill: #4a5568; }
.step { font-size: 13px; }
.bold { font-weight: 600; }
.code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 13px; }
.middle { text-anchor: middle; }
.end { text-anchor: end; }
.page { fill: #fbfcfe; stroke: #d5dbe5; }
.box { stroke-width: 1.2; }
.blue { fill: #d6e6fb; stroke: #2f6db5; }
.green { fill: #d5efdc; stroke: #2e8049; }
.amber { fill: #fdebc3; stroke: #a87410; }
.red { fill: #fad9d5; stroke: #b3423a; }
.grey { fill: #e9edf3; stroke: #7a8699; }
.violet { fill: #e6dcf8; stroke: #6d4bb0; }
.ghost { fill: none; stroke: #7a8699; stroke-dasharray: 5 4; }
.line { stroke: #4a5568; stroke-width: 1.5; fill: none; }
.head { fill: #4a5568; }
@media (prefers-color-scheme: dark) {
text { fill: #e7ecf4; }
.small { fill: #aeb9ca; }
.page { fill: #151a22; stroke: #333d4d; }
.blue { fill: #1d3d63; stroke: #74aef0; }
.green { fill: #1c4429; stroke: #74c98d; }
.amber { fill: #4f3a0c; stroke: #e5b14c; }
.red { fill: #56211d; stroke: #ef8f86; }
.grey { fill: #2a323f; stroke: #8f9bae; }
.violet { fill: #3a2a60; stroke: #b39aec; }
.ghost { stroke: #8f9bae; }
.line { stroke: #aeb9ca; }
.head { fill: #aeb9ca; }
}
"""


class Canvas:
    """A drawing of ``WIDTH`` by ``height``, with a title for those who hear it."""

    def __init__(self, title: str, height: int) -> None:
        self._title = title
        self._height = height
        self._parts: list[str] = []

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        """Write ``text`` with its baseline at ``y``."""
        css = f' class="{style}"' if style else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}"{css}>{escape(text)}</text>')

    def box(  # noqa: PLR0917  (a box has that many sides)
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colour: str,
        label: str = "",
        note: str = "",
        style: str = "",
    ) -> None:
        """Draw a box, with a label in its middle and a smaller note below that."""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect class="box {colour}" {place} rx="5"/>')
        middle, lower = x + width / 2, y + height / 2 + 5
        if note:
            self.text(middle, lower + 9, note, "small middle")
            lower -= 9
        if label:
            self.text(middle, lower, label, f"middle {style}".strip())

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw an arrow from one point to another, straight up, down or to a side."""
        self._parts.append(f'<path class="line" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/>')
        if x1 == x2:
            back = y2 - 9 if y2 > y1 else y2 + 9
            corners = f"{x2:g},{y2:g} {x2 - 5:g},{back:g} {x2 + 5:g},{back:g}"
        else:
            back = x2 - 9 if x2 > x1 else x2 + 9
            corners = f"{x2:g},{y2:g} {back:g},{y2 - 5:g} {back:g},{y2 + 5:g}"
        self._parts.append(f'<polygon class="head" points="{corners}"/>')

    def spine(self, x: float, y1: float, y2: float) -> None:
        """Draw an upright line."""
        self._parts.append(f'<path class="line" d="M{x:g} {y1:g}V{y2:g}"/>')

    def brace(self, x1: float, x2: float, y: float, label: str) -> None:
        """Mark the stretch from ``x1`` to ``x2`` below ``y``, and name it."""
        middle = (x1 + x2) / 2
        path = f"M{x1:g} {y:g}v7H{middle:g}v5v-5H{x2:g}v-7"
        self._parts.append(f'<path class="line" d="{path}"/>')
        self.text(middle, y + 27, label, "small middle")

    def svg(self) -> str:
        """Return the drawing as a file's text."""
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" '
            f'width="{WIDTH}" height="{self._height}" role="img">\n'
            f"<title>{escape(self._title)}</title>\n<style>{STYLE}</style>\n"
            f'<rect class="page" x=".5" y=".5" width="{WIDTH - 1}" height="{self._height - 1}" '
            f'rx="8"/>\n{body}\n</svg>\n'
        )
