"""The page shows the results that are kept, and the same results give the same bytes."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS, DOCS = ROOT / "benchmarks", ROOT / "docs"
RESULTS = SCRIPTS / "results"
PAGES = (DOCS / "benchmarks.md", SCRIPTS / "README.md")
PLOTS = {"throughput", "first-token", "agent-loop", "memory"}

if not SCRIPTS.is_dir() or not DOCS.is_dir():
    pytest.skip("the benchmarks are not beside these tests", allow_module_level=True)
if importlib.util.find_spec("matplotlib") is None:
    pytest.skip('matplotlib is not installed; run: pip install ".[bench]"', allow_module_level=True)


def report(plots: Path, page: Path, results: Path = RESULTS) -> None:
    command = [sys.executable, str(SCRIPTS / "report.py"), "--results", str(results)]
    command += ["--plots", str(plots), "--page", str(page)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_has_the_tables_of_the_results(tmp_path, page) -> None:
    copy = tmp_path / page.name
    shutil.copy(page, copy)
    report(tmp_path, copy)
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
    assert "Not measured yet" not in copy.read_text(encoding="utf-8")


def test_the_same_results_give_the_same_plots(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("", encoding="utf-8")
    for name in ("one", "two"):
        report(tmp_path / name, page)
    files = sorted((tmp_path / "one").iterdir())
    assert {file.name for file in files} == {f"bench-{name}.svg" for name in PLOTS}
    for file in files:
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()
        assert (DOCS / "_static" / file.name).is_file()


def test_results_name_no_folder_and_no_host() -> None:
    files = sorted(RESULTS.glob("*.json"))
    assert files
    for file in files:
        told = json.loads(file.read_text(encoding="utf-8"))
        assert "/" not in told["command"].replace("benchmarks/", "")
        assert "host" not in file.read_text(encoding="utf-8")


def test_a_goal_that_is_missed_is_told(tmp_path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    value = {"median": 25.0, "low": 20.0, "high": 30.0, "n": 3}
    rows = [
        {"model": "m", "figure": "fork 2000 tokens", "by": by, "unit": "ms", "note": "",
         "value": {**value, "median": median}}
        for by, median in (("into a free sequence", 19.0), ("into a new context", 25.0))
    ]  # fmt: skip
    machine = {"load_average": 0.1, "cpus": 2}
    told = {"command": "python benchmarks/state.py m", "machine": machine, "rows": rows}
    (results / "state.json").write_text(json.dumps(told), encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text("<!-- results: goals -->\n<!-- results end -->\n", encoding="utf-8")
    report(tmp_path, page, results)
    free, new = page.read_text(encoding="utf-8").splitlines()[4:6]
    assert free.endswith("| 19.0 (20.0 to 30.0) ms | met |")
    assert new.endswith("| 25.0 (20.0 to 30.0) ms | **missed** |")
