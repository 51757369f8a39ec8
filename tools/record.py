"""Record the demo and a chat on a terminal as SVG pictures: ``python tools/record.py``.

Writes docs/images/demo.svg and docs/images/chat.svg. Each command runs on a terminal of its own,
with keys typed as a person would; what the terminal shows at the end is the picture. Needs the
extra ``cli``, the model pack and an engine; Linux or macOS.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

IMAGES = Path(__file__).parents[1] / "docs" / "images"
TIMEOUT_S = 120
ROWS = 60
_CODE = re.compile(
    r"\x1b\[(?P<arguments>[0-9;?]*)(?P<kind>[A-Za-z])|\x1b\](?:[^\x07\x1b]*)(?:\x07|\x1b\\)"
    r"|\x1b[=>]|(?P<other>.)",
    re.DOTALL,
)
_NOT_OURS = re.compile(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", re.DOTALL)


class Recording(NamedTuple):
    """A command, its width in columns, and what is typed once the prompt is there."""

    title: str
    command: tuple[str, ...]
    columns: int
    typed: tuple[str, ...] = ()


RECORDINGS = {
    "demo": Recording("infercore demo", ("demo", "--max-tokens", "40"), 110),
    "chat": Recording(
        "infercore chat pack:storyteller",
        ("chat", "pack:storyteller", "--temp", "0"),
        80,
        ("Where does Nadia live?", "Describe Felix as JSON.", "/stats", "/exit"),
    ),
}
PROMPT = ">>> "


class Screen:
    """What a terminal shows after some output: enough of one for lines, colours and bars."""

    def __init__(self) -> None:
        self.lines: list[list[tuple[str, str]]] = [[]]
        self._row = self._column = 0
        self._style = ""

    def feed(self, text: str) -> None:
        """Take output."""
        for found in _CODE.finditer(text):
            if found["other"]:
                self._put(found["other"])
            elif found["kind"]:
                self._do(found["kind"], found["arguments"])

    def _put(self, character: str) -> None:
        if character == "\n":
            self._row, self._column = self._row + 1, 0
            if self._row == len(self.lines):
                self.lines.append([])
        elif character == "\r":
            self._column = 0
        elif character == "\b":
            self._column = max(0, self._column - 1)
        elif character.isprintable():
            line = self.lines[self._row]
            line += [(" ", "")] * (self._column + 1 - len(line))
            line[self._column] = (character, self._style)
            self._column += 1

    def _do(self, kind: str, arguments: str) -> None:
        if kind == "m":
            self._style = "" if arguments in {"", "0"} else f"{self._style}\x1b[{arguments}m"
        elif kind == "A":
            self._row = max(0, self._row - int(arguments or 1))
        elif kind == "K":
            kept = 0 if arguments == "2" else self._column
            del self.lines[self._row][kept:]

    def text(self) -> str:
        """Return the lines, with the codes of their colours."""
        rows = ("".join(f"{style}{c}\x1b[0m" if style else c for c, style in line).rstrip()
                for line in self.lines)  # fmt: skip
        return "\n".join(rows).rstrip()


def record(recording: Recording) -> str:
    """Run the command on a terminal and return what it shows."""
    master, slave = pty.openpty()
    size = struct.pack("HHHH", ROWS, recording.columns, 0, 0)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, size)
    environment = {**os.environ, "TERM": "xterm-256color", "INPUTRC": os.devnull}
    environment["COLUMNS"] = str(recording.columns)
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "infercore", *recording.command],
        stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    seen = _drive(master, recording.typed)
    os.close(master)
    if status := process.wait(TIMEOUT_S):
        raise SystemExit(f"infercore {' '.join(recording.command)} ended with {status}:\n{seen}")
    screen = Screen()
    screen.feed(f"$ infercore {' '.join(recording.command)}\r\n{seen}")
    return screen.text()


def _drive(master: int, typed: Sequence[str]) -> str:
    """Type each line once there is a prompt for it; return all output."""
    waiting, data, looked = list(typed), b"", 0
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        if select.select([master], [], [], 0.1)[0]:
            try:
                more = os.read(master, 65536)
            except OSError:  # how Linux reports the end
                break
            if not more:
                break
            data += more
        elif waiting and PROMPT.encode() in data[looked:]:
            looked = len(data)
            os.write(master, waiting.pop(0).encode() + b"\n")
    return data.decode(errors="replace")


def picture(shown: str, recording: Recording) -> str:
    """Return the SVG, with fonts of the reader's system."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=recording.columns, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(shown))
        name = re.sub(r"\W", "-", recording.title)
        svg = console.export_svg(title=recording.title, unique_id=name)
    return _NOT_OURS.sub("", svg)


def main() -> None:
    """Write the pictures that are named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*RECORDINGS, []], help="default: all")
    parser.add_argument("--to", type=Path, default=IMAGES, help="the folder to write to")
    options = parser.parse_args()
    for name in options.names or RECORDINGS:
        recording = RECORDINGS[name]
        path = options.to / f"{name}.svg"
        path.write_text(picture(record(recording), recording), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
