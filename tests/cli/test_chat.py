"""``infercore chat`` keeps its history warm, on a terminal and in a pipe."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
from subprocess import PIPE
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

import infercore_models
import pack
from cli.engines import COMMAND, CTRL_C, CTRL_D, ESCAPE, TIMEOUT_S, terminal
from infercore.cli.app import main

if TYPE_CHECKING:
    from pathlib import Path

    from cli.engines import Engine, Terminal

NADIA, FELIX = "Where does Nadia live?", "Describe Felix as JSON."
SUM = "What is 2 plus 3?"
ANSWER = "Nadia lives near the grey harbour."
ENDLESS = ("--ignore-eos", "--overflow", "shift", "--n-ctx", "256")


def talk(engine: Engine, *lines: str, options: tuple[str, ...] = (), model: str = "") -> Any:
    """Return what a chat in a pipe did with ``lines``, in this process."""
    arguments = ("chat", model or engine.path, *engine.arguments[1:], *options)
    text = "".join(f"{line}\n" for line in lines)
    return CliRunner().invoke(main, list(arguments), input=text)


def leave(screen: Terminal) -> int:
    """Press Ctrl-D at the prompt; return the exit status."""
    screen.wait_for(">>> ")
    screen.type(CTRL_D)
    return screen.end()


def told(done: Any) -> list[dict[str, Any]]:
    assert done.exit_code == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [row for row in found if row["type"] != "chunk"]


def test_answers_alone_go_to_stdout(engine) -> None:
    text = f"{NADIA}\n\n/stats\n".encode()
    done = engine.run("chat", *engine.arguments, stdin=text)
    assert (done.returncode, done.stdout.decode()) == (0, ANSWER + "\n")
    assert ESCAPE.encode() not in done.stdout + done.stderr
    assert b"reused 0 of 23 tokens" in done.stderr
    assert b"messages 2" in done.stderr


def test_history_is_reused_from_turn_to_turn(engine) -> None:
    first, second, third = told(talk(engine, NADIA, FELIX, NADIA, options=("--json",)))
    assert [row["number"] for row in (first, second, third)] == [0, 1, 2]
    for before, after in ((first, second), (second, third)):
        held = before["usage"]["prompt_tokens"] + before["usage"]["completion_tokens"]
        assert after["usage"]["cached_tokens"] >= held - 2
        assert after["usage"]["prompt_tokens"] > held
    assert json.loads(second["text"])["name"] == "Felix"


def test_without_stats(reference) -> None:
    assert talk(reference, NADIA, options=("--no-stats",)).stderr == ""


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_thoughts_come_apart_from_the_answer(engine, command) -> None:
    formats = {"reference": "hf", **pack.FORMATS}
    path = str(infercore_models.path("agent", formats[engine.name]))
    arguments = (
        command,
        path,
        *engine.arguments[1:],
        *(["--chat"] if command == "generate" else []),
    )

    def answered(*options: str) -> Any:
        return CliRunner().invoke(main, [*arguments, *options], input=f"{SUM}\n")

    *chunks, last = map(json.loads, answered("--json", "-n", "60").stdout.splitlines())
    thought = "".join(chunk.get("reasoning", "") for chunk in chunks)
    assert thought == last["reasoning"] != ""
    assert "".join(chunk["text"] for chunk in chunks) == last["text"] != ""
    shown = answered("-n", "60", *(["--no-stats"] if command == "chat" else []))
    assert shown.stdout == last["text"].rstrip("\n") + "\n"
    assert shown.stderr == thought.rstrip("\n") + "\n"
    cut = answered("-n", "5", *(["--no-stats"] if command == "chat" else []))
    assert (cut.exit_code, cut.stdout) == (0, "")
    assert thought.startswith(cut.stderr.removesuffix("\n"))
    assert cut.stderr.strip()


def test_saved_chat_goes_on_warm(engine, tmp_path: Path) -> None:
    file = tmp_path / "a.chat"
    straight = told(talk(engine, NADIA, FELIX, options=("--json",)))[-1]
    saved = told(talk(engine, NADIA, f"/save {file}", options=("--json",)))[-1]
    assert (saved["type"], saved["messages"]) == ("saved", 2)
    loaded = told(talk(engine, FELIX, options=("--json", "--load", str(file))))[-1]
    within = told(talk(engine, f"/load {file}", FELIX, options=("--json",)))
    assert within[0]["resident_tokens"] == saved["resident_tokens"]
    for went_on in (loaded, within[-1]):
        assert went_on["text"] == straight["text"]
        assert went_on["usage"]["cached_tokens"] == straight["usage"]["cached_tokens"] > 20
    assert os.listdir(tmp_path) == ["a.chat"]


def test_template_is_saved_with_the_chat(reference, tmp_path: Path) -> None:
    bare = without_template(reference, tmp_path)
    template, file = tmp_path / "chat.jinja", tmp_path / "a.chat"
    shutil.copy(os.path.join(reference.path, "chat_template.jinja"), template)
    refused = talk(reference, NADIA, model=bare)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "--template FILE" in refused.stderr
    options = ("--template", str(template))
    done = talk(reference, NADIA, f"/save {file}", model=bare, options=options)
    assert done.stdout == ANSWER + "\n", done.stderr
    again = talk(reference, FELIX, model=bare, options=("--load", str(file), "--json"))
    assert told(again)[-1]["usage"]["cached_tokens"] > 20


def without_template(engine: Engine, folder: Path) -> str:
    bare = folder / "bare"
    shutil.copytree(engine.path, bare)
    (bare / "chat_template.jinja").unlink()
    config = json.loads((bare / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    return str(bare)


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "missing", "a session", "header"])
def test_file_that_is_no_saved_chat(reference, tmp_path: Path, damage) -> None:
    file = tmp_path / "a.chat"
    damaged(reference, file, damage)
    done = talk(reference, NADIA, options=("--load", str(file)))
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_refused_file_leaves_the_chat_as_it_was(reference, tmp_path: Path) -> None:
    file = tmp_path / "a.chat"
    damaged(reference, file, "flipped")
    with terminal(reference, "chat", *reference.arguments) as screen:
        screen.wait_for(">>> ")
        screen.type(f"{NADIA}\n")
        screen.wait_for("finish eos")
        screen.type(f"/load {file}\n")
        screen.wait_for("error: ")
        screen.type(f"/save {tmp_path}/no/such/folder/a.chat\n")
        screen.wait_for("error: No such file or directory")
        screen.type("/stats\n")
        screen.wait_for("messages 2,")
        screen.type(f"{FELIX}\n")
        line = screen.wait_for("finish eos")
        assert int(re.search(r"reused (\d+) of", line)[1]) > 20
        assert leave(screen) == 0


def damaged(engine: Engine, file: Path, damage: str) -> None:
    """Write ``file`` so that it holds no chat."""
    if damage == "missing":
        return
    if damage == "foreign":
        file.write_bytes(b"not a chat at all" * 10)
        return
    import infercore
    from infercore.engine import blob

    with (
        infercore.load_model(engine.path, backend=engine.name) as model,
        model.new_session(n_ctx=64) as session,
    ):
        session.ensure_prefix("Once")
        if damage == "a session":
            session.save(file)
            return
        snapshot = session.snapshot()
    header = {"kind": "chat", "messages": [{"role": 7}], "template": None, "manifest": {}}
    data = blob.pack({**header, "resident_tokens": 1}, snapshot.data)
    cut = {"cut": data[:-200], "header": data}
    flipped = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1])
    file.write_bytes(cut.get(damage, flipped + data[len(data) // 2 + 1 :]))


@pytest.mark.parametrize("engine", sorted(pack.FORMATS), indirect=True)
def test_chat_of_another_backend(reference, engine, tmp_path: Path) -> None:
    file = tmp_path / "a.chat"
    assert talk(reference, NADIA, f"/save {file}").exit_code == 0
    done = talk(engine, NADIA, options=("--load", str(file)))
    assert (done.exit_code, done.stdout) == (1, "")
    assert "changed" in done.stderr


def small_files() -> None:
    """Let this process write files of a few bytes only, as a full disk would."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))


