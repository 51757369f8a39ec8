"""What the pages say is what the code has."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import pack
from infercore import errors

ROOT = Path(__file__).parents[1]
ERRORS = {
    name: error
    for name, error in vars(errors).items()
    if inspect.isclass(error) and issubclass(error, errors.InferCoreError)
}
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| .* \| (.*) \|$", re.MULTILINE)


def test_every_error_is_on_its_page_with_its_builtin_and_state() -> None:
    rows = {row[0]: row for row in ROW.findall((ROOT / "docs" / "errors.md").read_text())}
    assert set(rows) == set(ERRORS) - {"InferCoreError"}
    for name, builtin, state in rows.values():
        assert builtin in {base.__name__ for base in ERRORS[name].__mro__}
        assert ERRORS[name].state_after in state


def test_every_error_is_in_the_tree_of_its_module() -> None:
    tree = str(errors.__doc__).split("state_after", maxsplit=1)[0]
    assert [name for name in ERRORS if not re.search(rf"\b{name}\b", tree)] == []


@pytest.mark.parametrize("which", ["demo", "test"])
def test_readme_has_the_command_in_one_line(which: str) -> None:
    text = (ROOT / "README.md").read_text()
    (command,) = re.findall(rf"<!-- command: {which} -->\n```bash\n(.*?)\n```", text, re.DOTALL)
    assert "\n" not in command
    assert command.startswith("python3 -m venv .venv && ")


@pytest.mark.parametrize("page", ["sessions.md"])
def test_the_examples_of_a_page_run(page: str) -> None:
    pack.need_backend("openvino")
    pack.need_pack()
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": "docs"})  # noqa: S102
