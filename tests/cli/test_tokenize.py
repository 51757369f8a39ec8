"""``infercore tokenize`` shows ids with their exact bytes, and turns ids into text."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import infercore
from infercore.cli.app import main
from infercore.cli.inspecting import quoted

SHEEP = "Whose sign is 🐑?"


def test_ids_and_bytes(run, engine) -> None:
    start = ("tokenize", engine.path, "--backend", engine.name)
    told = json.loads(run(*start, SHEEP, "--json").stdout)
    with infercore.load_model(engine.path, backend=engine.name) as model:
        assert told["ids"] == model.tokenizer.encode(SHEEP)
        assert told["n_tokens"] == len(told["ids"])
        bare = model.tokenizer.encode(SHEEP, add_special=False)
    pieces = b"".join(bytes.fromhex(row["hex"]) for row in told["tokens"] if not row["control"])
    assert pieces.decode() == SHEEP
    assert run(*start, SHEEP, "--ids").stdout.split() == [str(token) for token in told["ids"]]
    assert run(*start, SHEEP, "--ids", "--no-special").stdout.split() == [str(t) for t in bare]


def test_json_of_no_text_has_no_tokens_rather_than_no_field(run, reference) -> None:
    result = run("tokenize", reference.path, "", "--no-special", "--json")
    assert json.loads(result.stdout) == {"n_tokens": 0, "ids": [], "tokens": []}


def test_table_quotes_what_is_no_text(run, reference) -> None:
    result = run("tokenize", reference.path, SHEEP)
    assert result.exit_code == 0, result.stderr
    for part in ("'<|startoftext|>'", "' sign'", r"b'\xf0'", "11 tokens"):
        assert part in result.stdout


def test_round_trip_over_a_pipe(reference) -> None:
    start = ["tokenize", reference.path]
    ids = CliRunner().invoke(main, [*start, "--ids"], input=SHEEP + "\n").stdout
    text = CliRunner().invoke(main, [*start, "--decode", "--no-special"], input=ids)
    assert (text.exit_code, text.stdout) == (0, SHEEP + "\n")
    whole = json.loads(CliRunner().invoke(main, [*start, "--decode", "--json"], input=ids).stdout)
    assert whole["text"] == "<|startoftext|>" + SHEEP


def test_control_tokens_may_stay_text(run, reference) -> None:
    start = ("tokenize", reference.path, "<|im_end|>", "--ids", "--no-special")
    assert run(*start).stdout.split() == ["3"]
    assert len(run(*start, "--no-parse-special").stdout.split()) > 1


def test_text_from_a_file_as_it_is(run, reference, tmp_path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(b"a\n")
    told = json.loads(run("tokenize", reference.path, "-f", str(file), "--json").stdout)
    assert told["tokens"][-1]["text"] == "\n"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("--decode", "12", "x"), 2),
        (("--decode", "99999"), 1),
        (("--decode", "--", "-1"), 1),
        (("--decode", "--ids", "1"), 2),
        (("--file", "/no/such/file"), 2),
        (("a", "--file", "/no/such/file"), 2),
        (("caf\udce9",), 1),
    ],
)
def test_wrong_input(run, reference, arguments, status) -> None:
    result = run("tokenize", reference.path, *arguments)
    assert (result.exit_code, result.stdout) == (status, "")


def test_quotes_are_safe() -> None:
    assert quoted(b"\x1b[31m") == r"'\x1b[31m'"
    assert quoted(b"\xf0\x9f") == r"b'\xf0\x9f'"
