"""The suite from pytest and from the command line; rigs found by name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

import pack
from conformance.full_toy import FullModel
from infercore.cli.app import main
from infercore.conformance import check_backend, find_rig, plugin, rig_names, select
from infercore.errors import BackendNotFoundError, PluginLoadError
from infercore.registry import default_registry

PLUGIN = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from conformance.full_toy import toy_rig

def rig():
    return toy_rig(Path({folder!r}) / "model.json", known={known!r})

def broken():
    raise OSError("no engine here")

nothing = 5
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with an installed distribution that announces rigs of the toy."""
    return announced(tmp_path, monkeypatch, known={})


def announced(folder: Path, monkeypatch: pytest.MonkeyPatch, *, known: dict[str, str]) -> Path:
    source = PLUGIN.format(tests=str(Path(__file__).parents[1]), folder=str(folder), known=known)
    (folder / "toy_conformance.py").write_text(source)
    metadata = folder / "infercore_toy-1.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: infercore-toy\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[infercore.conformance]\ntoy = toy_conformance:rig\nbad = toy_conformance:broken\n"
        "none = toy_conformance:nothing\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.delitem(sys.modules, "toy_conformance", raising=False)
    return folder


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--pyargs", "infercore.conformance", "-q"]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", *arguments],
        cwd=folder, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip


def test_rigs_by_name(site: Path) -> None:
    assert {"toy", "bad", "none", "reference"} <= set(rig_names())
    rig = find_rig("toy")
    assert (rig.backend, rig.child) == ("toy", ("toy", None))
    rig.another_model().close()
    other = find_rig("toy", model=str(site / "model.json"))
    assert other.path == str(site / "model.json")
    with other.open_model() as model:
        assert model.backend == "toy"
    for name, why in (
        ("bad", r"no engine here.* \(.*toy_conformance.py, line \d"),
        ("none", "is a int"),
    ):
        with pytest.raises(PluginLoadError, match=why) as caught:
            find_rig(name)
        assert (caught.value.plugin, caught.value.distribution) == (name, "infercore-toy")
    with pytest.raises(BackendNotFoundError, match="reference"):
        find_rig("nobody")


def test_from_pytest(site: Path) -> None:
    done = run_pytest(site, "--infercore-backend", "toy", "-k", "DEC or KV-1- or SAMP")
    assert done.returncode == 0, done.stdout
    assert "| DEC-2 | " in done.stdout
    assert "toy: passed (" in done.stdout


def test_what_is_required_of_every_front(site: Path) -> None:
    done = run_pytest(
        site, "--infercore-backend", "toy", "-k", "DEC-2-", "--infercore-require", "observe,oracle"
    )
    assert done.returncode == 1, done.stdout
    assert "oracle is required and missing" in done.stdout
    found = cli("toy", "--only", "DEC-2", "--require", "observe", "--require", "oracle,encoder")
    assert found.exit_code == 1
    assert "oracle is required and missing" in found.output
    assert "encoder is required" not in found.output
    assert cli("toy", "--only", "DEC-2", "--require", "observe").exit_code == 0
    unknown = cli("toy", "--only", "DEC-2", "--require", "nothing")
    assert unknown.exit_code == 1
    for name in ("n_ubatch", "rope_freq_base"):
        assert name in unknown.output  # as --require takes it


