"""``infercore generate`` writes what the engine gives, from any source of prompts."""

from __future__ import annotations

import json
import os
import signal
from subprocess import PIPE
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from cli.engines import ESCAPE, TIMEOUT_S, terminal
from infercore.cli.app import main

if TYPE_CHECKING:
    from pathlib import Path


MIRA = "Once upon a time there was a baker named Mira"
MORE = ", who lived near the stone bridge."
ENDLESS = ("--ignore-eos", "--overflow", "shift", "--n-ctx", "128")


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def results(text: str) -> list[dict[str, Any]]:
    return [told for told in objects(text) if told["type"] == "result"]


def test_text_goes_to_stdout_alone(run, engine) -> None:
    result = run("generate", *engine.arguments, MIRA, "--max-tokens", "8")
    assert (result.exit_code, result.stdout, result.stderr) == (0, MORE + "\n", "")


def test_sources_of_prompts_in_order(run, reference, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"The road begins at the old mill.\r\n")
    result = run(
        "generate", *reference.arguments, "-n", "1", "--json", MIRA, "-p", "A short tale",
        "--file", str(file),
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    told = results(result.stdout)
    assert [row["number"] for row in told] == [0, 1, 2]
    sizes = [row["suffix"]["resident_tokens"] for row in told]
    import infercore

    with infercore.load_model(reference.path, backend="reference") as model:
        encode = model.tokenizer.encode
        wanted = [MIRA, "A short tale", "The road begins at the old mill."]
        assert sizes == [len(encode(text)) for text in wanted]


def test_answers_to_several_prompts_are_kept_apart(run, reference) -> None:
    options = ("-n", "1", "--temp", "0")
    two = run("generate", *reference.arguments, *options, "Once", "Twice " * 40)
    assert two.stderr.splitlines() == [
        "==> Once <==", "==> Twice Twice Twice Twice Twice Twice Twice Twice Twice ... <==",
    ]  # fmt: skip
    one = run("generate", *reference.arguments, *options, "Once")
    assert (one.stderr, two.stdout[: len(one.stdout)]) == ("", one.stdout)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_prompt_from_a_pipe_without_its_line_end(reference, end) -> None:
    arguments = ["generate", *reference.arguments, "-n", "8"]
    done = CliRunner().invoke(main, arguments, input=MIRA.encode() + end)
    assert (done.exit_code, done.stdout, done.stderr) == (0, MORE + "\n", "")


def test_prefix_is_evaluated_once(run, engine, tmp_path: Path) -> None:
    file = tmp_path / "prefix.txt"
    file.write_text(MIRA + MORE + "\n", encoding="utf-8")
    result = run(
        "generate", *engine.arguments, "--prefix-file", str(file), " Mira", " Tom", "-n", "4",
        "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    first, second = results(result.stdout)
    n_prefix = first["prefix"]["prefix_tokens"]
    assert (first["prefix"]["reused_tokens"], first["prefix"]["prefilled_tokens"]) == (0, n_prefix)
    assert second["prefix"]["reused_tokens"] >= n_prefix - 1 > 10
    assert second["usage"]["cached_tokens"] >= n_prefix - 1


def test_json_lines_hold_the_whole_text(run, engine) -> None:
    result = run("generate", *engine.arguments, MIRA, "-n", "8", "--json", "--logprobs", "2")
    assert result.exit_code == 0, result.stderr
    *chunks, last = objects(result.stdout)
    assert {chunk["type"] for chunk in chunks} == {"chunk"}
    assert "".join(chunk["text"] for chunk in chunks) == last["text"] == MORE
    logprobs = [logprob for chunk in chunks for logprob in chunk["logprobs"]]
    assert len(logprobs) == last["usage"]["completion_tokens"] == 8
    assert all(len(logprob["top"]) == 2 for logprob in logprobs)
    assert (last["type"], last["finish_reason"]) == ("result", "length")
    assert last["first_text_ms"] >= last["usage"]["time_to_first_token_ms"]


def test_stats_stand_on_stderr(run, reference) -> None:
    result = run("generate", *reference.arguments, MIRA, "-n", "8", "--stats", "--seed", "7")
    assert result.stdout == MORE + "\n"
    for part in ("reused 0 of ", "first text ", "8 new tokens", "finish length"):
        assert part in result.stderr
    assert "seed" not in result.stderr  # which changes nothing at temperature 0
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--stop", " near"), (", who lived\n", "stop")),
        (("--choice", " Tom", "--choice", " Greta"), None),
        (("--logit-bias", "15=-inf", "-n", "4"), None),
        (("--max-tokens", "3"), (", who lived\n", "length")),
    ],
)
def test_options_of_a_decode_act(run, reference, options, wanted) -> None:
    if "--choice" in options:
        pytest.importorskip("llguidance", reason="llguidance is not installed")
    result = run("generate", *reference.arguments, MIRA, *options, "--stats")
    assert result.exit_code == 0, result.stderr
    if wanted is not None:
        assert (result.stdout, wanted[1] in result.stderr) == (wanted[0], True)
    elif "--choice" in options:
        assert result.stdout in {" Tom\n", " Greta\n"}
    else:
        assert not result.stdout.startswith(",")


