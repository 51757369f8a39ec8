"""A rig with another model in place of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conformance.full_toy import toy_rig
from infercore.conformance import check_backend, reference
from infercore.conformance.render import summary
from infercore.conformance.rigs import at

if TYPE_CHECKING:
    from pathlib import Path


def test_an_encoder_keeps_the_laws_about_encoders(tmp_path: Path) -> None:
    rig = toy_rig(tmp_path / "model.json")
    other = at(rig, str(tmp_path / "encoder.json"))
    assert (other.is_encoder, other.adapter, other.model_name) == (True, None, None)
    report = check_backend(other)
    assert report.passed, report.failures
    outcomes = {found.id: found.outcome for found in report.results}
    assert {name for name, outcome in outcomes.items() if outcome == "ok"} >= {
        "ENC-1", "ENC-10", "LIFE-1", "CAP-3", "CAP-4", "BAD-10",
    }  # fmt: skip
    assert outcomes["KV-1"] == "n/a"
    assert report.counts["refused"] == 0
    assert report.model["digest"] == report.model["encoder digest"]


def test_an_encoder_of_a_known_name_has_an_oracle() -> None:
    rig = reference.rig()
    other = at(rig, str(rig.encoder))
    report = check_backend(other, only=["CAP-2", "ENC-12"])
    assert report.counts["ok"] == 2
    assert "oracle: reference" in summary(report)
    assert at(rig, str(other.path)).encoder_name == other.encoder_name


def test_another_model_in_place_of_the_rig_s_own(tmp_path: Path) -> None:
    rig = toy_rig(tmp_path / "model.json")
    other = at(rig, str(tmp_path / "model.json"))
    assert (other.is_encoder, other.adapter, other.encoder) == (False, None, rig.encoder)
    found = check_backend(other, only=["LORA-1", "ENC-2"])
    assert [result.outcome for result in found.results] == ["ok", "n/a"]
    assert "no adapter" in str(found.results[1].reason)


def test_another_model_needs_nothing_that_went_with_the_rig_s_own(tmp_path: Path) -> None:
    brought = ("adapters", "oracle", "adapter")
    rig = toy_rig(
        tmp_path / "model.json", model_name="storyteller", require=(*brought, "observe", "encoder")
    )
    other = at(rig, str(tmp_path / "model.json"))
    assert other.require == ("observe", "encoder")
    report = check_backend(other, only="TOK-1")
    assert report.passed, report.problems
    assert "NO ORACLE; without adapter" in summary(report)
    asked = check_backend(other, only="TOK-1", require=["oracle", "adapter"])
    assert asked.problems == ("oracle is required and missing", "adapter is required and missing")
    rig.require = ("observe", "encoder", "kv_remove_any", "native.seed")
    assert at(rig, str(tmp_path / "encoder.json")).require == ("observe", "encoder")
