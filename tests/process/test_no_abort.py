"""No call from Python ends the process or corrupts silently: each is made in a child and refused.

The cases are in ``calls.py``, ``silent.py`` and ``files.py``. One child runs all that were
chosen; where it dies, that case has failed and another child goes on behind it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pack
from process import calls, files, rig, silent  # noqa: F401  (they fill the table)

if TYPE_CHECKING:
    from collections.abc import Callable

CHILD = str(Path(__file__).with_name("child.py"))
SECONDS = 300
EVERY = [(backend, name) for backend in rig.BOTH for name in rig.names(backend)]
pytestmark = pytest.mark.timeout(SECONDS)


class Outcome:
    """What became of the cases, by name, and how the children ended."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}
        self.ends: list[tuple[int, str]] = []


@pytest.fixture(scope="session")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Outcome]:
    """Run the chosen cases of a backend, once."""
    found: dict[str, Outcome] = {}

    def of(backend: str) -> Outcome:
        if backend not in found:
            pack.need_backend(backend)
            path, folder = str(pack.model_path(backend)), str(tmp_path_factory.mktemp(backend))
            found[backend] = Outcome()
            run(found[backend], [backend, path, folder], chosen(request, backend))
        return found[backend]

    return of


def chosen(request: pytest.FixtureRequest, backend: str) -> list[str]:
    """Return the cases of ``backend`` among the tests that were selected."""
    given = [getattr(item, "callspec", None) for item in request.session.items]
    params: list[dict[str, Any]] = [spec.params for spec in given if spec is not None]
    wanted = {p["name"] for p in params if p.get("backend") == backend and "name" in p}
    return [name for name in rig.names(backend) if name in wanted]


def run(outcome: Outcome, arguments: list[str], names: list[str]) -> None:
    """Run ``names`` in children until each has an outcome."""
    while names:
        done = subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", CHILD, *arguments, *names],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        outcome.ends.append((done.returncode, done.stderr))
        running = ""
        for line in done.stdout.splitlines():
            told = json.loads(line)
            running = told.get("begins", running)
            outcome.of[running] = told.get("fails", "ok" if "ends" in told else "died")
        if outcome.of.get(running) == "died":
            outcome.of[running] = f"the child died with {done.returncode}:\n{done.stderr}"
        left = [name for name in names if name not in outcome.of]
        names = left if len(left) < len(names) else []


@pytest.mark.parametrize(("backend", "name"), EVERY)
def test_a_call_is_refused_and_nothing_is_lost(
    outcomes: Callable[[str], Outcome], backend: str, name: str
) -> None:
    outcome = outcomes(backend)
    assert outcome.of.get(name, f"never ran: {outcome.ends}") == "ok"


@pytest.mark.parametrize("backend", rig.BOTH)
def test_the_child_ends_by_itself_and_in_silence(
    outcomes: Callable[[str], Outcome], backend: str
) -> None:
    assert set(outcomes(backend).ends) <= {(0, "")}