def test_full_disk_while_saving_keeps_the_older_file(reference, tmp_path: Path) -> None:
    file = tmp_path / "a.chat"
    talk(reference, NADIA, f"/save {file}")
    before = file.read_bytes()
    text = f"{NADIA}\n/save {file}\n".encode()
    done = reference.run("chat", *reference.arguments, stdin=text, preexec_fn=small_files)
    assert (done.returncode, done.stdout.decode()) == (1, ANSWER + "\n")
    assert b"error: File too large" in done.stderr
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.chat"]


def test_undo_reset_and_system(reference) -> None:
    rows = told(
        talk(
            reference, "/undo", "/system", "/system You are a storyteller.", NADIA, FELIX, "/undo",
            "/stats", "/reset", "/stats", "/system -", "/stats", "/help", "/quit", NADIA,
            options=("--json",),
        )
    )  # fmt: skip
    kinds = [row["type"] for row in rows]
    assert kinds == ["undone", "system", "system", "result", "result", "undone", "stats", "reset",
                     "stats", "system", "stats", "help"]  # fmt: skip
    assert rows[0]["done"] is False
    assert [row["system"] for row in rows if row["type"] == "system"] == [
        None, "You are a storyteller.", None,
    ]  # fmt: skip
    assert rows[5] == {"type": "undone", "done": True, "messages": 3}
    assert [row["messages"] for row in rows if row["type"] == "stats"] == [3, 1, 0]


