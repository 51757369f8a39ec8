"""The pack's agent calls its tools for twenty rounds, on every engine, and the same way."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import infercore as ic
import pack

DRAWN: dict[str, Any] = {"seed": 3, "temperature": 0.8, "implementation": "portable"}
SCRIPT = Path(__file__).parents[2] / "tools" / "agent_rounds.py"


@pytest.fixture(scope="module")
def script() -> Any:
    if not SCRIPT.is_file():
        pytest.skip("the folder tools is not beside these tests")
    spec = importlib.util.spec_from_file_location("agent_rounds", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["agent_rounds"] = module
    spec.loader.exec_module(module)
    return module


def rounds(script: Any, backend: str, exact: dict[str, Any], **decode: Any) -> list[Any]:
    import infercore_models

    path = infercore_models.path("agent", pack.FORMATS[backend])
    threads = {"n_threads": 1} if backend == "llamacpp" else {}
    fields = {**{key: value for key, value in exact.items() if "threads" not in key}, **threads}
    with ic.open_session(path, backend=backend, n_ctx=2048, **fields) as session:
        found: list[Any] = script.rounds(session, 20, **decode)
    return found


def test_twenty_rounds_of_valid_calls_that_reuse_what_is_held(
    script: Any, backend_name: str, exact: dict[str, Any]
) -> None:
    found = rounds(script, backend_name, exact, seed=7, temperature=0.8)
    assert sum(len(one.calls) for one in found) >= 10
    assert {call.name for one in found for call in one.calls} == {"road", "add"}
    assert not any(one.is_malformed for one in found)
    right = {one.text for one in found if one.is_right}
    assert {"The sum is 42.", "It leads to red mill, 8 miles."} <= right
    for before, one in pairwise(found):
        if before.calls:  # within a turn, only the results are new
            assert one.usage.prompt_tokens - one.usage.cached_tokens < 80


def test_the_same_seed_gives_the_same_rounds_on_all_engines(
    script: Any, exact: dict[str, Any]
) -> None:
    for backend in pack.FORMATS:
        pack.need_backend(backend)
    texts = [
        [one.shown for one in rounds(script, backend, exact, **DRAWN)]
        for backend in (*pack.FORMATS, next(iter(pack.FORMATS)))
    ]
    assert texts[0] == texts[1] == texts[2]
