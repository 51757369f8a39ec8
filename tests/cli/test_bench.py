"""``infercore bench``: its figures on the real engines, what it leaves out, and its arithmetic."""

from __future__ import annotations

import json
import socket

import pytest

import pack
from infercore.measuring import machine
from infercore.measuring.parts import PARTS, ids_of, text_of
from infercore.measuring.stats import in_turns, number, ratios, spread

SMALL = ("--threads", "1", "--repeats", "1", "--decode-tokens", "4", "--prefix-tokens", "32,96")
TUNED = (*SMALL[:-1], "96")


def told_by(run, *arguments: str, small: tuple[str, ...] = SMALL) -> dict:
    result = run("bench", *arguments, *small, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_the_largest_window_that_fits(run, backend_name, pack_path) -> None:
    asked = ("--backend", backend_name, "--n-ctx", "fit", "--only", "layer")
    model = told_by(run, str(pack_path), *asked)["model"]
    assert model["n_ctx"] == model["n_ctx_train"]


def test_every_part_has_figures(run, backend_name, pack_path) -> None:
    told = told_by(run, str(pack_path), "--backend", backend_name, "--n-ctx", "256")
    figures = told["figures"]
    assert list(dict.fromkeys(f["part"] for f in figures)) == ["load", *PARTS]
    assert told["left_out"] == {}
    # Freed memory may serve once more; what the layers cost is a difference of two clocks.
    timed = [f for f in figures if f["part"] not in {"memory", "layer"}]
    assert all(figure["value"]["median"] > 0 for figure in timed)
    assert all(figure["value"]["n"] == 1 for figure in figures)
    assert told["model"]["backend"] == backend_name
    assert told["model"]["n_ctx"] == 256
    assert told["context"] == {"n_ctx": 256, "n_threads": 1}
    assert told["versions"]["infercore"]


def test_a_warm_turn_evaluates_its_suffix_alone(run, backend_name, pack_path) -> None:
    told = told_by(run, str(pack_path), "--backend", backend_name, "--only", "first-token")
    notes = {f["name"]: f["note"] for f in told["figures"] if f["part"] == "first-token"}
    assert set(notes) == {f"{kind}, prefix of {n}" for kind in ("cold", "warm") for n in (32, 96)}
    for n in (32, 96):
        reused, evaluated = _counts(notes[f"cold, prefix of {n}"])
        assert reused == 0
        assert evaluated >= n + 30
        reused, evaluated = _counts(notes[f"warm, prefix of {n}"])
        assert reused >= n - 2
        assert evaluated <= 36


def _counts(note: str) -> tuple[int, int]:
    reused, evaluated = (int(part.split()[0]) for part in note.split(", "))
    return reused, evaluated


def test_the_plan_stands_beside_what_is_held(run, backend_name, pack_path) -> None:
    told = told_by(run, str(pack_path), "--backend", backend_name, "--only", "memory")
    values = {f["name"]: f["value"]["median"] for f in told["figures"] if f["part"] == "memory"}
    assert values["resident / planned"] == pytest.approx(values["resident"] / values["planned"])


def test_options_of_the_context_are_honoured(run, backend_name, pack_path) -> None:
    given = ("--backend", backend_name, "--only", "memory", "--only", "state")
    sizes = []
    for kind in ("f16", "f32"):
        told = told_by(run, str(pack_path), *given, "--type-k", kind, "--type-v", kind)
        figures = {f["name"]: f for f in told["figures"]}
        sizes.append((figures["planned"]["value"]["median"], _mebibytes(figures["snapshot"])))
    (planned, saved), (planned_twice, saved_twice) = sizes
    assert planned_twice > planned
    assert saved_twice == pytest.approx(2 * saved, rel=0.5)


def _mebibytes(figure: dict) -> float:
    return float(figure["note"].split()[2])


def test_an_adapter_is_told_in_json(run) -> None:
    pack.need_backend("llamacpp")
    pack.need_pack()
    import infercore_models

    adapter = str(infercore_models.path("storyteller-lora", "gguf-f32"))
    model = str(infercore_models.path("storyteller", "gguf-f32"))
    told = told_by(run, model, "--lora", adapter, "--only", "prefill")
    assert told["context"]["adapters"] == [{"path": adapter, "scale": 1.0}]


def test_only_what_was_asked_for(run, backend_name, pack_path) -> None:
    told = told_by(run, str(pack_path), "--backend", backend_name, "--only", "fork")
    assert {figure["part"] for figure in told["figures"]} == {"load", "fork"}


def test_the_table(run, backend_name, pack_path) -> None:
    given = ("--backend", backend_name, "--only", "prefill", "--only", "first-token")
    result = run("bench", str(pack_path), *given, *SMALL[:-1], "32,5000")
    assert result.exit_code == 0, result.stderr
    assert "tokens/s" in result.stdout
    assert "cold, prefix of 32" in result.stdout
    assert "left out: first-token, prefix of 5000: does not fit a window of 1024" in result.stdout
    assert "the load was" in result.stdout


def test_an_encoder_is_measured_as_far_as_it_goes(run) -> None:
    pack.need_backend("llamacpp")
    pack.need_pack()
    import infercore_models

    told = told_by(run, str(infercore_models.path("encoder", "gguf-f32")))
    assert {figure["part"] for figure in told["figures"]} == {"load", "memory", "prefill"}
    assert set(told["left_out"]) == {"decode", "layer", "first-token", "state", "fork"}
    assert all("infercore.embed" in reason for reason in told["left_out"].values())


@pytest.mark.parametrize(
    "wrong",
    [
        ("--prefix-tokens", "12,x"),
        ("--prefix-tokens", ""),
        ("--prefix-tokens", "0"),
        ("--only", "nothing"),
        ("--repeats", "0"),
        ("--n-ctx", "-1"),
    ],
)
def test_wrong_usage(run, wrong) -> None:
    assert run("bench", "model.gguf", *wrong).exit_code == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--only", "decode"), "--tune excludes --only"),
        (("--suffix-tokens", "32"), "--tune excludes --suffix-tokens"),
        (("--prefix-tokens", "32,96"), "--tune takes one number of --prefix-tokens"),
    ],
)
def test_what_tuning_does_not_measure_is_refused(run, given, said) -> None:
    refused = run("bench", "model.gguf", "--tune", *given)
    assert (refused.exit_code, said in refused.stderr) == (2, True)


