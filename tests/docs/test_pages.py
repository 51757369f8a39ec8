"""Every block of every page is run, compared, parsed, or exempt by a rule that is counted."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pack
from docs import pages
from docs.running import Run

if TYPE_CHECKING:
    from collections.abc import Mapping

if not pages.DOCS.is_dir():
    pytest.skip("the documentation is not beside these tests", allow_module_level=True)

ENGINES = ("llamacpp", "openvino")
REFERENCE = "reference"
# Pages whose blocks another file of the tests runs; it must name the page.
ELSEWHERE = {
    "docs/tutorial/write-a-backend.md": "tests/conformance/test_tutorial.py",
    "README.md": "tests/docs/test_readme.py",
}
# How many blocks of a page are exempt for a reason that the page gives beside them.
EXEMPT: Mapping[str, int] = {
    "README.md": 4,  # what .ci/run and tests/docs/test_readme.py run
    "docs/benchmarks.md": 1,  # models of gigabytes
    "docs/conformance.md": 1,  # every law on every backend
    "docs/how-to/agents.md": 2,  # an example, run and compared in tests/examples
    "docs/how-to/containers.md": 2,  # a container engine
    "docs/how-to/everyday.md": 1,  # uninstalling
    "docs/how-to/rag.md": 2,  # an example, too
    "docs/how-to/ray.md": 3,  # Ray, and load balancers
    "docs/how-to/conformance-in-ci.md": 1,  # a workflow of a code host
    "docs/how-to/get-a-model.md": 3,  # the network, and conversions of gigabytes
    "docs/how-to/serve.md": 2,  # a server, and a client of it: tests/serve
    "docs/reference/architectures.md": 1,  # models that take other packages to make
    "docs/reference/bite.md": 5,  # a run of many minutes, and what it printed of three backends
}
FORMATS = {**pack.FORMATS, REFERENCE: "hf"}


def places(engine: str) -> dict[str, str]:
    """Return what the names of models on the pages stand for.

    A program's ``pack:storyteller`` is for the engine of this run, where the page is run on each.
    The pack's draft is not there as the reference reads it: the storyteller drafts for itself.
    """
    import infercore_models

    path = infercore_models.path
    engine, *more = engine.split()
    named = "pack:storyteller" if more else str(path("storyteller", FORMATS[engine]))
    draft = {'"pack:storyteller-draft"': f'"{named}"'} if engine == REFERENCE else {}
    return {
        **draft,
        '"pack:storyteller"': f'"{named}"',
        "model.gguf": str(path("storyteller", FORMATS[engine])),
        "model-ir": str(path("storyteller", "openvino")),
        "adapter.gguf": str(path("storyteller-lora", "gguf-f32")),
        "encoder.gguf": str(path("encoder", FORMATS[engine])),
    }


def engines_of(page: str) -> list[str]:
    """Return the engines a page is run on: those it names, else each of ours that is there."""
    named = pages.runs_on(page)
    if named:
        return [" ".join(named)]
    there = [engine for engine in ENGINES if pack.missing(engine) is None]
    needed = [engine for engine in pack.required() if engine in ENGINES]
    found = list(dict.fromkeys([*needed, *there]))
    return found or ([ENGINES[0]] if pages.needs_engine(page) else [REFERENCE])


def cases() -> list[Any]:
    """Return each page that has something to run, with each engine that it is run on."""
    found = []
    for page in pages.pages():
        ways = {block.way for block in pages.blocks(page)}
        if page not in ELSEWHERE and not ways.isdisjoint({"python", "shell", "output", "data"}):
            found += [
                pytest.param(page, engine, id=f"{page}-{engine}") for engine in engines_of(page)
            ]
    return found


@pytest.mark.timeout(900)  # a page may have many commands, each a process of its own
@pytest.mark.parametrize(("page", "engine"), cases())
def test_the_blocks_of_a_page_run(
    page: str,
    engine: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    pack.need_pack()
    environment = {"PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])}
    for name in engine.split():
        if name == REFERENCE:
            environment |= request.getfixturevalue("reference_installed")
        else:
            pack.need_backend(name)
    environment["INFERCORE_CONFIG_DIR"] = str(tmp_path / "config")
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    run = Run(folder, places(engine), environment)
    for block in pages.blocks(page):
        run.do(block)


@pytest.mark.parametrize("page", pages.pages())
def test_no_block_is_left_out(page: str) -> None:
    found = pages.blocks(page)
    assert [block.place for block in found if block.way == "unknown"] == []
    ways = Counter(block.way for block in found)
    assert ways["exempt"] == EXEMPT.get(page, 0)
    assert page in ELSEWHERE or not ways["excerpt"]  # only there it is compared with its file


@pytest.mark.parametrize("page", pages.pages())
def test_an_exemption_has_a_reason(page: str) -> None:
    marked = [block for block in pages.blocks(page) if block.way in {"exempt", "excerpt"}]
    assert [block.place for block in marked if not block.argument.strip()] == []


@pytest.mark.parametrize(("page", "tests"), ELSEWHERE.items())
def test_what_runs_elsewhere_is_run_there(page: str, tests: str) -> None:
    assert Path(page).name in (pages.ROOT / tests).read_text(encoding="utf-8")
