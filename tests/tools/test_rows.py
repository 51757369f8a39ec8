"""The coverage page says what running its rows shows, and no row holds without an assertion."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import attrs
import pytest

import infercore as ic
import pack

if TYPE_CHECKING:
    from types import ModuleType

TOOLS = Path(__file__).parents[2] / "tools"
NAMES = re.compile(r"`([A-Za-z]\w*(?:\.\w+)?)`")
OWN_FIELDS = {"adapters", "on_oom", "n_ctx_min", "backend_options", "precision"}


@pytest.fixture(scope="module")
def run_rows() -> Any:
    pack.need_pack()
    sys.path.insert(0, str(TOOLS))
    try:
        import run_rows
    finally:
        sys.path.remove(str(TOOLS))
    return run_rows


def rows(run_rows: ModuleType) -> list[Any]:
    return [row for section in run_rows.SECTIONS for row in section.rows]


def test_the_page_says_what_running_shows(run_rows: ModuleType, backend_name: str) -> None:
    found, failed = run_rows.run(backend_name)
    assert failed == 0
    said = run_rows.written(run_rows.PAGE.read_text(encoding="utf-8"), backend_name)
    assert kinds(said) == kinds(found), "run: python tools/run_rows.py"


def kinds(outcomes: dict[Any, str]) -> dict[Any, str]:
    """Leave out what depends on the machine: reasons, and whether it computes in bf16."""
    return {row: told.partition(":")[0] for row, told in outcomes.items() if "bf16" not in row[1]}


def is_there(name: str) -> bool:
    first, _, attribute = name.partition(".")
    home = getattr(ic, first, None)
    if home is None or not attribute:
        return home is not None
    return hasattr(home, attribute) or (
        attrs.has(home) and attribute in {field.name for field in attrs.fields(home)}
    )


def test_each_name_is_there(run_rows: ModuleType) -> None:
    missing = [
        row.here
        for row in rows(run_rows)
        if not NAMES.findall(row.here) or not all(map(is_there, NAMES.findall(row.here)))
    ]
    assert missing == []


def test_no_statement_comes_twice(run_rows: ModuleType) -> None:
    for section in run_rows.SECTIONS:
        there = [row.there for row in section.rows]
        assert len(set(there)) == len(there)


def test_every_field_of_a_context_has_a_row(run_rows: ModuleType) -> None:
    fields = {field.name for field in attrs.fields(ic.ContextConfig)} - OWN_FIELDS
    named = {row.here.strip("`") for row in run_rows.fields.FIELDS.rows}
    assert {field for field in fields if f"ContextConfig.{field}" not in named} == set()


def hollow(*, says: bool) -> Any:
    """Return a bench where every call works, answers nothing, and is true or false throughout."""
    import infercore_models

    bench = MagicMock()
    bench.backend, bench.exact, bench.tokens = "hollow", {}, [1, 2, 3, 4, 5]
    bench.path, bench.golden = Path("no-such-model"), infercore_models.golden("storyteller")
    for mock in (bench.model, bench.context(), bench.session(), bench.pool(), bench.held()):
        mock.__bool__.return_value = says
    return bench


def test_no_row_holds_on_an_engine_that_does_nothing(
    run_rows: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infercore.testing.engine_of", lambda context: context)
    empty = []
    for row in rows(run_rows):
        held = []
        for says in (True, False):
            try:
                row.check(hollow(says=says))
            except Exception:  # noqa: BLE001  (what an assertion raises, whatever it is)
                break
            held.append(says)
        if len(held) == 2:
            empty.append(row.there)
    assert not empty, empty


def test_a_row_that_fails_is_no_row_that_holds(run_rows: ModuleType, backend_name: str) -> None:
    from rows.bench import Bench, Row, outcome

    def wrong(bench: Any) -> None:
        assert bench.context().n_ctx == 255

    def refuses(_: Any) -> None:
        raise ic.UnsupportedFeatureError(feature="x", backend=backend_name, hint="give y")

    with Bench(backend_name) as bench:
        with pytest.raises(AssertionError):
            outcome(Row("", "", wrong), bench)
        assert outcome(Row("", "", refuses), bench) == "refused: give y"
        bench.last_row = lambda: bench._plain + 1
        with pytest.raises(AssertionError, match="after a refusal"):
            outcome(Row("", "", refuses), bench)
