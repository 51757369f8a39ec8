"""Exit status and messages that all commands share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import infercore
from cli.engines import COMMAND, TIMEOUT_S
from infercore.cli.app import main

if TYPE_CHECKING:
    from collections.abc import Callable

HEAVY = (
    "numpy", "jinja2", "llama_cpp", "openvino", "infercore_llamacpp", "infercore_openvino",
    "infercore_models", "llguidance", "psutil",
)  # fmt: skip


def test_version(run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"infercore, version {infercore.__version__}\n")


def test_help_names_the_commands(run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "backends" in result.stdout
    assert "demo" in result.stdout


@pytest.mark.parametrize("arguments", [("nonsense",), ("demo", "--max-tokens", "0"), ("--odd",)])
def test_wrong_usage(run, arguments) -> None:
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "guess"),
    [(("--helpp",), "--help"), (("generate", "--max-token", "3"), "--max-tokens")],
)
def test_a_wrong_option_is_one_line_with_close_guesses_alone(run, arguments, guess) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert f"'{guess}'" in result.stderr
    assert "--backend" not in result.stderr


def test_typed_error_is_one_line(run, machine, model_pack) -> None:
    def fail(path, *, backend):
        raise infercore.ModelFormatError("torn\n  in two", path=str(path))

    machine.add("fake")
    machine.load_model = fail
    result = run("demo")
    assert (result.exit_code, result.stderr) == (1, "error: torn in two\n")


def test_error_of_a_model_file_does_not_steer_the_terminal(run, machine, model_pack) -> None:
    def fail(path, *, backend):
        raise infercore.ModelFormatError("named \x1b[2J by the file", path=str(path))

    machine.add("fake")
    machine.load_model = fail
    assert run("demo").stderr == "error: named \\x1b[2J by the file\n"


def test_debug_shows_the_trace(run, machine, model_pack) -> None:
    result = run("--debug", "demo", "--backend", "nothing")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("error: no backend is named 'nothing'\n")


def test_interrupt(run, machine, model_pack) -> None:
    def interrupt(path, *, backend):
        raise KeyboardInterrupt

    machine.add("fake")
    machine.load_model = interrupt
    result = run("demo")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_error_of_another_kind_is_not_hidden(run, machine, model_pack) -> None:
    def crash(path, *, backend):
        raise ZeroDivisionError

    machine.add("fake")
    machine.load_model = crash
    assert isinstance(run("demo").exception, ZeroDivisionError)


def test_debug_may_stand_behind_the_command(run, machine, model_pack) -> None:
    result = run("demo", "--backend", "nothing", "--debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "Traceback" not in run("demo", "--backend", "nothing").stderr


@pytest.mark.parametrize("name", sorted(main.commands))
def test_each_command_has_help_and_debug(run, name) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert "--debug" in result.stdout
    assert "--json" in result.stdout or name in {"serve", "pull"}  # HTTP; a path a line


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["--version"]])
def test_help_imports_no_engine_and_no_numpy(arguments) -> None:
    source = f"""
import json, sys
from infercore.cli.app import main
try:
    main({arguments!r})
except SystemExit as end:
    print(json.dumps([end.code, [name for name in {HEAVY!r} if name in sys.modules]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]


def test_module_is_the_command() -> None:
    done = subprocess.run(
        [*COMMAND, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert done.stdout == f"infercore, version {infercore.__version__}\n"


def shut(*handles: int) -> Callable[[], None]:
    """What a shell does for ``<&-`` and ``>&-``."""
    return lambda: [os.close(handle) for handle in handles]


def test_streams_that_are_closed(reference) -> None:
    without = [*COMMAND, "tokenize", reference.path, "--ids"]
    fields = {"env": reference.environment, "stderr": subprocess.PIPE, "timeout": TIMEOUT_S}
    told = subprocess.run([*without, "Once"], preexec_fn=shut(1), check=False, **fields)
    assert (told.returncode, told.stderr) == (0, b"")
    told = subprocess.run(without, preexec_fn=shut(0), check=False, **fields)
    assert told.returncode == 2
    assert b"standard input is closed" in told.stderr


def test_error_of_the_system_is_one_line(run, machine, model_pack) -> None:
    def fail(path, *, backend):
        raise PermissionError(13, "Permission denied", "model.gguf")

    machine.add("fake")
    machine.load_model = fail
    result = run("demo")
    assert (result.exit_code, result.stderr) == (1, "error: Permission denied: model.gguf\n")


@pytest.mark.parametrize(
    ("words", "wanted"), [("infercore ge", "generate"), ("infercore plan m --ty", "--type-k")]
)
def test_shell_completion(words, wanted) -> None:
    environment = {
        **os.environ, "_INFERCORE_COMPLETE": "bash_complete", "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", "from infercore.cli import main; main(prog_name='infercore')"],
        env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert f"plain,{wanted}" in done.stdout.splitlines()


def test_backends_are_completed(machine) -> None:
    from infercore.cli.options import backend_names

    machine.add("fast")
    machine.add("other")
    assert backend_names(None, None, "f") == ["fast"]
