"""A sample of what ``tools/fuzz.py`` throws at infercore; nothing of it may get through."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUZZ = ROOT / "tools" / "fuzz.py"
SWEEP = ROOT / "tools" / "sweep_calls.py"
TARGETS = sorted(path.stem for path in (ROOT / "tools" / "fuzzing").glob("[a-z]*.py"))
# Cases of each, seconds of the whole in mind; engines that a target cannot do without.
CASES = {
    "templates": 20, "grammars": 60, "schemas": 40, "calls": 90, "walks": 6, "gguf": 60,
    "adapters": 40, "ir": 4,
}  # fmt: skip
NEEDS = {
    "templates": (),
    "snapshots": ("infercore_llamacpp", "infercore_openvino", "infercore_models"),
    "schemas": (),
    "walks": ("infercore_llamacpp", "infercore_openvino", "infercore_models"),
    "calls": ("infercore_models",),
    "gguf": ("infercore_llamacpp", "infercore_models"),
    "grammars": ("infercore_llamacpp", "infercore_models"),
    "ir": ("infercore_openvino", "infercore_models"),
}


def fuzz(*arguments: str, script: Path = FUZZ) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


@pytest.mark.parametrize("name", TARGETS)
def test_a_sample_of_each_target(name: str) -> None:
    for module in NEEDS.get(name, ("infercore_llamacpp", "infercore_models")):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{name} needs {module}")
    done = fuzz(name, "--seed", "13", "--cases", str(CASES.get(name, 10)))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "0 findings" in done.stdout


OWN = """
LIMIT_S = 2.0
BATCH = 10

class Bad:
    def case(self, random):
        import os, time
        from fuzzing import Wrong
        import infercore as ic
        kind = random.choice(KINDS)
        if kind == "kill":
            os.abort()
        if kind == "hang":
            time.sleep(60)
        if kind == "untyped":
            raise KeyError("x")
        if kind == "wrong":
            raise Wrong("two and two is five")
        if kind == "typed":
            raise ic.InvalidInputError("x", field="x")
        return "ok"

def open_target():
    return Bad()
"""


@pytest.mark.parametrize("kind", ["kill", "hang", "untyped", "wrong", "typed", "ok"])
def test_the_command_sees_what_it_is_for(tmp_path: Path, kind: str) -> None:
    (tmp_path / "fuzzing").mkdir()
    for path in (FUZZ, ROOT / "tools" / "fuzzing" / "__init__.py"):
        target = tmp_path / path.relative_to(ROOT / "tools")
        target.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    bad = f"KINDS = [{kind!r}]" + textwrap.dedent(OWN)
    (tmp_path / "fuzzing" / "bad.py").write_text(bad, encoding="utf-8")
    n = 2
    done = fuzz("bad", "--cases", str(n), script=tmp_path / "fuzz.py")
    is_finding = kind not in ("ok", "typed")
    assert done.returncode == int(is_finding), done.stdout + done.stderr
    assert f"{n} cases, {n if is_finding else 0} findings" in done.stdout
    assert (f"{kind}: python tools/fuzz.py bad --seed 0 --only 1" in done.stdout) is is_finding


def test_it_names_its_targets() -> None:
    assert fuzz("--list").stdout.split() == TARGETS


@pytest.mark.parametrize("backend", ["llamacpp", "openvino", "reference"])
def test_a_sample_of_the_sweep_of_odd_calls(backend: str) -> None:
    needed = ("infercore_models", *({f"infercore_{backend}"} - {"infercore_reference"}))
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        pytest.skip(f"it needs {missing}")
    done = fuzz(backend, "--every", "601", script=SWEEP)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "0 findings" in done.stdout


def test_a_grammar_that_llama_cpp_does_not_come_out_of_is_no_finding() -> None:
    """Each way through nested repeats is followed: a token took llama.cpp 47 s here."""
    if importlib.util.find_spec("infercore_llamacpp") is None:
        pytest.skip("it compares with llama.cpp")
    done = fuzz("grammars", "--seed", "26112399", "--only", "1689")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "llama.cpp took more than" in done.stdout
