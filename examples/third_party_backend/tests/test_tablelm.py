"""The backend as its users meet it, and the whole conformance suite."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003  (a fixture says it)

import pytest

import infercore
from infercore.conformance import check_backend
from infercore_tablelm.conformance import MODEL, rig
from infercore_tablelm.making import count


def test_every_law_is_kept() -> None:
    report = check_backend(rig())
    assert [(r.id, r.reason) for r in report.results if r.outcome == "FAIL"] == []
    assert report.passed


def test_it_is_chosen_for_its_files_and_tells_its_story() -> None:
    with infercore.open_session(MODEL) as session:
        assert session.generate("the villag", max_tokens=1, temperature=0) == "e"


def test_a_table_of_one_s_own(tmp_path: Path) -> None:
    path = tmp_path / "own.tablelm.json"
    path.write_text(json.dumps(count("abcabcabc")))
    with infercore.open_session(path) as session:
        assert session.generate("ab", max_tokens=4, temperature=0) == "cabc"


def test_what_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "own.tablelm.json"
    path.write_text("{}")
    with pytest.raises(infercore.ModelFormatError, match="no table"):
        infercore.load_model(path)