def test_stop_token_and_special_text(run, reference) -> None:
    chat = ("generate", *reference.arguments, "--chat", "Where does Nadia live?")
    assert run(*chat).stdout == "Nadia lives near the grey harbour.\n"
    comma = run("generate", *reference.arguments, MIRA, "--stop-token", "15", "--json")
    assert results(comma.stdout)[0]["finish_reason"] == "stop"
    assert results(comma.stdout)[0]["text"] == ""
    forced = ("generate", *reference.arguments, MIRA, "-n", "2", "--logit-bias", "2=1000")
    assert run(*forced, "--special-text").stdout == "<|im_start|><|im_start|>\n"
    assert run(*forced).stdout == ""


def test_schema_regex_and_grammars(run, reference, tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    schema = tmp_path / "schema.json"
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    wanted = {"type": "object", "properties": {"a": digit}, "required": ["a"]}
    schema.write_text(json.dumps({**wanted, "additionalProperties": False}))
    lark, gbnf = tmp_path / "g.lark", tmp_path / "g.gbnf"
    lark.write_text('start: "x" "y"\n')
    gbnf.write_text('root ::= "x" "z"\n')
    start = ("generate", *reference.arguments, MIRA, "-n", "40")
    assert set(json.loads(run(*start, "--json-schema", str(schema)).stdout)) == {"a"}
    assert run(*start, "--regex", "[0-9]{3}").stdout.strip().isdigit()
    assert run(*start, "--grammar", str(lark)).stdout == "xy\n"
    assert run(*start, "--grammar", str(gbnf)).stdout == "xz\n"
    wrong = run(*start, "--regex", "(")
    assert (wrong.exit_code, wrong.stdout, wrong.stderr.count("\n")) == (1, "", 1)
    assert run(*start, "--json-object", "-n", "200", "--stop", "}").stdout.startswith("{")


def test_guessing_ahead_gives_the_same_text(run, engine) -> None:
    start = ("generate", *engine.arguments, MIRA, "-n", "40", "--json")
    plain = results(run(*start).stdout)[0]
    looked_up = results(run(*start, "--speculative", "--n-draft", "4", "--n-gram", "2").stdout)[0]
    assert looked_up["text"] == plain["text"]
    assert looked_up["usage"]["drafted_tokens"] > 0
    if engine.name != "reference":
        drafted = results(run(*start, "--draft-model", engine.path).stdout)[0]
        assert drafted["text"] == plain["text"]
        assert drafted["usage"]["accepted_tokens"] > 0


def test_chat_with_system_and_template(run, reference, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[-1]['content'] }}{{ tail }}")
    result = run(
        "generate", *reference.arguments, MIRA, "-n", "6", "--template", str(template),
        "--template-var", "tail=, who",
    )  # fmt: skip
    assert (result.stdout, result.stderr) == (" lived near the stone bridge.\n", "")
    chat = ("generate", *reference.arguments, "Where does Nadia live?", "-n", "1", "--json")
    with_system = results(run(*chat, "--system", "You are a storyteller.").stdout)[0]
    without = results(run(*chat, "--chat").stdout)[0]
    assert with_system["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"]


