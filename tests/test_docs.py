"""What the pages say is what the code has."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
import sys
from pathlib import Path

import pytest

from infercore import errors

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ERRORS = {
    name: error
    for name, error in vars(errors).items()
    if inspect.isclass(error) and issubclass(error, errors.InferCoreError)
}
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| .* \| (.*) \|$", re.MULTILINE)
IMAGE = re.compile(r"!\[(.*?)\]\((\S+?)\)", re.DOTALL)

if not DOCS.is_dir():
    pytest.skip("the documentation is not beside these tests", allow_module_level=True)


def test_every_error_is_on_its_page_with_its_builtin_and_state() -> None:
    page = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    rows = {row[0]: row for row in ROW.findall(page)}
    assert set(rows) == set(ERRORS) - {"InferCoreError"}
    for name, builtin, state in rows.values():
        assert builtin in {base.__name__ for base in ERRORS[name].__mro__}
        assert ERRORS[name].state_after in state


def test_every_error_is_in_the_tree_of_its_module() -> None:
    tree = str(errors.__doc__).split("state_after", maxsplit=1)[0]
    assert [name for name in ERRORS if not re.search(rf"\b{name}\b", tree)] == []


@pytest.mark.parametrize("which", ["demo", "test"])
def test_readme_has_the_command_in_one_line(which: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(rf"<!-- command: {which} -->\n```bash\n(.*?)\n```", text, re.DOTALL)
    assert "\n" not in command
    assert command.startswith("python3 -m venv .venv && ")


@pytest.mark.parametrize("module", ["infercore", "infercore.testing", "infercore.conformance"])
def test_every_public_name_is_on_a_page_of_the_api(module: str) -> None:
    """The build of the documentation checks their methods and fields as well."""
    pages = sorted((DOCS / "reference" / "api").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    directive = rf":: (?:{re.escape(module)}\.)?(\w+)$"
    named = set(re.findall(directive, text, re.MULTILINE))
    assert set(importlib.import_module(module).__all__) <= named


def test_the_pictures_are_what_the_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    drawn = runpy.run_path(str(DOCS / "diagrams" / "draw.py"))["drawings"]()
    sys.modules.pop("canvas", None)
    there = {
        path.name: path.read_text(encoding="utf-8") for path in (DOCS / "images").glob("*.svg")
    }
    recorded = {"demo.svg", "chat.svg"}  # by tools/record.py: with the times of a run
    assert {name: text for name, text in there.items() if name not in recorded} == drawn


def test_every_picture_is_there_and_is_told_in_words() -> None:
    shown = set()
    for page in DOCS.rglob("*.md"):
        for words, target in IMAGE.findall(page.read_text(encoding="utf-8")):
            assert len(words.split()) >= 5, (
                f"{page.name}: {target} needs words for those who cannot see it"
            )
            assert (page.parent / target).is_file(), f"{page.name}: {target}"
            shown.add(Path(target).name)
    assert {path.name for path in (DOCS / "images").glob("*.svg")} <= shown


def test_every_example_is_in_the_guide() -> None:
    examples = ROOT / "examples"
    if not examples.is_dir():
        pytest.skip("the examples are not beside these tests")
    guide = (DOCS / "how-to" / "index.md").read_text(encoding="utf-8")
    programs = {path.name for path in examples.glob("*.py")} - {"default_model.py"}
    assert set(re.findall(r"`(\w+\.py)`", guide)) == programs
