"""The suite finds wrong backends: each mutant breaks the laws meant for it, each law has one.

Half of them are tried, the same ones each time; with ``INFERCORE_ALL_MUTANTS=1`` all are.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pack
from conformance import mutants
from conformance.full_toy import FullContext, toy_rig
from conformance.mutants.of_children import HERE
from infercore.conformance import check_backend, find_rig, laws, run_law

if TYPE_CHECKING:
    from infercore.conformance import Rig

MUTANTS = mutants.load_all()
ALL = "INFERCORE_ALL_MUTANTS"


def chosen() -> list[str]:
    """Return the wrong backends to be tried: a sample, the same each time, or all of them."""
    names = sorted(MUTANTS)
    return names if os.environ.get(ALL) else random.Random(11).sample(names, len(names) // 2)


MISTAKES = ("TypeError", "AttributeError", "NameError", "ImportError", "UnboundLocalError")


def rig_of(base: str, folder: Path) -> Rig:
    if base == "toy":
        return toy_rig(folder / "model.json")
    pack.need_pack()
    return find_rig("reference")


@pytest.mark.parametrize("name", chosen())
def test_a_mutant_is_killed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, laws_by_id: dict[str, Any]
) -> None:
    mutant = MUTANTS[name]
    monkeypatch.setenv(HERE, str(tmp_path))
    mutant.change(monkeypatch)
    rig = rig_of(mutant.base, tmp_path)
    for identifier in mutant.kills:
        found = run_law(laws_by_id[identifier], rig)
        assert found.outcome == "FAIL", f"{identifier} is {found.outcome}: {found.reason}"
        assert not str(found.reason).startswith(MISTAKES), f"{identifier}: {found.reason}"


@pytest.mark.parametrize(
    ("name", "in_the_midst"), [("closing_keeps_the_memory", 5), ("more_is_taken_than_planned", 1)]
)
def test_what_others_give_back_hides_nothing(
    name: str,
    in_the_midst: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    laws_by_id: dict[str, Any],
) -> None:
    of_others: list[bytearray] = []
    n_opened = 0

    def opened(old: Any, self: Any, config: Any) -> None:
        nonlocal n_opened
        old(self, config)
        if n_opened == in_the_midst:
            of_others.clear()
        n_opened += 1

    mutants.around(monkeypatch, FullContext, "__init__", opened)
    MUTANTS[name].change(monkeypatch)
    for identifier in MUTANTS[name].kills:
        of_others[:], n_opened = [bytearray(b"x") * 2**28], 0
        found = run_law(laws_by_id[identifier], toy_rig(tmp_path / "model.json"))
        assert not of_others
        assert found.outcome == "FAIL", identifier


def test_what_the_c_library_keeps_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, laws_by_id: dict[str, Any]
) -> None:
    MUTANTS["closing_keeps_the_memory"].change(monkeypatch)
    bytearray(31 * 2**20)  # once such a one was freed, smaller ones are taken from the heap
    taken = [bytearray(100_000) for _ in range(3000)]
    between = taken[199::200]
    del taken  # 20 MB between any two, free and resident
    for identifier in MUTANTS["closing_keeps_the_memory"].kills:
        found = run_law(laws_by_id[identifier], toy_rig(tmp_path / "model.json"))
        assert found.outcome == "FAIL", identifier
    assert between


@pytest.fixture(scope="module")
def laws_by_id() -> dict[str, Any]:
    return {law.id: law for law in laws()}


def test_every_law_kills_a_mutant() -> None:
    killing = {identifier for mutant in MUTANTS.values() for identifier in mutant.kills}
    assert sorted({law.id for law in laws()} - killing) == []
    assert sorted(killing - {law.id for law in laws()}) == []


def test_the_page_names_the_wrong_backend_of_each_class() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "bite.md"
    if not page.is_file():
        pytest.skip("the page is not beside these tests")
    rows = [line.split("|") for line in page.read_text(encoding="utf-8").splitlines()]
    classes = [row for row in rows if len(row) == 5 and "_" in row[3]]
    assert len(classes) >= 25
    for _, _, identifiers, names, _ in classes:
        wrong = [MUTANTS[name] for name in re.findall(r"`(\w+)`", names)]
        meant = set(re.findall(r"[A-Z]+-\d+", identifiers))
        assert meant == meant & {law for mutant in wrong for law in mutant.kills}, names


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 60
    assert len(laws()) >= 120
    assert len({law.id for law in laws()}) == len(laws())


def test_the_toy_that_mutants_are_made_from_keeps_every_law(tmp_path: Path) -> None:
    report = check_backend(toy_rig(tmp_path / "model.json"))
    assert [(r.id, r.reason) for r in report.results if r.outcome == "FAIL"] == []
    left = {r.id for r in report.results if r.outcome == "n/a"}
    assert left == {
        "BAD-16",
        "BAD-18",
        "BAD-19",
        "CAP-35",
        "CAP-36",
        "CAP-38",
        "CAP-39",
        "CAP-41",
        "CAP-42",
        "CAP-43",
        "CAP-45",
        "CAP-46",
        "CAP-47",
        "CAP-48",
        "DEC-34",
        "ENC-17",
        "LORA-12",
        "ENC-12",
        "TOK-20",
        "TOK-22",
        "CAP-19",
        "CAP-21",
        "DEC-20",
        "CAP-22",
        "CAP-23",
        "CAP-24",
        "CAP-25",
        "CAP-26",
        "CAP-29",
        "CAP-30",
        "DEC-26",
        "DEC-27",
        "DEC-32",
        "EMB-11",
        "MEM-7",
        "MEM-13",
        "MEM-14",
        "MEM-15",
        "LORA-11",
        "TOK-16",
        "TOK-18",
        "ENC-8",
        "LORA-2",
        "LORA-10",
        "STATE-23",
        "THREAD-6",
        "THREAD-7",
        "THREAD-14",
    }