def test_seed_makes_a_random_text_repeatable(run, engine) -> None:
    start = ("generate", *engine.arguments, "A", "--temperature", "2", "--top-k", "0", "--top-p",
             "1", "--min-p", "0", "-n", "30")  # fmt: skip
    one, same, other = (run(*start, "--seed", seed).stdout for seed in ("1", "1", "2"))
    assert one == same != other


def test_overflow_is_a_typed_error_and_can_be_shifted(run, reference) -> None:
    start = ("generate", *reference.arguments, "--n-ctx", "16", MIRA + MORE)
    refused = run(*start)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "--n-ctx" in refused.stderr
    small = ("generate", *reference.arguments, "--n-ctx", "32", "-n", "60", "--ignore-eos", MIRA)
    assert "context" in run(*small, "--stats").stderr
    shifted = run(*small, "--stats", "--overflow", "shift")
    assert shifted.exit_code == 0, shifted.stderr
    assert "60 new tokens" in shifted.stderr
    assert "tokens left out" in shifted.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--prefix", "a", "--system", "b", "c"),
        ("--prefix", "a", "--prefix-file", "b", "c"),
        ("--system", "a", "--system-file", "b", "c"),
        ("--regex", "a", "--choice", "b", "c"),
        ("--logprobs", "1", "c"),
        ("--n-draft", "2", "c"),
        ("--draft-model", "x", "--speculative", "c"),
        ("--temperature", "-1", "c"),
        ("--temperature", "hot", "c"),
        ("--seed", "-4", "c"),
        ("--max-tokens", "0", "c"),
        ("--n-ctx", "-1", "c"),
        ("--option", "key", "c"),
        ("--logit-bias", "x=1", "c"),
        ("--file", "/no/such/file"),
        ("--json-schema", "/no/such/file", "c"),
        ("--flash-attn", "off", "--type-v", "q8_0", "c"),
    ],
)
def test_wrong_command_lines(run, arguments) -> None:
    result = run("generate", "model.gguf", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_schema_that_is_no_json(run, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text("{")
    result = run("generate", "m.gguf", "a", "--json-schema", str(file))
    assert result.exit_code == 2
    assert "is not valid JSON" in result.stderr


def test_input_that_is_not_utf8(reference, tmp_path: Path) -> None:
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"caf\xe9")
    for given in ([], ["--file", str(file)]):
        arguments = ["generate", *reference.arguments, *given]
        done = CliRunner().invoke(main, arguments, input=b"caf\xe9")
        assert (done.exit_code, done.stdout) == (1, "")
        assert "is not UTF-8 (byte 3)" in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="there is no such device here")