def test_undone_turn_is_asked_again_warm(reference) -> None:
    rows = told(talk(reference, NADIA, FELIX, "/undo", FELIX, options=("--json",)))
    first, again = rows[1], rows[3]
    assert again["text"] == first["text"]
    assert again["usage"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 1


def test_system_message_from_the_command_line(reference, tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_text("You are a storyteller.", encoding="utf-8")
    for options in (("--system", "You are a storyteller."), ("--system-file", str(file))):
        row = told(talk(reference, "/system", options=(*options, "--json")))[0]
        assert row["system"] == "You are a storyteller."


def test_message_that_begins_with_a_slash(reference) -> None:
    rows = told(talk(reference, "//help", "/stats", options=("--json", "-n", "2")))
    assert [row["type"] for row in rows] == ["result", "stats"]


@pytest.mark.parametrize("line", ["/nothing", "/save", "/load", "/undo now", "/exit now"])
def test_wrong_command_ends_a_pipe(reference, line) -> None:
    done = talk(reference, line, NADIA)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1


def test_overflow_ends_a_pipe_and_not_a_person_s_chat(reference) -> None:
    long = "again and " * 40
    options = ("--n-ctx", "64", "-n", "4")
    done = talk(reference, long, options=options)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "--n-ctx" in done.stderr
    with terminal(reference, "chat", *reference.arguments, *options) as screen:
        screen.wait_for(">>> ")
        screen.type(long + "\n")
        screen.wait_for("error: ")
        screen.type("/stats\n")
        screen.wait_for("messages 0,")
        screen.type(f"{NADIA}\n")
        screen.wait_for("finish length")
        assert leave(screen) == 0


def test_the_oldest_turns_are_left_out_and_it_is_said_how_many(reference) -> None:
    lines = [f"{NADIA} {number}" for number in range(7)]
    done = talk(reference, *lines, options=("--n-ctx", "96", "-n", "4", "--json"))
    left_out = [row["dropped_messages"] for row in told(done)]
    assert left_out[0] == []
    assert left_out[-1][:2] == [0, 1]
    said = re.findall(r"the model no longer sees the (?:(\d+) )?oldest turns?", done.stderr)
    assert said[0] == ""
    assert len(said) == len(set(said))  # not again while it gets no worse
    assert int(said[-1]) == len(left_out[-1]) / 2
    assert done.stderr.count("--n-ctx for a larger window") == 1
    refused = talk(reference, *lines, options=("--n-ctx", "96", "-n", "4", "--overflow", "error"))
    assert refused.exit_code == 1
    assert "--overflow truncate" in refused.stderr


def test_input_that_is_not_utf8(reference) -> None:
    arguments = ["chat", *reference.arguments]
    done = CliRunner().invoke(main, arguments, input=b"caf\xe9\n")
    assert done.exit_code == 1
    assert "line 1 of standard input is not UTF-8" in done.stderr


def test_ctrl_c_ends_an_answer_and_keeps_the_chat(engine) -> None:
    with terminal(engine, "chat", *engine.arguments, *ENDLESS) as screen:
        screen.wait_for(">>> ")
        screen.type(f"{NADIA}\n")
        screen.wait_for("grey harbour")
        screen.type(CTRL_C)
        screen.wait_for("finish cancelled")
        screen.wait_for(">>> ")
        screen.type("/stats\n")
        assert "messages 2," in screen.wait_for("n ctx")
        screen.wait_for(">>> ")
        screen.type("/undo\n")  # it may fill the window
        screen.wait_for(">>> ")
        screen.type(f"{NADIA}\n")
        screen.wait_for("grey harbour")  # a blank may be one of the bar for a slow prompt
        screen.type(CTRL_C)
        line = screen.wait_for("finish cancelled")
        assert "reused " in line
        screen.wait_for(">>> ")
        screen.type("/exit\n")
        assert screen.end() == 0
        assert "Traceback" not in screen.seen


def test_ctrl_c_between_an_answer_and_the_prompt_keeps_the_chat(reference, tmp_path) -> None:
    """The moment is held open: it is the one in which the line of figures is written."""
    script = tmp_path / "late.py"
    script.write_text(LATE, encoding="utf-8")
    command = (sys.executable, str(script))
    with terminal(reference, "chat", *reference.arguments, command=command) as screen:
        screen.wait_for(">>> ")
        screen.type(f"{NADIA}\n")
        screen.wait_for("press Ctrl-D or type /exit to quit")
        screen.wait_for(">>> ")
        screen.type("/stats\n")
        screen.wait_for("messages 2,")
        assert leave(screen) == 0


LATE = """
import signal
from infercore.cli.app import main
from infercore.cli import generate

told = generate.Show.end

def late(self, turn, **facts):
    told(self, turn, **facts)
    signal.raise_signal(signal.SIGINT)

generate.Show.end = late
main(prog_name="infercore")
"""


def test_ctrl_c_at_the_prompt_says_how_to_leave(reference) -> None:
    with terminal(reference, "chat", *reference.arguments) as screen:
        assert "Ctrl-D" in screen.wait_for(">>> ")
        screen.wait_for("press Ctrl-D or type /exit to quit", pressing=CTRL_C)
        screen.wait_for(">>> ")
        screen.type(f"{NADIA}\n")
        screen.wait_for(ANSWER)
        assert leave(screen) == 0


def test_interrupt_in_a_pipe_ends_it(reference) -> None:
    with reference.start(
        "chat", *reference.arguments, *ENDLESS, stdin=PIPE, stdout=PIPE, stderr=PIPE
    ) as child:
        child.stdin.write(f"{NADIA}\n{FELIX}\n".encode())
        child.stdin.flush()
        child.stdout.read(5)
        child.send_signal(signal.SIGINT)
        out, errors = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 130
    assert errors.count(b"finish cancelled") == 1
    assert b"name" not in out


def test_answers_in_a_file_and_the_rest_on_the_terminal(reference, tmp_path: Path) -> None:
    file = tmp_path / "answers.txt"
    script = shlex.join([*COMMAND, "chat", *reference.arguments]) + f" >{file}"
    with terminal(reference, script, command=("/bin/sh", "-c")) as screen:
        screen.wait_for(">>> ")
        screen.type(f"{NADIA}\n")
        screen.wait_for("finish eos")
        assert leave(screen) == 0
    assert file.read_text(encoding="utf-8") == ANSWER + "\n"
