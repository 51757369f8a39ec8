"""What tests over both engines share.

A test that takes ``backend_name``, or anything made from it, runs once for each engine. Without
an engine it is skipped with the reason, unless ``INFERCORE_REQUIRE_BACKENDS`` names it: then it
fails.

Nothing here depends on luck: the order of the tests is random but fixed (another one:
``--randomly-seed=N``), as are the cases that Hypothesis makes and the seeds that calls without one
draw in this process. Where the pace of other processes decides (clients, browsers, signals, killed
workers), a test that fails is tried once more, twice where tests run beside each other, and the
summary names it as RERUN.
"""

from __future__ import annotations

import os
import random
import secrets
from typing import TYPE_CHECKING, Any

# Threads of NumPy's BLAS fight with those of the engines; small models gain nothing from them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Threads of an engine that wait for each other sleep: spinning is very slow on busy cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Aliases and the default model of whoever runs the tests are none of theirs.
os.environ["INFERCORE_CONFIG_DIR"] = os.path.join(os.path.dirname(__file__), "no-settings")
os.environ.pop("INFERCORE_MODEL", None)

import hypothesis
import pytest

import pack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

hypothesis.settings.load_profile("ci")  # of Hypothesis: the same cases in each run

_ORDER = 1
_OTHER_PROCESSES = {"cli", "docs", "examples", "isolated", "memory", "process", "serve"}


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "randomly_seed", None) == "default":
        config.option.randomly_seed = _ORDER


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    n_reruns = 2 if "PYTEST_XDIST_WORKER" in os.environ else 1
    for item in items:
        file = item.path.stem
        if item.path.parent.name in _OTHER_PROCESSES or "limits" in file:
            item.add_marker(pytest.mark.flaky(reruns=n_reruns))


@pytest.fixture(autouse=True)
def _same_draws(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "randbelow", random.Random(request.node.nodeid).randrange)


@pytest.fixture(scope="session", params=sorted(pack.FORMATS))
def backend_name(request: pytest.FixtureRequest) -> str:
    """Return the name of an engine that can be used here."""
    pack.need_backend(request.param)
    return str(request.param)


@pytest.fixture(scope="session")
def pack_path(backend_name: str) -> Path:
    """Return the storyteller, float32, in the engine's format."""
    return pack.model_path(backend_name)


@pytest.fixture(scope="session")
def model(backend_name: str, pack_path: Path) -> Iterator[Any]:
    """Return the storyteller, loaded once for each engine; tests do not close it."""
    import infercore

    with infercore.load_model(pack_path, backend=backend_name) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def exact() -> dict[str, str]:
    """Return context fields with which the engines' logits can be compared."""
    return dict(pack.EXACT)


@pytest.fixture(scope="session")
def golden() -> Any:
    """Return the storyteller's golden prompts, logits and greedy tokens."""
    pack.need_pack()
    import infercore_models

    return infercore_models.golden(pack.MODEL)
