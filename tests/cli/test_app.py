"""Exit status and messages that all commands share."""

from __future__ import annotations

import pytest

import infercore


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


def test_typed_error_is_one_line(run, machine, model_pack) -> None:
    def fail(path, *, backend):
        raise infercore.ModelFormatError("torn\n  in two", path=str(path))

    machine.add("fake")
    machine.load_model = fail
    result = run("demo")
    assert (result.exit_code, result.stderr) == (1, "error: torn in two\n")


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
