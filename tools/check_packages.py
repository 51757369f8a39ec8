"""Builds all five distributions in an empty folder, and uses them as one who has nothing else.

    python tools/check_packages.py [--without-tests] [--work FOLDER]

Needs ``build`` and ``twine`` (``pip install ".[package]"``). Each distribution is built as a source
distribution, and its wheel from that; what is in both is compared with the sources. The wheels
are installed in a new virtual environment and tried there; the tests of the core run from its
source distribution. Without a wheel of llama-cpp-python in pip's cache, pip compiles it: then this
takes five minutes more. Ends with the first thing that is wrong.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "infercore": ".",
    "infercore_models": "models",
    "infercore_llamacpp": "plugins/llamacpp",
    "infercore_openvino": "plugins/openvino",
    "infercore_ray": "integrations/ray",
}
IN_EVERY_SDIST = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"}
OF_THE_CORE = ("src", "tests", "docs", "examples", "benchmarks", "tools", "changelog", "deploy")
READ_FILES = (
    "benchmarks", "chat", "docs", "examples", "packaging", "registry", "serve", "tools", "typing",
    "values",
)  # fmt: skip
"""The tests that read files beside them: those show whether a source distribution has all."""
SMOKE = """
import importlib.metadata, infercore
assert importlib.metadata.version("infercore") == infercore.__version__
found = {info.name: info.reason for info in infercore.backends()}
assert found == {"llamacpp": None, "openvino": None}, found
"""
ADVICE = """
from infercore.values import install
assert install.plugin("openvino") == {expected!r}, install.plugin("openvino")
"""
FROM_FILES = "pip install ./plugins/openvino (in a checkout of infercore)"
BY_NAME = "pip install infercore-openvino"


def main() -> None:
    """Build, check, install, try."""
    parser = argparse.ArgumentParser(description="check the five distributions")
    parser.add_argument("--without-tests", action="store_true", help="do not run the core's tests")
    parser.add_argument(
        "--all-tests", action="store_true", help="run all of them, not those that read files"
    )
    parser.add_argument("--work", type=Path, help="an empty folder to work in, which is kept")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(given.work or folder).resolve()
        work.mkdir(parents=True, exist_ok=True)
        dist = build_all(work)
        try_wheels(work, dist)
        if not given.without_tests:
            test_core(work, dist, every=given.all_tests)


def say(what: str) -> None:
    """Print a heading."""
    print(f"== {what}", flush=True)


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command that sees nothing of this checkout. Ends the program where it fails."""
    hidden = ("INFERCORE_", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: os.environ[name] for name in os.environ if not name.startswith(hidden)}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"failed with {done.returncode}: {' '.join(map(str, command))}")


def require(holds: bool, what: str) -> None:  # noqa: FBT001  (what holds or does not)
    """End the program unless ``holds``."""
    if not holds:
        raise SystemExit(what)


def build_all(work: Path) -> Path:
    """Build everything from a copy of the sources; return the folder of what was built."""
    copy, dist = work / "copy", work / "dist"
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", *ignored))
    before = files_of(copy)
    for package, folder in FOLDERS.items():
        say(f"build {package}")
        run(sys.executable, "-m", "build", "--outdir", dist, copy / folder, cwd=work)
        check_sdist(one(dist, f"{package}-*.tar.gz"), copy / folder, package)
        check_wheel(one(dist, f"{package}-*.whl"), copy / folder / "src" / package)
    require(files_of(copy) == before, "building has left something in the sources")
    say("twine check")
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir()), cwd=work)
    return dist


def one(folder: Path, pattern: str) -> Path:
    """Return the one file of that pattern."""
    found = sorted(folder.glob(pattern))
    require(len(found) == 1, f"there should be one {pattern} in {folder}, not {len(found)}")
    return found[0]


