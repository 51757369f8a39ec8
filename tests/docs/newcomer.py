"""Follows README.md: every command and program in it, as written and in order, in a folder."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from docs import pages

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from docs.pages import Block

README = "README.md"
BASH = shutil.which("bash") or "/bin/bash"
SECONDS = 900  # for one command; the first one installs
TYPED = "Where does Nadia live?\n"
"""What is typed where a command asks."""
PROGRAM = "first.py"
SKIPPED = "skipped"
"""The kind of a step whose program is not here."""
ACTIVATE = ". .venv/bin/activate"
OTHER_MODEL = ('"pack:storyteller"', '"hf:ORG/REPO"')
"""What README says to replace in its program, and with what."""
_TESTS = "python -m pytest"
_ADDRESS = "127.0.0.1:8000"
_HEALTHY = re.compile(rb"HTTP/1.1 200")


@dataclass(frozen=True)
class Step:
    """One line of README, or its program, that was run: what it printed, and whether it worked."""

    kind: str
    line: str
    worked: bool
    said: str


def storyteller(engine: str) -> dict[str, bytes]:
    """Return the files of a repository with the pack's storyteller, the weights first."""
    import infercore_models

    where = infercore_models.path("storyteller", {"llamacpp": "gguf-q8_0"}.get(engine, engine))
    files = [where] if where.is_file() else sorted(where.iterdir())
    files.sort(key=lambda path: -path.stat().st_size)
    return {path.name: path.read_bytes() for path in files}


def follow(folder: Path, environment: Mapping[str, str], *, install: bool = False) -> list[Step]:
    """Do what README says in ``folder``, which holds the clone's ``.venv``, or is the clone.

    Without ``install`` the first command's installation is left out. The command that runs the
    tests is not run.
    """
    shell = _Shell(folder, environment)
    steps: list[Step] = []
    try:
        for block in pages.blocks(README):
            if block.language == "python":
                steps += _program(shell, block)
            for line in _lines(block):
                steps += _command(shell, line, install=install)
    finally:
        shell.end()
    return steps


def left_out(steps: list[Step]) -> list[str]:
    """Return the lines of README's blocks that no step has run, without the one for the tests."""
    run = {step.line for step in steps}
    lines = [line for block in pages.blocks(README) for line in _lines(block)]
    return [line for line in lines if line not in run and _TESTS not in line]


def _lines(block: Block) -> list[str]:
    return block.commands if block.language == "bash" else []


def _program(shell: _Shell, block: Block) -> Iterator[Step]:
    """Save the program as README says and run it; then with a model of the hub."""
    text = pages.text_of(README)
    command = f".venv/bin/python {PROGRAM}"
    assert f"save it as `{PROGRAM}` and run `{command}`" in " ".join(text.split())
    assert f"replace `{OTHER_MODEL[0]}` with" in " ".join(text.split())
    assert "`hf:ORG/REPO`" in text
    for source in (block.text, block.text.replace(*OTHER_MODEL)):
        (shell.folder / PROGRAM).write_text(source, encoding="utf-8")
        yield shell.run("program", command)


def _command(shell: _Shell, line: str, *, install: bool) -> Iterator[Step]:
    if _TESTS in line:
        return
    if line.startswith("python3 -m venv"):
        yield shell.run("demo", line, said=line if install else line.rpartition("&& ")[2])
        return
    assert f"`{ACTIVATE}`" in pages.text_of(README)
    if line.startswith("infercore serve"):
        yield shell.serve(line)
    elif line.startswith("curl") and shutil.which("curl") is None:
        yield Step(SKIPPED, line, worked=True, said="there is no curl here: not run")
    else:
        yield shell.run("command", line, said=f"{ACTIVATE} && {shell.at_our_port(line)}")


class _Shell:
    """Runs lines in a folder; a server stays up until the end."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._environment = environment
        self._server: subprocess.Popen[str] | None = None
        self._address = _ADDRESS

    def run(self, kind: str, line: str, said: str | None = None) -> Step:
        """Run ``said``, by default the line itself, with a question on standard input."""
        asks = "infercore chat" in line
        done = subprocess.run(
            [BASH, "-c", said or line], cwd=self.folder, env=self._environment, check=False,
            input=TYPED if asks else "", capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
        worked = done.returncode == 0 and bool(done.stdout.strip()) and '"error"' not in done.stdout
        printed = f"$ {line}\n{done.stdout}{done.stderr}(status {done.returncode})"
        return Step(kind, line, worked, printed)

    def at_our_port(self, line: str) -> str:
        """Return ``line`` with the address of the server that runs."""
        return line.replace(_ADDRESS, self._address)

    def serve(self, line: str) -> Step:
        """Start the server as written; on another port where README's is taken."""
        if not _is_free(8000):
            with socket.create_server(("127.0.0.1", 0)) as free:
                self._address = f"127.0.0.1:{free.getsockname()[1]}"
        port = self._address.partition(":")[2]
        other = [] if self._address == _ADDRESS else ["--port", port]
        log = self.folder / "server.log"
        with log.open("w", encoding="utf-8") as output:
            self._server = subprocess.Popen(
                [BASH, "-c", f"{ACTIVATE} && exec {shlex.join([*shlex.split(line), *other])}"],
                cwd=self.folder, env=self._environment, stdout=output, stderr=output,
                stdin=subprocess.DEVNULL, text=True,
            )  # fmt: skip
        until = time.monotonic() + SECONDS
        answers = False
        while not answers and self._server.poll() is None and time.monotonic() < until:
            answers = _is_healthy(int(port))
            time.sleep(0.1)
        said = f"$ {line}\n{log.read_text(encoding='utf-8')}"
        return Step("server", line, answers, said)

    def end(self) -> None:
        """Stop the server, which ends its answers first."""
        if self._server is not None and self._server.poll() is None:
            os.kill(self._server.pid, signal.SIGTERM)
            self._server.wait(SECONDS)


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _is_healthy(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return bool(_HEALTHY.match(client.recv(1000)))
    except OSError:
        return False
