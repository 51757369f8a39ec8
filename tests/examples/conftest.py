"""Examples are run as users run them: each in a process of its own, on each engine that is here.

The reference backend is announced to them as an installed plugin would be, so that they also run
where there is no engine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

EXAMPLES = Path(__file__).parents[2] / "examples"
ENGINES = (*sorted(pack.FORMATS), "reference")
PLUGIN = """
from infercore import hookimpl
from infercore.testing import reference_backend

@hookimpl
def infercore_backend():
    return reference_backend()
"""


@pytest.fixture(scope="session", autouse=True)
def _examples() -> None:
    if not EXAMPLES.is_dir():
        pytest.skip("the folder examples is not beside these tests")
    pack.need_pack()


@pytest.fixture(scope="session")
def reference_plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for PYTHONPATH in which the reference backend is an installed plugin."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "announced_reference.py").write_text(PLUGIN, encoding="utf-8")
    metadata = folder / "announced_reference-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: announced-reference\nVersion: 1.0\n", encoding="utf-8"
    )
    (metadata / "entry_points.txt").write_text(
        "[infercore.backends]\nreference = announced_reference\n", encoding="utf-8"
    )
    return folder


@pytest.fixture(scope="session")
def environment(reference_plugin: Path) -> Callable[[str], Mapping[str, str]]:
    """Return a function: the environment in which an example sees only these engines."""

    def of(engines: str) -> Mapping[str, str]:
        return {
            **os.environ,
            "INFERCORE_PLUGINS": engines,
            "INFERCORE_BACKEND": "",
            "OMP_THREAD_LIMIT": "1",  # small models gain nothing from threads, and cores are busy
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": str(reference_plugin),
            "PYTHONUTF8": "1",
        }

    return of


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Return the name of an engine that can be used here."""
    if request.param != "reference":
        pack.need_backend(request.param)
    return str(request.param)


@pytest.fixture
def run(environment: Callable[[str], Mapping[str, str]]) -> Callable[..., str]:
    """Return a function that runs an example on named engines and returns what it printed."""

    def one(engines: str, name: str, *arguments: str, fails: bool = False) -> str:
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / name), *arguments],
            env=environment(engines),
            capture_output=True,
            encoding="utf-8",
            timeout=110,
            check=False,
        )
        if fails:
            assert done.returncode != 0
            return done.stderr
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return one