def files_of(folder: Path) -> set[str]:
    """Return the files of a folder, relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def check_wheel(wheel: Path, package: Path) -> None:
    """Check that a wheel holds its package and metadata, all of it and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        name, version = wheel.name.split("-")[:2]
        info = f"{name}-{version}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
    expected = {f"{package.name}/{path}" for path in files_of(package)}
    expected |= {f"{info}/{part}" for part in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")}
    extra = names - expected - {f"{info}/entry_points.txt"}
    require(not expected - names, f"{wheel.name} lacks {sorted(expected - names)}")
    require(not extra, f"{wheel.name} should not hold {sorted(extra)}")
    require(f"{package.name}/py.typed" in names, f"{wheel.name} has no py.typed")
    for line in ("License-Expression: MIT", "License-File: LICENSE", "Requires-Python: >=3.10"):
        require(f"\n{line}\n" in metadata, f"{wheel.name} does not say {line}")


def check_sdist(sdist: Path, folder: Path, package: str) -> None:
    """Check that a source distribution is complete, and holds nothing else."""
    with tarfile.open(sdist) as archive:
        members = [member.name for member in archive.getmembers() if member.isfile()]
    names = {name.partition("/")[2] for name in members}
    parts = OF_THE_CORE if package == "infercore" else ("src",)
    expected = {f"{part}/{path}" for part in parts for path in files_of(folder / part)}
    require(not expected - names, f"{sdist.name} lacks {sorted(expected - names)}")
    single = {name for name in names - expected if "/" not in name}
    extra = names - expected - single
    require(not extra, f"{sdist.name} should not hold {sorted(extra)}")
    require(single >= IN_EVERY_SDIST - {".gitignore"}, f"{sdist.name} has only {sorted(single)}")
    more = {"CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md", "tox.ini"}
    more = more if package == "infercore" else set()
    require(single <= IN_EVERY_SDIST | more, f"{sdist.name} holds {sorted(single)}")


def new_environment(folder: Path) -> Path:
    """Make a virtual environment; return the folder of its programs."""
    venv.create(folder, with_pip=True, clear=True, symlinks=os.name != "nt")
    return folder / ("Scripts" if os.name == "nt" else "bin")


def try_wheels(work: Path, dist: Path) -> None:
    """Install the wheels where there is nothing else, and use them."""
    say("install the wheels")
    empty = work / "empty"
    empty.mkdir()
    programs = new_environment(work / "wheels")
    tried = [package for package in FOLDERS if package != "infercore_ray"]  # tox -e ray does
    wheels = [str(one(dist, f"{package}-*.whl")) for package in tried]
    wheels[0] += "[cli,constraints]"
    run(programs / "python", "-m", "pip", "install", "--quiet", *wheels, cwd=empty)
    run(programs / "python", "-m", "pip", "check", cwd=empty)
    run(programs / "python", "-W", "error", "-c", SMOKE, cwd=empty)
    run(programs / "infercore", "backends", cwd=empty)
    say("the demo")
    both = ("--backend", "llamacpp", "--backend", "openvino")
    run(programs / "infercore", "demo", *both, cwd=empty)
    require(not any(empty.iterdir()), "using it has left something in the current folder")
    say("what it advises to install: from files, then by name as from an index")
    run(programs / "python", "-c", ADVICE.format(expected=FROM_FILES), cwd=empty)
    again = ("--quiet", "--no-deps", "--no-index", "--force-reinstall", "--find-links", dist)
    run(programs / "python", "-m", "pip", "install", *again, "infercore", cwd=empty)
    run(programs / "python", "-c", ADVICE.format(expected=BY_NAME), cwd=empty)


def test_core(work: Path, dist: Path, *, every: bool) -> None:
    """Run the core's tests from its source distribution, with no engine: all, or a part."""
    say("the tests of the core, from its source distribution")
    with tarfile.open(one(dist, "infercore-*.tar.gz")) as archive:
        archive.extractall(work / "unpacked", filter="data")
    source = one(work / "unpacked", "infercore-*")
    programs = new_environment(work / "tests")
    models = one(dist, "infercore_models-*.whl")
    wanted = [f"{source}[test,constraints]", str(models)]
    run(programs / "python", "-m", "pip", "install", "--quiet", *wanted, cwd=work)
    # Wrong backends are the same ones wherever the tests run: they have run in the repository.
    parts = ("llamacpp", "openvino", "conformance/test_mutants.py")
    ignored = (f"--ignore=tests/{part}" for part in parts)
    folder = source / "tests"
    single = [f"tests/{path.name}" for path in sorted(folder.glob("test_*.py"))]
    wanted = [] if every else [*(f"tests/{part}" for part in READ_FILES), *single]
    run(programs / "python", "-m", "pytest", "-q", *ignored, *wanted, cwd=source)


if __name__ == "__main__":
    main()
