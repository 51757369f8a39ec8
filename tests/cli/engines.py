"""What runs the command line on real engines: models by backend, children, and a terminal."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND = (sys.executable, "-m", "infercore")
TIMEOUT_S = 40
CTRL_C, CTRL_D = "\x03", "\x04"
ESCAPE = "\x1b"

REFERENCE = """
import infercore
from infercore.testing.reference import reference_backend

@infercore.hookimpl
def infercore_backend():
    return reference_backend()
"""
"""The source of a plugin that announces the reference backend."""


@attrs.frozen
class Engine:
    """A backend, the path of its storyteller, and the environment in which it is found."""

    name: str
    path: str
    environment: dict[str, str]

    @property
    def arguments(self) -> tuple[str, ...]:
        """MODEL and options with which every engine gives the same text."""
        return (self.path, "--backend", self.name, *EXACT)

    def start(self, *arguments: str, **fields: Any) -> subprocess.Popen[bytes]:
        """Start the command in a process of its own."""
        fields.setdefault("stdin", subprocess.DEVNULL)
        fields.setdefault("preexec_fn", heed_interrupts)
        fields["env"] = {**self.environment, **fields.get("env", {})}
        return subprocess.Popen([*COMMAND, *arguments], **fields)

    def run(
        self, *arguments: str, stdin: bytes = b"", **fields: Any
    ) -> subprocess.CompletedProcess[bytes]:
        """Run the command with ``stdin`` in a pipe; output and errors are kept apart."""
        fields["env"] = {**self.environment, **fields.get("env", {})}
        return subprocess.run(
            [*COMMAND, *arguments], input=stdin, capture_output=True, timeout=TIMEOUT_S,
            check=False, **fields,
        )  # fmt: skip


def heed_interrupts() -> None:
    """Undo what a shell does for a job in the background: its children ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


EXACT = ("--flash-attn", "off", "--type-k", "f32", "--type-v", "f32", "--temperature", "0")


class Terminal:
    """A command on a terminal of its own, as a person has it; ``seen`` is all that came."""

    def __init__(
        self, engine: Engine, *arguments: str, command: tuple[str, ...] = COMMAND, **env: str
    ) -> None:
        import pty

        self._master, slave = pty.openpty()
        self.seen = ""
        self._looked = 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *command, *arguments],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**engine.environment, "TERM": "xterm", **env},
        )  # fmt: skip
        os.close(slave)

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._master, text.encode())

    def wait_for(self, text: str, *, pressing: str = "") -> str:
        """Read until ``text`` comes; return what came since the wait before.

        A key that ``pressing`` names is pressed each time that nothing came for a second, as a
        person would: a Ctrl-C just before the line editor listens is lost.
        """
        until = time.monotonic() + TIMEOUT_S
        while text not in self.seen[self._looked :]:
            if pressing and not select.select([self._master], [], [], 1)[0]:
                self.type(pressing)
            assert time.monotonic() < until, f"{text!r} did not come: {self.seen!r}"
            assert self._read(), f"the command ended before {text!r} came: {self.seen!r}"
        start = self._looked
        self._looked = self.seen.index(text, start) + len(text)
        return self.seen[start : self._looked]

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], 1)
        if not ready:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # how Linux tells the end
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)

    def end(self) -> int:
        """Read to the end; return the exit status."""
        until = time.monotonic() + TIMEOUT_S
        while self._read() and self.process.poll() is None:
            assert time.monotonic() < until, f"the command did not end: {self.seen!r}"
        while select.select([self._master], [], [], 0)[0] and self._read():
            pass
        return self.process.wait(TIMEOUT_S)

    def close(self) -> None:
        """End the command, however it stands."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(TIMEOUT_S)
        os.close(self._master)


TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Makes the terminal the one whose Ctrl-C reaches this process, then becomes the command."""


@contextlib.contextmanager
def terminal(engine: Engine, *arguments: str, **fields: Any) -> Iterator[Terminal]:
    """Give a command on a terminal; it is ended in any case. Fields are the environment's."""
    opened = Terminal(engine, *arguments, **fields)
    try:
        yield opened
    finally:
        opened.close()