def test_no_such_model(run, tmp_path) -> None:
    result = run("bench", str(tmp_path / "none.gguf"))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1


def test_a_window_that_holds_nothing_is_told(run, backend_name, pack_path) -> None:
    told = told_by(run, str(pack_path), "--backend", backend_name, "--n-ctx", "8")
    assert {"decode", "layer", "state", "fork"} <= set(told["left_out"])
    assert all("--n-ctx" in reason for reason in told["left_out"].values())


# -- arithmetic and facts --------------------------------------------------------------------------


def test_spread_and_ratios() -> None:
    found = spread([3.0, 1.0, 2.0])
    assert (found.median, found.low, found.high, found.n) == (2.0, 1.0, 3.0, 3)
    pairs = ratios([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])
    assert (pairs.median, pairs.low, pairs.high) == (2.0, 1.0, 3.0)
    with pytest.raises(ValueError, match="argument 2 is"):
        ratios([1.0, 2.0], [1.0])


def test_all_take_turns_and_each_begins_a_round() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) or name for name in "abc"}
    assert in_turns(runs, 4) == {name: [name] * 4 for name in "abc"}
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (0.5, "0.500"), (1.234, "1.23"), (45.67, "45.7"), (12345.6, "12346")],
)
def test_numbers(value, text) -> None:
    assert number(value) == text


def test_the_machine_has_no_name() -> None:
    facts = machine.machine()
    assert set(facts) == {
        "system", "architecture", "processor", "cpus", "features", "memory_gib", "load_average",
    }  # fmt: skip
    assert socket.gethostname() not in facts.values()
    assert facts["cpus"] >= 1
    assert machine.resident_bytes() > 2**20


@pytest.mark.parametrize("n", [1, 7, 300])
def test_texts_of_a_length(model, n) -> None:
    assert len(ids_of(model.tokenizer, n)) == n
    text = text_of(model.tokenizer, n)
    assert n - 3 <= len(model.tokenizer.encode(text, add_special=False)) <= n + 3
    assert text != text_of(model.tokenizer, n, 1)


def test_other_settings_are_tried_beside_the_defaults(run, backend_name, pack_path) -> None:
    told = told_by(run, str(pack_path), "--backend", backend_name, "--tune", small=TUNED)
    assert told["tried"]
    tried = [each["fields"] for each in told["tried"]]
    assert all(each["prefill"]["median"] > 0 < each["decode"]["median"] for each in told["tried"])
    assert "--precision fast" in told["refused"]
    assert not any("n_threads" in fields for fields in tried)  # given, so not tried


def test_other_settings_are_tried_in_the_window_that_is_given(run, backend_name, pack_path) -> None:
    options = (str(pack_path), "--backend", backend_name, "--tune", "--n-ctx")
    told = told_by(run, *options, "80", small=TUNED)
    assert told["tried"]
    assert not [why for why in told["refused"].values() if "exceed" in why]
    assert "too small to measure in" in run("bench", *options, "64", "--threads", "1").output
