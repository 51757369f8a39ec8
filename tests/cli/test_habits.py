"""What users of llama-cli, ollama and llm type here without thinking."""

from __future__ import annotations

import json
import os

import click
import pytest
from click.testing import CliRunner

from cli.engines import EXACT, terminal
from cli.test_chat import ANSWER, FELIX, NADIA, talk, told
from infercore.cli.app import main
from infercore.cli.options import as_options

MIRA = "Once upon a time there was a baker named Mira"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.fixture(autouse=True)
def settings_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("INFERCORE_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.delenv("INFERCORE_MODEL", raising=False)


@pytest.fixture
def schema(tmp_path) -> str:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    return str(file)


def test_short_options_of_llama_cli(run, reference) -> None:
    long = run("generate", *reference.arguments, "--n-ctx", "128", "--max-tokens", "5", MIRA)
    short = run(
        "generate", "-m", reference.path, *reference.arguments[1:-2], "-c", "128", "-n", "5", "-s",
        "3", "--temp", "0", MIRA,
    )  # fmt: skip
    assert (short.exit_code, short.stdout) == (0, long.stdout)
    ngl = run("generate", *reference.arguments, "-ngl", "many", MIRA)
    assert (ngl.exit_code, "'many' is not a valid integer" in ngl.stderr) == (2, True)


def test_the_other_names_of_options() -> None:
    names = {opt for param in main.commands["chat"].params for opt in param.opts}
    wanted = {"-m", "-c", "-n", "-s", "-t", "-b", "-ub", "-fa", "-ngl", "-sys", "--temp"}
    wanted |= {"--ctx-size", "--n-predict", "--predict", "--gpu-layers", "--threads"}
    assert wanted - names == set()


def test_text_that_is_piped_goes_before_the_prompt(run, reference) -> None:
    joined = run("generate", *reference.arguments, "-n", "4", f"{MIRA}\n\nThe end.")
    piped = CliRunner().invoke(
        main, ["generate", *reference.arguments, "-n", "4", "The end."], input=MIRA + "\n"
    )
    assert (piped.exit_code, piped.stdout) == (0, joined.stdout)
    assert run("generate", *reference.arguments, "-n", "4", "The end.").stdout != joined.stdout


def test_a_prompt_from_a_file(run, reference, tmp_path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(MIRA + "\n")
    straight = run("generate", *reference.arguments, "-n", "4", MIRA)
    assert run("generate", *reference.arguments, "-n", "4", f"@{file}").stdout == straight.stdout
    gone = run("generate", *reference.arguments, "@nowhere")
    assert (gone.exit_code, "there is no file 'nowhere'" in gone.stderr) == (2, True)
    escaped = run("generate", *reference.arguments, "-n", "1", "@@nowhere")
    assert escaped.exit_code == 0


def test_the_default_model(run, reference, tmp_path) -> None:
    none = run("chat")
    assert none.exit_code == 2
    assert "no model: name one" in none.stderr
    assert run("models", "default", reference.path).exit_code == 0
    assert run("models", "default").stdout == reference.path + "\n"
    straight = run("generate", *reference.arguments, "-n", "4", MIRA).stdout
    rest = (*reference.arguments[1:], "-n", "4")
    assert run("generate", *rest, MIRA).stdout == straight
    assert CliRunner().invoke(main, ["generate", *rest], input=MIRA).stdout == straight
    assert run("generate", "wrong.gguf", *rest, MIRA).exit_code == 1
    run("models", "default", "--clear")
    assert run("generate", *rest, MIRA).exit_code == 1


def test_an_alias(run, reference) -> None:
    assert run("models", "alias", "story", reference.path).exit_code == 0
    straight = run("generate", *reference.arguments, "-n", "4", MIRA).stdout
    arguments = ("generate", "-m", "story", *reference.arguments[1:], "-n", "4", MIRA)
    assert run(*arguments).stdout == straight
    rows = {row["name"]: row for row in json.loads(run("models", "--json").stdout)}
    assert rows[reference.path]["aliases"] == ["story"]
    assert rows[reference.path]["size_bytes"] > 1000
    assert run("models", "unalias", "story").exit_code == 0
    gone = run("models", "unalias", "story")
    assert (gone.exit_code, "there is no alias 'story'" in gone.stderr) == (1, True)


def test_an_alias_of_an_alias_means_what_that_one_means(run, reference) -> None:
    run("models", "alias", "story", reference.path)
    assert run("models", "alias", "s", "story").stderr == f"s means {reference.path}\n"
    assert run("models", "unalias", "story").exit_code == 0
    assert run("tokenize", "s", *reference.arguments[1:3], MIRA, "--ids").exit_code == 0


@pytest.mark.parametrize("arguments", [("alias", "ghost"), ("default",)])
@pytest.mark.parametrize("model", ["nowhere.gguf", "~/nowhere.gguf", "some/where", ""])
def test_a_path_that_is_not_there_gets_no_name(run, arguments, model) -> None:
    refused = run("models", *arguments, model)
    assert (refused.exit_code, f"there is no model at {model!r}" in refused.stderr) == (1, True)
    assert run("models", "default").stdout == "there is no default model\n"
    assert "there is no alias 'ghost'" in run("models", "unalias", "ghost").stderr


def test_an_alias_that_is_taken_away_is_no_default_any_more(run, reference) -> None:
    run("models", "alias", "story", reference.path)
    run("models", "default", "story")
    said = run("models", "unalias", "story").stderr
    assert said == "story is no longer an alias\nit was the default; the default is cleared\n"
    assert run("models", "default").stdout == "there is no default model\n"


def test_models_are_listed_with_who_reads_them(run, engine) -> None:
    if engine.name == "reference":
        pytest.skip("the pack names engines' formats")
    listed = run("models")
    assert listed.exit_code == 0, listed.stderr
    row = next(line for line in listed.stdout.splitlines() if "pack:storyteller" in line)
    assert "MB" in row or "KB" in row


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_json_that_broke_off_is_told_by_the_exit_status(run, reference, schema, options) -> None:
    arguments = ("generate", *reference.arguments, "--chat", "--json-schema", schema, *options)
    cut = run(*arguments, "-n", "3", FELIX)
    assert cut.exit_code == 3
    assert "was cut off before it was complete; allow more with --max-tokens" in cut.stderr
    whole = run(*arguments, FELIX)
    assert (whole.exit_code, whole.stderr) == (0, "")


def test_json_that_broke_off_in_a_piped_chat(reference, schema) -> None:
    done = talk(reference, FELIX, options=(*EXACT, "--json-schema", schema, "-n", "3"))
    assert done.exit_code == 3


def test_drop_forgets_the_oldest_turns(reference) -> None:
    options = ("--json", "--system", "Be brief.")
    rows = told(talk(reference, NADIA, FELIX, "/drop", "/drop 5", "/drop", options=options))
    assert [(row["turns"], row["messages"]) for row in rows if row["type"] == "dropped"] == [
        (1, 3), (1, 1), (0, 1),
    ]  # fmt: skip
    assert talk(reference, "/drop two").exit_code == 1


def test_lines_pasted_together_are_one_message(reference, tmp_path) -> None:
    with terminal(reference, "chat", *reference.arguments) as screen:
        screen.wait_for(">>> ")
        screen.type("Hello.\nI have a question.\nWhere does Nadia live?\n")
        screen.wait_for("finish ")
        screen.wait_for(">>> ")
        screen.type("/stats\n")
        assert "messages 2," in screen.wait_for("n ctx")
        screen.wait_for(">>> ")
        screen.type('"""Two lines\n')
        screen.wait_for("... ")
        screen.type('in quotes"""\n')
        screen.wait_for("finish ")
        screen.wait_for(">>> ")
        screen.type("/stats\n")
        assert "messages 4," in screen.wait_for("n ctx")


def test_a_file_in_a_message(reference, tmp_path) -> None:
    (tmp_path / "question.txt").write_text(NADIA + "\n")
    with terminal(reference, "chat", *reference.arguments) as screen:
        screen.wait_for(">>> ")
        screen.type(f"@{tmp_path / 'question.txt'}\n")
        screen.wait_for(ANSWER)
        screen.wait_for(">>> ")
        screen.type("@nowhere\n")
        assert "\x1b[31m" in screen.wait_for("there is no file 'nowhere'")


def test_a_line_of_a_pipe_opens_no_file(reference, tmp_path) -> None:
    (tmp_path / "secret").write_text(NADIA)
    done = talk(reference, f"@{tmp_path / 'secret'}", options=("--json", "-n", "4"))
    assert done.exit_code == 0
    assert "Nadia" not in done.stdout


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_errors_are_red_where_colours_are_wanted(reference, env) -> None:
    with terminal(reference, "inspect", "gone.gguf") as screen:
        assert "\x1b[31m" in screen.wait_for("there is no model")
    with terminal(reference, "inspect", "gone.gguf", **env) as screen:
        assert "\x1b[" not in screen.wait_for("there is no model")


@pytest.mark.parametrize(
    ("told_by_the_library", "on_the_command_line"),
    [
        ("open with a larger n_ctx", "give a larger --n-ctx"),
        ("open the session with overflow='truncate', or", "give --overflow truncate, or"),
        ("or on_oom='shrink'", "or --on-oom shrink"),
        ("give an integer from 0 to 2147483647, or None", "give an integer from 0 to 2147483647"),
        ("temperature=-1.0 is refused", "--temperature -1.0 is refused"),
        ("type_v=KVType('q8_0') is", "--type-v q8_0 is"),
        ("use infercore.embed", "use infercore embed"),
        ("the seed of a plant, /a/n_ctx and x.n_ctx", "the seed of a plant, /a/n_ctx and x.n_ctx"),
    ],
)
def test_messages_name_options(told_by_the_library, on_the_command_line) -> None:
    assert as_options(told_by_the_library) == on_the_command_line


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("name", [None, *sorted(main.commands)])
def test_help_fits_the_terminal(name, width) -> None:
    command = main.commands[name] if name else main
    shown = command.get_help(click.Context(command, info_name=name, terminal_width=width))
    longest = max(shown.splitlines(), key=len)
    assert len(longest) <= width, longest
    assert "..." not in shown.partition("Commands:")[2]


@pytest.mark.parametrize("name", ["chat", "generate", "inspect", "embed"])
def test_help_is_short_and_all_is_behind_an_option(run, name) -> None:
    short, everything = run(name, "--help").stdout, run(name, "--help-all").stdout
    assert len(short.splitlines()) < 75
    assert "Examples:" in short
    assert f"{name} --help-all" in short
    assert "--check-tensors" in everything
    assert "--check-tensors" not in short
    assert "--help-all" not in everything.splitlines()[-1]


def test_names_of_backends_are_completed(reference) -> None:
    for words in ("infercore conformance lla", "infercore demo --backend lla"):
        told = reference.run(
            env={
                "_INFERCORE_COMPLETE": "bash_complete",
                "COMP_WORDS": words,
                "COMP_CWORD": str(len(words.split()) - 1),
            }
        )
        assert "llamacpp" in told.stdout.decode() or not os.environ.get(
            "INFERCORE_REQUIRE_BACKENDS"
        )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("serve", "m.gguf", "--idle-timeout", "0"), "error: --idle-timeout: must be more than 0"),
        (("generate", "m", "x", "--temp", "-1"), "error: --temperature -1.0 is not allowed"),
        (("generate", "m", "x", "-n", "many"), "error: Invalid value for '-n'"),
    ],
)
def test_a_wrong_value_is_told_with_its_option(run, arguments, says, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    result = run(*arguments)
    assert (result.exit_code, result.stderr[: len(says)]) == (2, says)
