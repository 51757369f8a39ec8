"""The engines of this project keep every law; the page of results is of today's laws."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pack
from infercore.conformance import check_backend, find_rig, laws

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
N_RIGS = 4
ROW = re.compile(r"^\| ([A-Z]+-\d+) \| (.+)" + r" \| ([^|]+)" * N_RIGS + r" \|$", re.MULTILINE)
VARIANTS = {"openvino": ("openvino", "openvino-stateful")}


@pytest.mark.slow
def test_an_engine_keeps_every_law(backend_name: str) -> None:
    pack.need_pack()
    for name in VARIANTS.get(backend_name, (backend_name,)):
        report = check_backend(find_rig(name))
        assert [(name, r.id, r.reason) for r in report.failures] == []
        assert report.passed
        assert report.counts["ok"] > 200


def rows() -> dict[str, tuple[str, ...]]:
    return {found[0]: tuple(found[1:]) for found in ROW.findall(PAGE.read_text(encoding="utf-8"))}


def test_the_page_has_every_law_as_it_stands() -> None:
    shown = {identifier: row[0] for identifier, row in rows().items()}
    assert shown == {law.id: law.text for law in laws()}


def test_every_law_is_run_by_a_backend_of_this_project() -> None:
    never = [name for name, row in rows().items() if not {"ok", "known"} & set(row[1:])]
    assert never == []


def test_no_backend_of_this_project_fails() -> None:
    assert [name for name, row in rows().items() if "FAIL" in row[1:]] == []