def test_input_without_an_end(reference) -> None:
    done = CliRunner().invoke(main, ["generate", *reference.arguments, "--file", "/dev/zero"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "/dev/zero has more than 64 MiB" in done.stderr


def test_options_of_one_engine_reach_it(run, engine) -> None:
    start = ("generate", *engine.arguments, MIRA, "-n", "2")
    unknown = run(*start, "--option", "odd=1")
    assert (unknown.exit_code, "unknown option 'odd'" in unknown.stderr) == (1, True)
    if engine.name == "openvino":
        assert run(*start, "--option", "num_streams=1").exit_code == 0
        refused = run(*start, "--option", "num_streams=0")
        assert (refused.exit_code, "num_streams" in refused.stderr) == (1, True)
    if engine.name == "llamacpp":
        overrides = '--option=kv_overrides={"llama.context_length": 64}'
        refused = run(*start, overrides, "--n-ctx", "0", MIRA * 8)
        assert (refused.exit_code, "window of 64" in refused.stderr) == (1, True)


def test_no_prompt_on_a_terminal_is_wrong_usage(reference) -> None:
    with terminal(reference, "generate", reference.path) as screen:
        screen.wait_for("no prompt; pass one")
        assert screen.end() == 2


def test_ctrl_c_ends_a_generation(engine) -> None:
    start = ("generate", *engine.arguments, *ENDLESS, MIRA)
    with terminal(engine, *start, "--stats") as screen:
        screen.wait_for("stone bridge")
        screen.type("\x03")
        shown = screen.wait_for("finish cancelled")
        assert "Traceback" not in shown
        assert screen.end() == 130


def test_interrupt_in_a_pipe(reference) -> None:
    with reference.start(
        "generate", *reference.arguments, *ENDLESS, MIRA, stdout=PIPE, stderr=PIPE
    ) as child:
        first = child.stdout.read(1)
        child.send_signal(signal.SIGINT)
        rest, errors = child.communicate(timeout=TIMEOUT_S)
    assert (child.returncode, errors) == (130, b"")
    assert (first + rest).decode().startswith(MORE[:1])
    assert rest.endswith(b"\n")


def test_reader_that_leaves_ends_it_quietly(engine) -> None:
    with engine.start(
        "generate", *engine.arguments, *ENDLESS, MIRA, stdout=PIPE, stderr=PIPE
    ) as child:
        assert child.stdout.read(5) == MORE[:5].encode()
        child.stdout.close()
        assert child.wait(TIMEOUT_S) == 141
        assert child.stderr.read() == b""


def test_full_disk_under_stdout(reference) -> None:
    start = ("generate", *reference.arguments, MIRA, "-n", "2")
    with (
        open("/dev/full", "wb") as full,
        reference.start(*start, stdout=full, stderr=PIPE) as child,
    ):
        _, errors = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 1
    assert errors.startswith(b"error: No space left on device")
    assert errors.count(b"\n") == 1


def test_no_escape_codes_in_pipes(engine) -> None:
    done = engine.run("generate", *engine.arguments, MIRA, "-n", "4", "--stats")
    assert done.returncode == 0
    assert ESCAPE.encode() not in done.stdout + done.stderr


def test_colours_on_a_terminal_and_none_with_no_color(reference) -> None:
    start = ("generate", *reference.arguments, MIRA, "-n", "4", "--stats")
    with terminal(reference, *start) as screen:
        assert screen.end() == 0
        assert f"{ESCAPE}[2m[reused" in screen.seen
    with terminal(reference, *start, NO_COLOR="1", TERM="dumb") as screen:
        assert screen.end() == 0
        assert ESCAPE not in screen.seen
        assert "[reused" in screen.seen


def test_control_characters_of_a_model_do_not_steer_a_terminal(reference, tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    grammar = tmp_path / "g.lark"
    grammar.write_text('start: "a\\u001b[31mb"\n')
    start = ("generate", *reference.arguments, MIRA, "--grammar", str(grammar), "-n", "20")
    assert reference.run(*start).stdout == b"a\x1b[31mb\n"
    with terminal(reference, *start) as screen:
        screen.wait_for("a\\x1b[31mb")
        assert screen.end() == 0


def test_utf8_in_a_locale_that_knows_none(reference) -> None:
    done = reference.run(
        "generate", *reference.arguments, "--chat", "-n", "40",
        stdin="What does 山 mean? Whose sign is 🐑?".encode(),
        env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    direct = reference.run("tokenize", reference.path, "--decode", "176 257 242 243",
                           env={"PYTHONIOENCODING": "ascii"})  # fmt: skip
    assert direct.stdout.decode() == "🐑\n"


def test_bars_for_loading_and_a_long_prompt(reference, tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_text("Once upon a time there was a baker named Mira. " * 60, encoding="utf-8")
    start = ("generate", *reference.arguments, "-n", "2", "--file", str(file))
    with terminal(reference, *start, "--n-batch", "1") as screen:
        screen.wait_for("loading hf")
        screen.wait_for("reading the prompt")
        screen.wait_for(" tokens")
        assert screen.end() == 0
        wiped = screen.seen.rindex(f"{ESCAPE}[2K")
        assert "reading the prompt" not in screen.seen[wiped:]
    with terminal(reference, *start, TERM="dumb") as screen:
        assert screen.end() == 0
        assert "reading" not in screen.seen
        assert ESCAPE not in screen.seen
