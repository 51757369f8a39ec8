"""Each script of ``benchmarks/`` runs from end to end, on tiny models and few rounds."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pack

if TYPE_CHECKING:
    from collections.abc import Callable

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
FEW = ("--threads", "1", "--rounds", "1")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

if not SCRIPTS.is_dir():
    pytest.skip("the benchmarks are not beside these tests", allow_module_level=True)


def need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f'{module} is not installed; run: pip install ".[bench]"')


def run_script(name: str, *arguments: str | Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
        env=environment,
    )
    assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the two tiny shapes as GGUF."""
    need("gguf")
    pack.need_backend("llamacpp")
    pack.need_pack()
    folder = tmp_path_factory.mktemp("models")
    for shape in ("tiny", "tiny-hybrid"):
        run_script("make_model.py", folder, "--shape", shape, "--no-ir")
    return folder


@pytest.fixture(scope="session")
def gguf_file(made: Path) -> Path:
    return made / "tiny-q8_0.gguf"


@pytest.fixture(scope="session")
def ir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny shape as an OpenVINO IR."""
    for module in ("gguf", "openvino_genai", "tokenizers"):
        need(module)
    pack.need_backend("openvino")
    pack.need_pack()
    folder = tmp_path_factory.mktemp("ir")
    run_script("make_model.py", folder, "--shape", "tiny")
    return folder / "tiny-ir"


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Return what runs a script and gives the rows that it wrote."""

    def run(name: str, *arguments: str | Path) -> list[dict[str, Any]]:
        target = tmp_path / "result.json"
        run_script(name, *arguments, "--json", target)
        told = json.loads(target.read_text(encoding="utf-8"))
        assert told["command"].startswith(f"python benchmarks/{name} ")
        assert str(tmp_path.parent) not in target.read_text(encoding="utf-8")
        assert all(row["value"]["low"] <= row["value"]["high"] for row in told["rows"])
        return list(told["rows"])

    return run


def contenders(rows: list[dict[str, Any]], figure: str) -> set[str]:
    return {row["by"] for row in rows if row["figure"] == figure}


def test_throughput_of_gguf(results, gguf_file) -> None:
    rows = results("throughput.py", gguf_file, *FEW, "--tokens", "4", "--prefill", "32")
    assert contenders(rows, "prefill of 32") == {"infercore", "ctypes loop", "Llama.eval"}
    assert contenders(rows, "decode of 4 after 64") == {
        "infercore", "infercore session", "ctypes loop",
        "Llama.generate", "Llama.create_completion",
    }  # fmt: skip
    assert not any(row["note"] for row in rows), "other tokens were chosen"


def test_throughput_of_ir(results, ir) -> None:
    rows = results("throughput.py", ir, *FEW, "--tokens", "4", "--prefill", "32")
    found = contenders(rows, "decode of 4 after 64")
    assert found == {
        "infercore", "infercore session", "infercore, accurate",
        "LLMPipeline, alike", "LLMPipeline as it comes",
    }  # fmt: skip
    ratios = contenders(rows, "decode of 4 after 64, ratio")
    assert ratios == {  # what rounds is not compared with what does not
        "infercore / LLMPipeline as it comes",
        "infercore session / LLMPipeline as it comes",
        "infercore, accurate / LLMPipeline, alike",
    }


def test_cpu_time(results, gguf_file, ir) -> None:
    rows = results("cpu_time.py", gguf_file, ir, *FEW, "--tokens", "4", "--prefill", "32")
    assert contenders(rows, "decode of 4") == {
        "infercore", "Llama.generate", "LLMPipeline as it comes",
    }  # fmt: skip
    assert contenders(rows, "prefill of 32, accurate") == {"infercore", "LLMPipeline"}


def test_first_token_of_gguf(results, gguf_file) -> None:
    rows = results("warm_prefix.py", gguf_file, *FEW, "--prefix", "32", "64", "--suffix", "8")
    for kind in ("cold", "warm"):
        assert contenders(rows, f"{kind}, 64 + 8") == {"infercore", "Llama.generate"}


def test_first_token_of_ir(results, ir) -> None:
    rows = results("warm_prefix.py", ir, *FEW, "--prefix", "64", "--suffix", "8")
    assert contenders(rows, "warm, 64 + 8") == {"infercore", "LLMPipeline as it comes"}


def test_first_meeting_of_a_length(results, ir) -> None:
    rows = results("lengths.py", ir, *FEW)
    for figure in ("prefix", "32 tokens after it"):
        assert contenders(rows, figure) == {"unseen length", "the same again"}


SHORT_LOOP = ("--threads", "1", "--turns", "3", "--instructions", "64", "--answer", "6")


