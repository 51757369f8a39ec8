"""The examples are documented, short, and written against public names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from test_layers import foreign_imports

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(path for path in EXAMPLES.glob("*.py") if path.name != "default_model.py")
ROW = re.compile(r"^\| \[`(\w+\.py)`\]\((\w+\.py)\) \|", re.MULTILINE)


def test_the_table_names_every_program() -> None:
    rows = ROW.findall((EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(name for name, _ in rows) == [path.name for path in PROGRAMS]
    assert all(name == link for name, link in rows)
    assert len(PROGRAMS) == 12


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_says_what_it_shows_and_prints(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    said = ast.get_docstring(ast.parse(source)) or ""
    for needed in ("\nShows: ", "rints ", f"python examples/{path.name} ["):
        assert needed in said
    assert len(source.splitlines()) <= (120 if path.name == "async_server.py" else 80)
    assert foreign_imports(source) == []


@pytest.mark.parametrize(("page", "name"), [("agents", "agent.py"), ("rag", "rag.py")])
def test_a_page_shows_what_its_example_does(page: str, name: str) -> None:
    path = EXAMPLES.parent / "docs" / "how-to" / f"{page}.md"
    if not path.is_file():
        pytest.skip("the folder docs is not beside these tests")
    (shown,) = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    assert shown in (EXAMPLES / name).read_text(encoding="utf-8")