def test_from_pytest_with_a_failure(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announced(site, monkeypatch, known={"DEC-2": "engine: it is said to fail"})
    done = run_pytest(site, "--infercore-backend", "toy", "-k", "DEC")
    assert done.returncode == 1
    assert "remove the entry" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "--infercore-backend"),
        (["--infercore-backend", "nobody"], 2, "nobody"),
        (["--infercore-backend", "toy", "-k", "nosuchlaw"], 5, "deselected"),
        (["--infercore-backend", "toy", "-k", "DEC-20-"], 1, "no law was run"),
    ],
)
def test_pytest_that_tries_nothing_fails(
    site: Path, arguments: list[str], code: int, text: str
) -> None:
    done = run_pytest(site, *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert text in done.stdout + done.stderr


MARKED = """
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        if "{some}" in item.name:
            item.add_marker(pytest.mark.{mark}(reason="somebody's conftest"))
"""


@pytest.mark.parametrize(
    ("mark", "some", "text"),
    [
        ("xfail", "DEC", "toy: failed ("),
        ("skip", "DEC", "no law was run"),
        ("skip", "DEC-3-", "the whole suite is required"),
    ],
)
def test_marks_of_a_conftest_turn_nothing_green(
    site: Path, monkeypatch: pytest.MonkeyPatch, mark: str, some: str, text: str
) -> None:
    announced(site, monkeypatch, known={"DEC-2": "engine: it is said to fail"})
    (site / "conftest.py").write_text(MARKED.format(mark=mark, some=some), encoding="utf-8")
    required = ("--infercore-require", "suite") if "suite" in text else ()
    selected = ("--infercore-backend", "toy", "-k", "DEC-2- or DEC-3-")
    done = run_pytest(site, "-p", "conftest", *selected, *required)
    assert done.returncode == 1, done.stdout + done.stderr
    assert text in done.stdout


def test_workers_of_xdist_are_refused() -> None:
    class Config:
        workerinput: ClassVar[dict[str, str]] = {}

    with pytest.raises(pytest.fail.Exception, match="one process"):
        plugin._find(Config())


def test_the_pytest_plugin_is_light() -> None:
    code = (
        "import sys, infercore.conformance.plugin\n"
        "heavy = {'numpy', 'llama_cpp', 'openvino', 'infercore.conformance.laws'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def cli(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["conformance", *arguments])


def test_from_the_command_line(site: Path) -> None:
    json_file, markdown = site / "found.json", site / "found.md"
    done = cli("toy", "--only", "DEC-*", "--json", str(json_file), "--markdown", str(markdown))
    assert done.exit_code == 0, done.output
    assert "toy: passed (" in done.output
    assert re.search(r"DEC-1\b.*ok", done.output)
    value = json.loads(json_file.read_text())
    assert value["passed"]
    assert value["counts"]["ok"] + value["counts"]["n/a"] == len(select("DEC-*"))
    assert "| DEC-1 |" in markdown.read_text()
    for name in ("infercore", "suite", "engine", "python"):
        assert value["versions"][name] in markdown.read_text()
    for name in ("digest", "encoder digest", "adapter digest"):
        assert len(value["model"][name]) == 64
        assert value["model"][name] in markdown.read_text()
    assert value["seed"] == 0
    assert "| seed | 0 |" in markdown.read_text()
    printed = json.loads(cli("toy", "--only", "DEC-2", "--json", "-").stdout)
    assert printed["results"][0]["id"] == "DEC-2"  # as in a file


def test_an_encoder_in_place_of_the_model(site: Path) -> None:
    cli("toy", "--only", "DEC-2")  # writes the toy's files
    done = cli("toy", "--model", str(site / "encoder.json"))
    assert done.exit_code == 0, done.output
    assert re.search(r"toy: passed \(\d\d ok, \d+ n/a\)", done.output)
    done = run_pytest(
        site, "--infercore-backend", "toy", "--infercore-model", str(site / "encoder.json")
    )
    assert done.returncode == 0, done.stdout
    assert "about generating text" in done.stdout


def test_exit_codes(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli().exit_code == 2
    assert cli("nobody").exit_code == 1
    assert cli("toy", "--only", "NONE").exit_code == 1
    assert cli("toy", "--only", "DEC-20").exit_code == 1
    announced(site, monkeypatch, known={"DEC-2": "engine: it is said to fail"})
    failed = cli("toy", "--only", "DEC-2")
    assert failed.exit_code == 1
    assert "DEC-2 FAIL" in failed.output
    assert failed.stderr.startswith("toy DEC-2 failed: ")  # at once, where there is no bar


@pytest.mark.usefixtures("site")
def test_no_law_is_run_before_all_backends_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def noted(rig: Any, **_: Any) -> None:
        ran.append(rig.label)

    monkeypatch.setattr("infercore.conformance.check_backend", noted, raising=False)
    assert cli("toy", "nobody", "--only", "DEC-2").exit_code == 1
    assert ran == []


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("option", ["--json", "--markdown"])
def test_a_file_that_cannot_be_written_is_refused_before_a_law_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr("infercore.conformance.check_backend", pytest.fail, raising=False)
    done = cli("toy", "--only", "DEC-2", option, str(tmp_path / "nowhere" / "found"))
    assert done.exit_code == 2
    assert re.search(rf"'{option}': .*found cannot be written: No such file", done.stderr)
    assert cli("toy", "--only", "NONE", option, str(tmp_path / "found")).exit_code == 1
    assert not (tmp_path / "found").exists()  # what was asked for is not begun


@pytest.mark.usefixtures("site")
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
def test_results_are_printed_also_where_they_cannot_be_written() -> None:
    done = cli("toy", "--only", "DEC-2", "--json", "/dev/full")
    assert done.exit_code == 1
    assert "No space left on device" in done.stderr
    assert "toy: passed (1 ok)" in done.stdout


def test_a_run_that_cannot_begin_shows_what_the_plugin_raised(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: Any) -> None:
        raise ValueError("shapes do not match")

    cli("toy", "--only", "DEC-2")  # writes the toy's files
    monkeypatch.setattr(FullModel, "__init__", made)
    done = cli("toy", "--only", "DEC-2")
    assert done.exit_code == 1
    assert re.search(r"behind it: ValueError: shapes do not match \(.+, line \d+, in", done.output)
    assert "error: backend 'toy' could not load" in done.output


def test_two_backends_beside_each_other(site: Path) -> None:
    pack.need_pack()
    del site
    done = cli("toy", "reference", "--only", "DEC-2")
    assert done.exit_code == 0, done.output
    assert "reference: passed (1 ok)" in done.output


def test_any_rig_has_a_variant_with_the_sessions_of_a_pool() -> None:
    rig = find_rig("reference-pool")
    assert (rig.label, rig.in_pool, rig.child) == ("reference-pool", True, ("reference-pool", None))
    assert not find_rig("reference").in_pool


@pytest.mark.skipif(os.name != "posix", reason="isolation needs POSIX")
def test_any_rig_has_a_variant_whose_engine_is_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pack.need_pack()
    monkeypatch.setattr(sys, "path", [*sys.path])  # where the reference is announced
    rig = find_rig("reference-isolated")
    assert (rig.label, rig.in_pool, rig.isolated) == ("reference-isolated", True, True)
    laws = ["DEC-2", "STREAM-1", "STREAM-17", "POOL-15", "POOL-38"]
    found = {law.id: law.outcome for law in check_backend(rig, only=laws).results}
    assert found == {
        "DEC-2": "n/a", "STREAM-1": "ok", "STREAM-17": "refused", "POOL-15": "ok", "POOL-38": "n/a",
    }  # fmt: skip
    monkeypatch.undo()
    default_registry().refresh()
