"""``import infercore`` is light, and every public name is there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import infercore

MOST_SECONDS = 0.15
RUNS = 5
PROBE = """
import json, sys, time
before = set(sys.modules)
begun = time.perf_counter()
import infercore
seconds = time.perf_counter() - begun
heavy = ["numpy", "importlib.metadata", "pluggy", "attr", "click", "rich", "jinja2",
         "llama_cpp", "openvino", "infercore_llamacpp", "infercore_openvino", "infercore_models"]
loaded = [m for m in heavy if m in sys.modules and m not in before]
print(json.dumps({"seconds": seconds, "loaded": loaded}))
"""


def probe(source: str) -> dict[str, object]:
    """Return what ``source`` prints as JSON in a Python of its own."""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_import_is_fast_and_loads_nothing_heavy() -> None:
    answers = [probe(PROBE) for _ in range(RUNS)]
    assert min(float(str(answer["seconds"])) for answer in answers) < MOST_SECONDS
    assert answers[0]["loaded"] == []


def test_the_registry_scans_nothing_before_it_is_asked() -> None:
    source = """
import importlib.metadata, json
def scan(*args, **kwargs):
    raise AssertionError("scanned")
importlib.metadata.distributions = importlib.metadata.entry_points = scan
import infercore
from infercore.registry import default_registry
default_registry()
print(json.dumps({"scanned": False}))
"""
    assert probe(source) == {"scanned": False}


def test_listing_backends_imports_no_engine() -> None:
    source = """
import json, sys
from infercore.registry import default_registry
default_registry().infos()
print(json.dumps({"loaded": [m for m in ("llama_cpp", "openvino") if m in sys.modules]}))
"""
    assert probe(source) == {"loaded": []}


@pytest.mark.parametrize("name", infercore.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(infercore, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = infercore.no_such_name


def test_dir_lists_the_public_names() -> None:
    assert set(infercore.__all__) <= set(dir(infercore))
