"""The page on the seeds: no row is empty, each name and each test it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import attrs
import pytest

import infercore as ic
import pack
from infercore.conformance import laws
from infercore.testing import load_reference_model

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "seed-coverage.md"
PEERS = ROOT / "docs" / "reference" / "peer-coverage.md"
SECTIONS = 4
COLUMNS = 6
TESTS = re.compile(r"^`(tests/[\w/]+\.py)::(test_\w+)`$")
LAW = re.compile(r"^law `([A-Z]+-\d+)`$")
NAMES = re.compile(r"`([A-Za-z]\w*(?:\.\w+)?)`")
OWN_FIELDS = {"adapters", "on_oom", "n_ctx_min", "backend_options", "precision"}

if not PAGE.is_file():
    pytest.skip("the page is not beside these tests", allow_module_level=True)


def peers() -> list[list[str]]:
    """Return the rows of what peers test, in cells."""
    lines = [line for line in PEERS.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines[2:]]


def test_what_peers_test_is_there() -> None:
    rows = peers()
    assert len(rows) >= 20
    assert [row for row in rows if len(row) != COLUMNS - 1 or not all(row)] == []
    assert [row[1] for row in rows if not all(map(is_there, NAMES.findall(row[1])))] == []
    places = [found.groups() if (found := TESTS.match(row[4])) else (row[4], "") for row in rows]
    assert [place for place in places if place[1] not in names_in(place[0])] == []


def tables() -> list[list[list[str]]]:
    """Return the rows of each section's table, in cells."""
    found = []
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        lines = [line for line in section.splitlines() if line.startswith("|")]
        found.append([[c.strip() for c in line.strip("|").split("|")] for line in lines[2:]])
    return found


ROWS = [row for table in tables() for row in table]


def test_each_seed_has_its_table() -> None:
    assert len(tables()) == SECTIONS
    assert all(len(table) >= 10 for table in tables())


def test_no_cell_is_empty() -> None:
    assert [row for row in ROWS if len(row) != COLUMNS or not all(row)] == []


def test_each_name_is_there() -> None:
    missing = []
    for row in ROWS:
        names = NAMES.findall(row[1])
        missing += [name for name in names if not is_there(name)] if names else [row[1]]
    assert missing == []


def is_there(name: str) -> bool:
    first, _, attribute = name.partition(".")
    home = getattr(ic, first, None)
    if home is None or not attribute:
        return home is not None
    if attrs.has(home):
        fields = {field.name for field in attrs.fields(home)}
        return attribute in fields or hasattr(home, attribute)
    return hasattr(home, attribute)


def test_each_test_is_there() -> None:
    named = {row[5] for row in ROWS if not LAW.match(row[5])}
    places = [found.groups() if (found := TESTS.match(name)) else (name, "") for name in named]
    assert [place for place in places if place[1] not in names_in(place[0])] == []


def test_each_law_is_there() -> None:
    named = {found[1] for row in ROWS if (found := LAW.match(row[5]))}
    assert named <= {law.id for law in laws()}


def names_in(file: str) -> set[str]:
    path = ROOT / file
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("section", ["mullama", "llama_init_from_model"])
def test_every_field_of_a_context_has_a_row(section: str) -> None:
    text = next(t for t in PAGE.read_text(encoding="utf-8").split("\n## ") if section in t[:60])
    fields = {field.name for field in attrs.fields(ic.ContextConfig)} - OWN_FIELDS
    assert len(fields) == 26
    assert {f for f in fields if f"`ContextConfig.{f}`" not in text} == set()


NOT_DEFAULT = {
    "n_threads": 2,
    "n_threads_batch": 2,
    "yarn_ext_factor": 0.5,
    "yarn_attn_factor": 0.8,
    "yarn_beta_fast": 16.0,
    "yarn_beta_slow": 2.0,
    "yarn_orig_ctx": 256,
    "rope_freq_base": 5000.0,
    "rope_freq_scale": 0.5,
    "no_perf": True,
    "embeddings": True,
    "n_batch": 32,
    "n_ubatch": 16,
    "n_seq_max": 3,
}
PLAIN = {"yes", "refused"}


@pytest.mark.parametrize("field", NOT_DEFAULT)
def test_what_the_page_says_of_the_reference_is_so(field: str) -> None:
    """Of the engines `tests/behaviour/test_config_fields.py` tries every field."""
    pack.need_pack()
    cells = {row[4] for row in ROWS if f"`ContextConfig.{field}`" in row[1]} & PLAIN
    with load_reference_model() as model:
        try:
            model.new_context(n_ctx=64, **{field: NOT_DEFAULT[field]}).close()
        except ic.UnsupportedFeatureError:
            assert cells == {"refused"}
        else:
            assert cells <= {"yes"}
