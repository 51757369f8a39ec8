"""Outcomes, selection and reports: what the suite says, and when it is an error."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest

import infercore
from conformance.full_toy import DECLARED, FullContext, toy_rig
from conformance.mutants import around
from infercore.conformance import (
    Law,
    Report,
    Result,
    Rig,
    check_backend,
    find_rig,
    laws,
    run_law,
    select,
)
from infercore.conformance.expect import that
from infercore.conformance.law import GROUPS, HINTS, RELEASES, TIERS
from infercore.conformance.render import json_text, matrix, notes, page, summary, to_mend
from infercore.conformance.requirements import REQUIREMENTS
from infercore.conformance.standing import standing_of
from infercore.conformance.texts import TEXTS
from infercore.errors import InvalidInputError, TransientEngineError, UnsupportedFeatureError
from infercore.values.info import BackendInfo, DeviceInfo

if TYPE_CHECKING:
    from pathlib import Path


def broken(_: Rig) -> None:
    """Says something that does not hold."""
    that(condition=False, text="it does not hold")


def kept(_: Rig) -> None:
    """Says nothing."""


def law(check: Any, **fields: Any) -> Law:
    return Law(**{"id": "DEC-1", "tier": "engine", "check": check, **fields})


def test_every_law_is_stated_and_known() -> None:
    assert len({law.id for law in laws()}) == len(laws())
    assert {law.group for law in laws()} == set(GROUPS.values())
    for found in laws():
        assert found.check.__name__.startswith("check_")
        assert found.text.endswith("."), found.id
        assert found.tier in TIERS
        assert found.needs is None or found.needs in REQUIREMENTS
    numbers = [found.id for found in laws()]
    for prefix in GROUPS:
        own = [int(name.split("-")[1]) for name in numbers if name.startswith(prefix + "-")]
        assert own == list(range(1, len(own) + 1)), prefix


def test_selection() -> None:
    assert [found.id for found in select("DEC-2")] == ["DEC-2"]
    assert {found.group for found in select(["KV-*", "seam"])} == {"KV", "seam"}
    assert {found.tier for found in select("process")} == {"process"}
    assert select() == laws()
    for nothing in ("DEC-999", ["DEC-1", "no group"], [], "", 5, [5], b"DEC-1"):
        with pytest.raises(InvalidInputError):
            select(nothing)


def test_nothing_selected_is_an_error(rig: Rig) -> None:
    with pytest.raises(InvalidInputError):
        check_backend(rig, only=["NONE-*"])


def test_what_is_no_rig_and_no_sequence_of_names_is_refused(rig: Rig) -> None:
    for nobody in (None, "reference"):
        with pytest.raises(InvalidInputError, match="find_rig"):
            check_backend(nobody, only="DEC-2")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="require='oracle'"):
        check_backend(rig, only="DEC-2", require="oracle")


@pytest.mark.parametrize("name", [None, 5, b"reference", ["reference"]])
def test_a_rig_is_found_by_a_name(name: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        find_rig(name)
    assert caught.value.field == "name"


def test_outcomes(rig: Rig) -> None:
    assert run_law(law(kept), rig).outcome == "ok"
    failed = run_law(law(broken), rig)
    assert (failed.outcome, failed.reason) == ("FAIL", "it does not hold")
    left = run_law(law(lambda r: r.leave("no such thing here")), rig)
    assert (left.outcome, left.reason) == ("n/a", "no such thing here")
    crashed = run_law(law(lambda _: 1 / 0), rig)
    assert crashed.outcome == "FAIL"
    assert "ZeroDivisionError" in str(crashed.reason)


def test_a_known_failure_has_its_reason_and_must_fail(tmp_path: Path) -> None:
    rig = toy_rig(tmp_path / "m.json", known={"DEC-1": "engine: it rounds"})
    found = run_law(law(broken), rig)
    assert (found.outcome, found.reason) == ("known", "engine: it rounds")
    passed = run_law(law(kept), rig)
    assert passed.outcome == "FAIL"
    assert "remove the entry" in str(passed.reason)


def test_a_law_itself_can_be_what_is_wrong(tmp_path: Path) -> None:
    rig = toy_rig(tmp_path / "m.json", known={"DEC-1": "suite: asks for what nobody promised"})
    assert run_law(law(broken), rig).outcome == "known"


@pytest.mark.parametrize("reason", ["", "it rounds", "someone: it rounds"])
def test_a_known_failure_needs_an_owner(tmp_path: Path, reason: str) -> None:
    with pytest.raises(InvalidInputError):
        toy_rig(tmp_path / "m.json", known={"DEC-1": reason})


@pytest.mark.parametrize("known", [["DEC-1"], "DEC-1", None, {"DEC-1": None}, {1: 5}])
def test_known_failures_are_a_mapping_to_texts(tmp_path: Path, known: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        toy_rig(tmp_path / "m.json", known=known)
    assert caught.value.field == "known"


def test_a_known_failure_of_no_law(tmp_path: Path) -> None:
    rig = toy_rig(tmp_path / "m.json", known={"DEC-999": "engine: it rounds"})
    with pytest.raises(InvalidInputError, match="DEC-999"):
        check_backend(rig, only="DEC-2")


def test_a_newer_law_only_reports(tmp_path: Path) -> None:
    rig = toy_rig(tmp_path / "m.json", suite_version="1.0")
    assert {found.since for found in laws()} <= set(RELEASES)
    found = run_law(law(broken, since="1.1"), rig)
    assert (found.outcome, found.newer, found.counts_as_failure) == ("FAIL", True, False)
    assert report_of(found, result("ok")).passed
    assert "newer" in notes(report_of(found))[0]


@pytest.mark.parametrize("version", ["first", "0.1", "1.0.0", "9.9"])
def test_a_suite_version_is_one_that_was_released(tmp_path: Path, version: str) -> None:
    with pytest.raises(InvalidInputError, match=RELEASES[0]):
        toy_rig(tmp_path / "m.json", suite_version=version)


def test_newer_laws_that_fail_are_named_in_the_summary(tmp_path: Path) -> None:
    rig = toy_rig(tmp_path / "m.json", suite_version="1.0")
    found = run_law(law(broken, since="1.1"), rig)
    report = attrs.evolve(report_of(found, result("ok")), standing=standing_of(rig, ["suite"]))
    assert "1 laws newer than the pinned suite FAIL: DEC-1" in summary(report)
    assert "the whole suite is required, and newer laws fail" in report.problems


def test_the_suite_s_own_texts_are_always_tried(tmp_path: Path) -> None:
    assert toy_rig(tmp_path / "m.json", texts=()).texts == TEXTS
    assert toy_rig(tmp_path / "m.json", texts=("mine",)).texts == (*TEXTS, "mine")


@pytest.mark.parametrize("tolerance", [25.0, 2.0])
def test_a_tolerance_that_hides_mistakes_fails_the_run(tmp_path: Path, tolerance: float) -> None:
    report = check_backend(toy_rig(tmp_path / "m.json", tolerance=tolerance), only="DEC-2")
    assert report.counts["ok"] == 1
    assert not report.passed
    assert f"the tolerance {tolerance:.3g}" in summary(report)


def test_what_is_missing_is_named_and_can_be_required(tmp_path: Path) -> None:
    rig = toy_rig(tmp_path / "m.json", observe=None, encoder=None)
    report = check_backend(rig, only="DEC-2")
    assert report.passed
    assert "A PART: " in summary(report)
    assert "NO ORACLE; without observe, encoder; refuses " in summary(report)
    for name in ("oracle", "observe", "encoder"):
        report = check_backend(rig, only="DEC-2", require=[name])
        assert report.problems == (f"{name} is required and missing",)
    whole = check_backend(rig, only="DEC-2", require=["suite"])
    assert "laws were not run" in whole.problems[0]
    with pytest.raises(InvalidInputError, match="oracles"):
        check_backend(rig, only="DEC-2", require=["oracles"])


def test_a_capability_that_is_lost_is_not_refused_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = toy_rig(tmp_path / "m.json", require=("kv_shift",))
    assert check_backend(rig, only="KV-13").passed
    monkeypatch.setattr(FullContext, "capabilities", attrs.evolve(DECLARED, kv_shift=False))
    report = check_backend(rig, only=["KV-13", "DEC-2"])
    assert report.problems == ("kv_shift is required and missing",)


def test_an_option_that_is_refused_leaves_its_laws_refused_unless_it_is_required(
    tmp_path: Path,
) -> None:
    def opened(error: Exception) -> Any:
        def check(rig: Rig) -> None:
            rig.fields(n_ubatch=8)
            raise error

        return law(check)

    refused = UnsupportedFeatureError(feature="n_ubatch=8", backend="toy")
    limit = InvalidInputError("too many", field="n_ubatch", value=8, allowed=(1,))
    rig = toy_rig(tmp_path / "m.json")
    for error in (refused, limit):
        found = run_law(opened(error), rig)
        assert (found.outcome, "not honoured: n_ubatch" in str(found.reason)) == ("refused", True)
    other = UnsupportedFeatureError(feature="n_batch=8", backend="toy")  # nobody asked for it
    assert run_law(opened(other), rig).outcome == "FAIL"
    strict = toy_rig(tmp_path / "m.json", require=("n_ubatch",))
    assert run_law(opened(refused), strict).outcome == "FAIL"


def refusing(monkeypatch: pytest.MonkeyPatch, is_refused: Any, field: str) -> None:
    def opened(old: Any, self: Any, config: Any) -> None:
        if is_refused(config):
            raise InvalidInputError("refused", field=field, value=getattr(config, field))
        old(self, config)

    around(monkeypatch, FullContext, "__init__", opened)


def test_what_a_declared_capability_rests_on_may_not_be_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = toy_rig(tmp_path / "m.json", oracle=None)
    refusing(monkeypatch, lambda config: (config.n_seq_max or 1) > 1, "n_seq_max")
    report = check_backend(rig, only=["DEC-11", "DEC-13", "KV-7"])
    assert {found.outcome for found in report.results} == {"FAIL"}
    assert not report.passed


def test_a_limit_beyond_what_a_capability_promises_may_be_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def many(rig: Rig) -> None:
        rig.context(n_seq_max=6, n_ctx=384)

    rig = toy_rig(tmp_path / "m.json")
    refusing(monkeypatch, lambda config: (config.n_seq_max or 1) > 4, "n_seq_max")
    assert run_law(law(many), rig).outcome == "refused"
    strict = toy_rig(tmp_path / "m.json", require=("n_seq_max",))
    assert run_law(law(many), strict).outcome == "FAIL"
    few = attrs.evolve(DECLARED, multi_sequence=False, kv_copy="none")
    monkeypatch.setattr(FullContext, "capabilities", few)
    refusing(monkeypatch, lambda config: (config.n_seq_max or 1) > 1, "n_seq_max")
    assert run_law(law(many), rig).outcome == "refused"


@pytest.mark.parametrize("field", ["embeddings", "pooling_type", "n_threads", "adapters"])
def test_options_that_capabilities_are_read_through_may_not_be_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    rig = toy_rig(tmp_path / "m.json")
    rig.model  # noqa: B018  (it is opened before)

    def asks(rig: Rig) -> None:
        asked: Any = {"embeddings": True, "pooling_type": "mean", "n_threads": 1}
        rig.context(**{field: {**asked, "adapters": rig.adapters_at(1.0)}[field]})

    refusing(monkeypatch, lambda config: getattr(config, field), field)
    assert run_law(law(asks), rig).outcome == "FAIL"


def test_a_sampler_of_its_own_takes_temperatures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = toy_rig(tmp_path / "m.json")

    def refused(self: Any, **fields: Any) -> Any:
        if fields.get("implementation") == "native":
            raise UnsupportedFeatureError(feature="temperature=0.8", backend="toy")
        return self.old_sampler(**fields)

    kind: Any = type(rig.model)
    monkeypatch.setattr(kind, "old_sampler", kind.new_sampler, raising=False)
    monkeypatch.setattr(kind, "new_sampler", refused)
    found = run_law(law(lambda r: r.sampler(temperature=0.8, implementation="native")), rig)
    assert found.outcome == "FAIL"


def test_a_field_that_nobody_can_require_fails(tmp_path: Path) -> None:
    def asks(rig: Rig) -> None:
        rig.fields(n_ctx_min=8)
        raise UnsupportedFeatureError(feature="n_ctx_min", backend="toy")

    assert run_law(law(asks), toy_rig(tmp_path / "m.json")).outcome == "FAIL"


def test_options_that_cannot_be_tried_or_crash_are_not_honoured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = toy_rig(tmp_path / "m.json", adapter=None)
    report = check_backend(rig, only="DEC-2", require=["adapters"])
    assert report.problems == ("adapters is required and missing",)
    assert report.standing is not None
    assert "adapters" not in report.standing.refused  # nobody asked the backend
    strict = toy_rig(tmp_path / "m.json", adapter=None, require=("adapters",))
    found = check_backend(strict, only="CAP-41").results[0]
    assert (found.outcome, "the rig has no adapter" in str(found.reason)) == ("FAIL", True)

    def crashes(*_: Any) -> None:
        raise KeyError

    monkeypatch.setattr(FullContext, "warmup", crashes)
    report = check_backend(toy_rig(tmp_path / "m.json"), only="DEC-2", require=["warmup"])
    assert report.problems == ("warmup is required and missing",)
    strict = toy_rig(tmp_path / "m.json", require=("warmup",))
    found = check_backend(strict, only="CAP-41").results[0]
    assert (found.outcome, "KeyError" in str(found.reason)) == ("FAIL", True)


def test_what_is_refused_is_in_the_summary_and_can_be_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(old: Any, self: Any, config: Any) -> None:
        if config.kv_unified:
            raise UnsupportedFeatureError(feature="kv_unified=True", backend="toy")
        old(self, config)

    rig = toy_rig(tmp_path / "m.json")
    before = check_backend(rig, only="DEC-2")
    around(monkeypatch, FullContext, "__init__", opened)
    report = check_backend(rig, only="DEC-2")
    assert report.standing is not None
    assert before.standing is not None
    assert set(report.standing.refused) - set(before.standing.refused) == {"kv_unified"}
    assert "refuses" in summary(report)
    report = check_backend(rig, only="DEC-2", require=["kv_unified"])
    assert report.problems == ("kv_unified is required and missing",)


def test_failures_come_in_the_order_to_mend_them_one_line_a_cause(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: Any, **__: Any) -> None:
        raise KeyError("name")

    monkeypatch.setattr(FullContext, "decode", decode)
    # What opens a context is part of each run: the rest is told law by law.
    results = [run_law(found, rig) for found in select(["KV-*", "DEC-*"])]
    report = report_of(*results)
    lines = to_mend(report)
    assert "1 causes" in lines[0] or "2 causes" in lines[0]
    assert lines[1].startswith("1. DEC-")
    told = "\n".join(lines)
    assert f"KeyError: 'name' ({__file__}, line " in told
    assert "in decode)" in told
    assert re.search(r"the same cause in \d\d more: DEC-", told)
    assert "--only DEC-" in told
    assert "tokens [" in told


def test_one_line_of_the_plugin_is_one_cause_whatever_it_says() -> None:
    told = ["3 of 4", "17 of 18 (odd)", "none (a, line 9, in b)"]
    place = " (/x/mine.py, line 7, in decode)"
    causes = [f"IndexError: {text}{place}" for text in told]
    results = [
        attrs.evolve(result("FAIL", i), cause=cause) for i, cause in enumerate(causes, start=1)
    ]
    other = attrs.evolve(result("FAIL", 9), cause=causes[0].replace("line 7", "line 8"))
    lines = to_mend(report_of(*results, other))
    assert "(2 causes)" in lines[0]
    assert "   the same cause in 2 more: KV-2, KV-3" in lines


def test_each_cause_says_where_to_look() -> None:
    assert set(HINTS) == set(GROUPS)
    assert any("look at: `seq_remove`" in line for line in to_mend(report_of(result("FAIL"))))


def test_what_the_core_finds_wrong_with_a_plugin_is_one_cause(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    around(monkeypatch, FullContext, "logits", lambda old, self, i: old(self, i)[:9])
    results = [run_law(found, rig) for found in select(["DEC-*", "KV-*", "SAMP-*"])]
    failed = [found for found in results if found.outcome == "FAIL"]
    assert len(failed) > 20
    assert len({found.cause for found in failed}) == 1
    assert "context.logits(i) returned float32[9]" in str(failed[0].cause)


def test_rows_without_a_number_are_for_the_laws_to_find(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    around(
        monkeypatch, FullContext, "logits", lambda old, self, i: old(self, i) * np.float32("nan")
    )
    report = check_backend(rig, only=["DEC-2", "DEC-7"])
    assert report.outcome("DEC-7") == "FAIL"


@pytest.mark.parametrize("name", ["n_ctx", "n_batch", "n_ubatch", "n_seq_max"])
def test_what_effective_lacks_is_named(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def opened(old: Any, self: Any, config: Any) -> None:
        old(self, config)
        if config.n_batch is None:
            self.effective = {key: self.effective[key] for key in self.effective if key != name}

    around(monkeypatch, FullContext, "__init__", opened)
    found = run_law(select("CAP-5")[0], rig)
    assert (found.outcome, found.reason) == (
        "FAIL",
        f"effective lacks {name!r}, where nobody set it",
    )


def test_a_law_is_tried_again_on_an_engine_that_was_busy(rig: Rig) -> None:
    drawn: list[int] = []

    def busy(n_times: int) -> Law:
        def check(rig: Rig) -> None:
            drawn.append(rig.random.randrange(10**9))
            if len(drawn) <= n_times:
                raise TransientEngineError(backend="toy", retry_after=0.0)

        return law(check)

    found = run_law(busy(2), rig)
    assert (found.outcome, len(drawn), len(set(drawn))) == ("ok", 3, 1)
    assert "tried 3 times" in str(found.reason)
    drawn.clear()
    found = run_law(busy(3), rig)
    assert (found.outcome, len(drawn)) == ("FAIL", 3)
    assert "TransientEngineError" in str(found.reason)


@pytest.mark.parametrize("kind", ["npu", "accel"])
def test_the_only_device_may_be_no_processor(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    device = DeviceInfo(name="NPU0", kind=kind, description="something that computes")
    found = BackendInfo(name="toy", available=True, devices=(device,))
    monkeypatch.setattr(infercore, "backends", lambda devices=False: [found])
    for offloads in (False, True):
        kinds = attrs.evolve(DECLARED, gpu_offload=offloads)
        monkeypatch.setattr(FullContext, "capabilities", kinds)
        assert run_law(select("CAP-37")[0], rig).outcome == "ok"


def result(outcome: str, number: int = 1) -> Result:
    return Result(
        id=f"KV-{number}", group="KV", tier="engine", text="A law.", outcome=outcome, reason="why"
    )


def report_of(*results: Result) -> Report:
    return Report(
        backend="toy", seed=0, versions={"suite": "1.0"}, model={"digest": "0"}, capabilities={},
        results=results,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("outcomes", "problem"),
    [
        ([], "no law was selected"),
        (["refused", "refused"], "every law was refused"),
        (["n/a", "n/a"], "no law was run"),
        (["n/a", "refused"], "no law was run"),
    ],
)
def test_a_run_that_tried_nothing_is_an_error(outcomes: list[str], problem: str) -> None:
    report = report_of(*(result(outcome, i) for i, outcome in enumerate(outcomes)))
    assert report.problems == (problem,)
    assert not report.passed
    assert problem in summary(report)


REMOVES = ("KV-*", "STATE-*", "REUSE-*", "SEAM-*", "STREAM-*", "OVER-*", "CANCEL-*")
"""Laws of whatever depends on how much can be removed; of the others one run says the same."""


@pytest.mark.parametrize(
    ("kv_remove", "max_rollback", "only"),
    [("none", 0, None), ("suffix", 0, REMOVES), ("rollback", 2, REMOVES), ("rollback", 9, REMOVES)],
    ids=["nothing", "suffix", "rollback of 2", "rollback of 9"],
)
def test_a_backend_that_can_do_little_passes_by_refusing(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    kv_remove: str,
    max_rollback: int,
    only: tuple[str, ...] | None,
) -> None:
    less = attrs.evolve(
        DECLARED, kv_copy="none", kv_shift=False, kv_divide=False, lora=False, logits_all=False,
        multi_sequence=False, state=False, sequence_state=False, embeddings=False,
        pooling=("none",), live_threads=False, native_sampler=False,
        kv_remove=kv_remove, max_rollback=max_rollback,
    )  # fmt: skip
    monkeypatch.setattr(FullContext, "capabilities", less)
    report = check_backend(rig, only=only)
    assert [(r.id, r.reason) for r in report.results if r.outcome == "FAIL"] == []
    assert report.counts["refused"] > 50
    removes = kv_remove == "suffix" or max_rollback > 6
    assert report.outcome("KV-1") == ("ok" if removes else "refused")


def test_a_backend_without_an_encoder_refuses_to_encode(tmp_path: Path) -> None:
    report = check_backend(toy_rig(tmp_path / "model.json", encoder=None), only="encoders")
    assert {found.outcome for found in report.results} == {"refused"}
    assert report.problems == ("every law was refused",)


def test_reports_as_text(rig: Rig) -> None:
    seen: list[str] = []
    report = check_backend(
        rig, only=["KV-1", "DEC-20"], seed=5, on_result=lambda found: seen.append(found.id)
    )
    assert seen == ["DEC-20", "KV-1"]
    value = json.loads(json_text([report]))
    assert value["backend"] == "toy"
    assert value["seed"] == 5
    assert value["versions"]["suite"]
    assert len(value["model"]["digest"]) == 64
    assert [found["outcome"] for found in value["results"]] == ["n/a", "ok"]
    table = matrix([report, report])
    assert "| KV-1 |" in table
    assert table.splitlines()[-1].endswith("| ok | ok |")
    assert "the model is none of the pack's" in page([report])
    assert summary(report).startswith("toy: passed (1 ok, 1 n/a); A PART: ")
    assert f"tolerance {rig.tolerance:.3g}" in summary(report)
    assert value["standing"]["tolerance"] == rig.tolerance
    assert f"| tolerance | {rig.tolerance:.3g} |" in page([report])


def test_the_seed_chooses_the_texts(rig: Rig) -> None:
    chosen = []
    for seed in (1, 1, 2):
        rig.begin("DEC-1", seed)
        chosen.append(rig.tokens(20))
    assert chosen[0] == chosen[1] != chosen[2]


def test_everything_is_closed_in_the_end(rig: Rig) -> None:
    opened = []

    def check(given: Rig) -> None:
        opened.extend([given.context(), given.session(), given.another_model()])
        given.leave("enough")

    run_law(law(check), rig)
    assert all(thing.closed for thing in opened)
    model = rig.model
    check_backend(rig, only="DEC-2")
    assert model.closed


def test_the_laws_can_be_asked_for_again() -> None:
    source = (
        "import infercore.conformance.laws.kinds, infercore.conformance as suite\n"
        "from infercore.conformance import laws\n"
        "assert suite.laws() == laws() == suite.laws()\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True)