@pytest.mark.parametrize(
    ("shape", "variant", "evaluates_less"),
    [("tiny", "edited", False), ("tiny-hybrid", "edited", True), ("tiny-hybrid", "kept", False)],
)
def test_agent_loop(results, made, shape, variant, evaluates_less) -> None:
    """On attention alone both evaluate the same; what cannot be removed is evaluated anew."""
    path = made / f"{shape}-q8_0.gguf"
    rows = results("agent_loop.py", path, *SHORT_LOOP, "--variant", variant)
    notes = {
        row["by"]: int(row["note"].split()[0])
        for row in rows
        if row["figure"] == f"{variant} history, 3 turns, all"
    }
    own, other = notes["infercore"], notes["create_chat_completion"]
    assert (own < other * 0.75) if evaluates_less else (abs(own - other) <= 6)


def test_state(results, gguf_file) -> None:
    rows = results("state.py", gguf_file, *FEW, "--tokens", "64")
    assert {"Session.snapshot", "Session.save, a file", "Llama.save_state"} <= {
        row["by"] for row in rows if row["figure"].startswith("save ")
    }
    assert {"into a free sequence", "into a new context"} == {
        row["by"] for row in rows if row["figure"].startswith("fork ")
    }


def test_state_of_ir(results, ir) -> None:
    assert results("state.py", ir, *FEW, "--tokens", "64")


def test_parallel(results, gguf_file) -> None:
    rows = results("parallel.py", gguf_file, *FEW, "--tokens", "4", "--sequences", "2")
    assert len(contenders(rows, "2 sequences, 4 tokens each")) == 4


def test_parallel_of_ir(results, ir) -> None:
    assert results("parallel.py", ir, *FEW, "--tokens", "4", "--sequences", "2")


FEW_OF_POOL = ("--sessions", "3", "--widths", "2", "--tokens", "4", "--prefix", "48")
POOL_PARTS = {
    "together": "sessions of a pool / the better by hand",
    "few": "auto / turns",
    "resident": "resident / cold",
    "moved": "moved out and back / evaluated again",
    "gap": "its first token / alone",
    "python": "the pool's thread",
    "books": "the slowest",
}


@pytest.mark.parametrize("part", POOL_PARTS)
def test_pool(results, gguf_file, part) -> None:
    more = ("--each", "8", "--before", "0.1")
    rows = results("pool.py", part, gguf_file, *FEW, *FEW_OF_POOL, *more)
    assert POOL_PARTS[part] in {row["by"] for row in rows}


@pytest.mark.parametrize("rival", ["Llama", "LLMPipeline"])
def test_agents_of_a_pool(results, request, rival) -> None:
    path = request.getfixturevalue("gguf_file" if rival == "Llama" else "ir")
    few = ("--sessions", "2", "--turns", "2", "--instructions", "32", "--answer", "4")
    rows = results("pool_rivals.py", "agents", path, "--threads", "1", *few)
    assert f"sessions of a pool / {rival}" in {row["by"] for row in rows}


def test_memory(results, gguf_file) -> None:
    rows = results("memory.py", gguf_file, *FEW, "--n-ctx", "1024")
    held = {row["by"]: row["value"]["median"] for row in rows if row["unit"] == "MiB"}
    assert set(held) == {"plan_memory", "infercore", "Llama"}
    assert min(held.values()) > 1


def test_layer(results) -> None:
    pack.need_backend("llamacpp")
    path = pack.model_path("llamacpp")
    rows = results("decode_overhead.py", path, "--pairs", "2", "--tokens", "8")
    assert contenders(rows, "a token") == {"infercore", "infercore session", "ctypes loop"}


def test_import_time(results) -> None:
    rows = results("import_time.py", "--rounds", "1")
    assert "infercore" in contenders(rows, "import time")


def test_load_cost(results) -> None:
    pack.need_backend("llamacpp")
    rows = results("load_cost.py", pack.model_path("llamacpp"), "--rounds", "1")
    for figure in ("first, load", "first, to a token", "later load"):
        assert contenders(rows, figure) == {"with the check", "without"}


def test_sampling() -> None:
    assert "mask" in run_script("sampling.py", "--vocabulary", "2000", "--steps", "5")


def test_speculative() -> None:
    pack.need_backend("llamacpp")
    pack.need_pack()
    printed = run_script(
        "speculative.py", "--backend", "llamacpp", "--tokens", "16", "--pairs", "1"
    )
    assert "prompt lookup" in printed


def test_run_all_goes_on_where_it_was(made, tmp_path) -> None:
    need("matplotlib")
    for shape in ("0.5b", "0.35b-hybrid", "1b"):  # stand-ins: this part needs none of them
        (tmp_path / f"{shape}-q8_0.gguf").touch()
        (tmp_path / f"{shape}-ir").mkdir()
        (tmp_path / f"{shape}-ir" / "config.json").touch()
    given = ("--models", tmp_path, "--results", tmp_path / "results", "--only", "import-time")
    nowhere = ("--plots", tmp_path / "plots", "--page", tmp_path / "page.md")
    (tmp_path / "page.md").write_text("<!-- results: import-time -->\n<!-- results end -->\n")
    assert "import-time: done" in run_script("run_all.py", *given, "--quick", *nowhere)
    assert "import_time.py" in (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "is there" in run_script("run_all.py", *given, *nowhere)
