"""The engines of this project keep every law; the page of results is of today's laws."""

from __future__ import annotations

import re
from pathlib import Path

import attrs

import pack
from infercore.conformance import SUITE_VERSION, laws
from infercore.conformance.laws.bad_input import OPTIONS
from infercore.engine.digest import of_path
from infercore.values.config import ContextConfig

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
N_RIGS = 7
ROW = re.compile(r"^\| ([A-Z]+-\d+) \| (.+)" + r" \| ([^|]+)" * N_RIGS + r" \|$", re.MULTILINE)


def rows() -> dict[str, tuple[str, ...]]:
    return {found[0]: tuple(found[1:]) for found in ROW.findall(PAGE.read_text(encoding="utf-8"))}


def test_the_page_has_every_law_as_it_stands() -> None:
    shown = {identifier: row[0] for identifier, row in rows().items()}
    assert shown == {law.id: law.text for law in laws()}


def test_the_page_is_of_today_s_suite_and_models() -> None:
    page = PAGE.read_text(encoding="utf-8")
    facts = {row[0]: row[1:] for row in map(cells, page.splitlines()) if row}
    assert set(facts["suite"]) == {SUITE_VERSION}
    pack.need_pack()
    import infercore_models

    files = [
        infercore_models.path(name, "gguf-f32") for name in ("storyteller", "recurrent", "sliding")
    ]
    assert facts["digest"][1:4] == [of_path(str(file)) for file in files]
    adapter = infercore_models.path("storyteller-lora", "gguf-f32")
    assert facts["adapter digest"][1] == of_path(str(adapter))
    assert len(set(facts["encoder digest"]) - {""}) == 3


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_every_law_is_run_by_a_backend_of_this_project() -> None:
    never = [name for name, row in rows().items() if not {"ok", "known"} & set(row[1:])]
    assert never == []


def test_no_backend_of_this_project_fails() -> None:
    assert [name for name, row in rows().items() if "FAIL" in row[1:]] == []


OF_OTHER_KINDS = {"DEC-32", "CAP-46", "CAP-48"}
"""Laws about kinds of models that the reference does not read, and options that it lacks."""


def test_the_reference_can_show_every_law() -> None:
    assert {name for name, row in rows().items() if row[1] != "ok"} == OF_OTHER_KINDS


OF_OTHER_LAWS = {
    "n_ctx": "OVER-3",
    "rope_freq_scale": "CAP-23",
    "type_k": "CAP-8",
    "type_v": "CAP-25",
    "adapters": "LORA-5",
    "on_oom": "MEM-4",
    "backend_options": "BAD-19",
    "defrag_thold": "BAD-7",
}
"""Fields of a context that BAD-8 does not try, and the law that does."""


def test_a_law_tries_every_field_of_a_context() -> None:
    fields = {field.name for field in attrs.fields(ContextConfig)}
    assert fields - {*OPTIONS, *OF_OTHER_LAWS} == {"n_ctx_min"}  # which the core alone reads
    assert set(OF_OTHER_LAWS.values()) <= {law.id for law in laws()}
