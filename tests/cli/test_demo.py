"""``infercore demo`` tells the story with each backend and compares."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def test_same_story_on_two_backends(run, machine, model_pack) -> None:
    machine.add("one")
    machine.add("two", formats=("openvino",))
    result = run("demo")
    assert result.exit_code == 0
    assert result.stdout.count("Once more.") == 4
    rows = [line for line in result.stdout.splitlines() if "│" in line]
    assert sum("same" in row for row in rows) == 4
    assert [path.split("/")[-1] for path in machine.paths] == ["gguf-f32", "openvino"]


def test_counts_and_settings(run, machine, model_pack) -> None:
    machine.add("one")
    told = json.loads(run("demo", "--json", "--max-tokens", "1").stdout)
    assert told["same_text"] is None
    cold, warm = told["runs"][0]["turns"]
    assert (cold["reused_tokens"], cold["prefilled_tokens"]) == (0, 640)
    assert (warm["reused_tokens"], warm["prefilled_tokens"]) == (600, 40)
    assert (warm["text"], warm["completion_tokens"]) == ("Once ", 1)
    assert warm["finish_reason"] == "length"
    assert warm["first_text_ms"] >= 0
    model = machine.models["one"]
    exact = {
        "n_ctx": 1024,
        "precision": "accurate",
        "flash_attn": "off",
        "type_k": "f32",
        "type_v": "f32",
    }
    assert model.contexts == [exact, exact]
    assert model.closed
    assert all(session.closed for session in model.sessions)


def test_texts_that_differ(run, machine, model_pack) -> None:
    machine.add("one")
    machine.add("two", story=("Twice ", "more."))
    result = run("demo")
    assert result.exit_code == 1
    assert "DIFFERS" in result.stdout
    assert result.stderr == "error: the backends' texts differ\n"
    assert json.loads(run("demo", "--json").stdout)["same_text"] is False


def test_no_backend(run, machine, model_pack) -> None:
    result = run("demo")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: no backend can be used here; llamacpp: not installed")
    assert "pip install ./plugins/openvino" in result.stderr


def test_unusable_backends_are_told_and_left_out(run, machine, model_pack) -> None:
    machine.add("one")
    machine.add("sick", available=False, reason="no AVX")
    result = run("demo")
    assert result.exit_code == 0
    assert "left out: sick: no AVX" in result.stdout
    assert "only one" in result.stdout


def test_named_backend_only(run, machine, model_pack) -> None:
    machine.add("one")
    machine.add("two")
    result = run("demo", "--backend", "two", "--backend", "two")
    assert result.exit_code == 0
    assert len(machine.paths) == 1
    assert "one, cold" not in result.stdout


def test_missing_pack(run, machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "infercore_models", None)
    machine.add("one")
    result = run("demo")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "pip install ./models" in result.stderr


def test_backend_of_another_format(run, machine, model_pack) -> None:
    machine.add("one", formats=("onnx",))
    result = run("demo", "--backend", "one")
    assert result.exit_code == 1
    assert "one reads onnx" in result.stderr


def test_backend_of_another_format_is_left_out_unless_named(run, machine, model_pack) -> None:
    machine.add("one")
    machine.add("other", formats=("onnx",))
    result = run("demo")
    assert result.exit_code == 0
    assert "left out: other: reads onnx" in result.stdout
