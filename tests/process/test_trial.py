"""A file that was not seen before is tried in a child process: its death is a typed error here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import infercore as ic
import pack
from infercore.engine import patience, trial
from infercore.registry import default_registry
from llamacpp import random_gguf

PLUGIN = """
    import os, pathlib, time
    from infercore import API_VERSION, BackendDescriptor, hookimpl
    from infercore.testing.reference_model import load as load_story

    def load(path, config):
        with open(path + ".loads", "a") as log:
            log.write(f"{os.getpid()} ")
        for word in pathlib.Path(path).read_text().split():
            if word == "die": os.abort()
            if word == "kill": os.kill(os.getpid(), 9)
            if word == "hang": time.sleep(600)
            while word == "spin": pass
            if word == "stop": os.kill(os.getpid(), 19)
            if word == "raise": raise ValueError("no model at all")
        model = load_story(os.environ["STORY"], config)
        if "die-late" in pathlib.Path(path).read_text():
            model.new_context = lambda config: os.abort()
        return model

    @hookimpl
    def infercore_backend():
        return BackendDescriptor(
            name="brittle", api_version=API_VERSION, loader=load,
            match=lambda path: 100 if path.endswith(".brittle") else 0,
            engine_version=lambda: "1", model_options=("x",),
            compiles_late=True,
        )
"""


@pytest.fixture
def brittle(tmp_path, monkeypatch):
    """Return a function that writes a file for a backend which dies over some."""
    home = tmp_path / "installed"
    about = home / "brittle-1.0.dist-info"
    about.mkdir(parents=True)
    (home / "brittle.py").write_text(textwrap.dedent(PLUGIN))
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: brittle\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[infercore.backends]\nbrittle = brittle\n")
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.setenv("INFERCORE_CACHE_DIR", str(tmp_path / "cache"))
    pack.need_pack()
    import infercore_models

    monkeypatch.setenv("STORY", str(infercore_models.path(pack.MODEL, "hf")))
    default_registry().refresh()
    trial.forget()

    def write(content, name="model"):
        path = tmp_path / f"{name}.brittle"
        path.write_text(content)
        return path

    yield write
    monkeypatch.undo()
    default_registry().refresh()
    trial.forget()


def processes(path):
    """Return the processes in which a file was loaded, in order."""
    return [int(number) for number in path.with_name(path.name + ".loads").read_text().split()]


def test_a_death_in_the_child_is_a_typed_error_here(brittle):
    path = brittle("die")
    for _ in range(2):  # it was not remembered as tried
        with pytest.raises(ic.ModelFormatError, match="SIGABRT") as caught:
            ic.load_model(path)
        assert caught.value.path == str(path)
    assert os.getpid() not in processes(path)
    assert len(processes(path)) == 2


def test_what_the_system_ends_has_no_memory(brittle):
    with pytest.raises(ic.OutOfMemoryError, match="memory ran out"):
        ic.load_model(brittle("kill"))


@pytest.mark.parametrize("how", ["hang", "spin"])
def test_what_hangs_is_ended(brittle, monkeypatch, how):
    monkeypatch.setattr(trial, "_LEAST_SECONDS", 3.0)
    with pytest.raises(ic.ModelFormatError, match="did not end within 3 seconds of work"):
        ic.load_model(brittle(how))


@pytest.mark.skipif(sys.platform != "linux", reason="where the system tells what a process does")
def test_a_machine_that_stands_still_refuses_no_file(brittle, monkeypatch):
    """The child is stopped for longer than it may work, then goes on."""
    monkeypatch.setattr(trial, "_LEAST_SECONDS", 2.0)
    path, begun = brittle("stop"), []
    start = trial._start
    monkeypatch.setattr(trial, "_start", lambda name: begun.append(start(name)) or begun[-1])

    def goes_on() -> None:
        os.waitid(os.P_PID, begun[0].pid, os.WSTOPPED | os.WNOWAIT)
        time.sleep(3.5)
        begun[0].send_signal(signal.SIGCONT)

    thread = threading.Thread(target=goes_on)
    monkeypatch.setattr(trial, "_import_engine", lambda _: thread.start())
    trial.check(default_registry().get("brittle"), str(path), ic.ModelConfig())
    thread.join()
    assert processes(path) == [begun[0].pid]


def test_a_jump_of_the_clock_is_one_step(monkeypatch):
    """As after the machine slept, or this process was stopped with its child."""
    now = [0.0]
    monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(patience, "_looked", lambda _: ("", 0.0))
    waited = patience.Patience(1, 3.0)
    for seconds in (0.5, 86_400.0, 0.5):
        now[0] += seconds
        assert not waited.is_spent()
    now[0] += 86_400.0
    assert waited.is_spent()


def test_what_raises_is_told_by_the_parents_own_load(brittle):
    with pytest.raises(ic.ModelFormatError, match="no model at all"):
        ic.load_model(brittle("raise"))


def test_a_file_is_tried_once(brittle):
    path = brittle("fine")
    ic.load_model(path).close()
    child, parent = processes(path)
    assert child != parent == os.getpid()
    started = time.perf_counter()
    trial.check(default_registry().get("brittle"), str(path), ic.ModelConfig())
    assert time.perf_counter() - started < 0.05
    trial.forget()  # as another process
    ic.load_model(path).close()
    assert processes(path)[2:] == [os.getpid()]
    moved = brittle("fine", name="moved")  # another place, the same content
    ic.load_model(moved).close()
    assert processes(moved) == [os.getpid()]


def test_another_content_or_other_options_are_tried_again(brittle):
    path = brittle("fine")
    ic.load_model(path).close()
    ic.load_model(path, backend_options={"x": 1}).close()
    path.write_text("quite fine")
    ic.load_model(path).close()
    assert len(processes(path)) == 6


def test_a_file_that_was_written_into_and_given_its_old_time_is_tried_again(brittle):
    path = brittle("fine")
    before = path.stat()
    ic.load_model(path).close()
    path.write_text("die ")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ic.ModelFormatError, match="SIGABRT"):
        ic.load_model(path)


@pytest.mark.parametrize("beside", [True, False])
def test_a_large_file_that_is_compiled_late_is_tried_in_two_parts(brittle, monkeypatch, beside):
    monkeypatch.setattr(trial, "_AT_ONCE_UP_TO_BYTES", 3)
    monkeypatch.setattr(trial, "_has_processors", lambda: beside)
    for word, lives in (("fine", True), ("die-late", False)):
        path = brittle(word, name=word)
        for n_loads in (2, 4):
            trial.forget()  # as another process
            with ic.load_model(path) as model:
                assert beside or len(processes(path)) == n_loads
                if lives:
                    model.new_context(n_ctx=16).close()
                    continue
                with pytest.raises(ic.ModelFormatError, match="SIGABRT"):
                    model.new_context(n_ctx=16)
        assert len(processes(path)) == (4 if lives else 5)  # what lived is remembered
        assert processes(path)[0] != os.getpid()
        assert processes(path).count(os.getpid()) == 2


def test_a_child_that_tries_a_context_beside_the_load_ends_with_the_model(brittle, monkeypatch):
    monkeypatch.setattr(trial, "_AT_ONCE_UP_TO_BYTES", 3)
    monkeypatch.setattr(trial, "_has_processors", lambda: True)
    begun = []
    start = trial._start
    monkeypatch.setattr(trial, "_start", lambda name: begun.append(start(name)) or begun[-1])
    ic.load_model(brittle("fine")).close()
    with pytest.raises(ic.ModelFormatError, match="no model at all"):
        ic.load_model(brittle("raise"))
    with pytest.raises(ic.ModelFormatError, match="SIGABRT"):
        ic.load_model(brittle("die now"))
    assert len(begun) == 6
    assert all(child.returncode is not None for child in begun)
    path = brittle("fine", name="changed")
    with ic.load_model(path) as model:
        path.write_text("die-late")  # what began was another file's trial
        with pytest.raises(ic.ModelFormatError, match="SIGABRT"):
            model.new_context(n_ctx=16)
    assert all(child.returncode is not None for child in begun)


def test_files_that_are_gone_by_the_first_context_are_no_hindrance(brittle, monkeypatch):
    monkeypatch.setattr(trial, "_AT_ONCE_UP_TO_BYTES", 3)
    path = brittle("fine")
    with ic.load_model(path) as model:
        path.unlink()
        model.new_context(n_ctx=16).close()


def test_the_caller_decides(brittle, monkeypatch):
    path = brittle("fine")
    ic.load_model(path, check_in_child=False).close()
    assert processes(path) == [os.getpid()]
    for _ in range(2):
        ic.load_model(path, check_in_child=True).close()
    assert len(processes(path)) == 5
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ic.ModelLoadError, match="no executable"):
        ic.load_model(path, check_in_child=True)
    ic.load_model(brittle("other"), check_in_child=None).close()  # told in the log


def test_a_program_from_standard_input_is_no_hindrance(brittle, tmp_path):
    path = brittle("fine")
    program = (
        f"import infercore as ic\nwith ic.load_model({str(path)!r}) as m: print(m.info.n_layer)"
    )
    done = subprocess.run(
        [sys.executable, "-"],
        input=program,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "4"), done.stderr
    assert len(set(processes(path))) == 2


def test_llama_cpp_dies_over_a_kind_that_only_its_kernel_knows(tmp_path, monkeypatch):
    pack.need_backend("llamacpp")
    monkeypatch.setenv("INFERCORE_CACHE_DIR", str(tmp_path / "cache"))  # nothing was tried before
    metadata, tensors = random_gguf._recurrent(np.random.default_rng(0))
    tensors["blk.0.ssm_conv1d.weight"] = tensors["blk.0.ssm_conv1d.weight"].astype(np.float16)
    path = random_gguf.write_file(tmp_path / "m.gguf", metadata, tensors)
    assert ic.plan_memory(path).weights_bytes
    with pytest.raises(ic.ModelFormatError, match="SIGABRT"):
        ic.load_model(path)  # a plan is no trial


def test_openvino_dies_over_a_graph(tmp_path, monkeypatch):
    pack.need_backend("openvino")
    monkeypatch.setenv("INFERCORE_CACHE_DIR", str(tmp_path / "cache"))  # nothing was tried before
    folder = tmp_path / "ir"
    shutil.copytree(pack.model_path("openvino"), folder)
    graph = folder / "openvino_model.xml"
    graph.write_text(graph.read_text().replace('type="Slice"', 'type="Assign"', 1))
    with pytest.raises(ic.ModelFormatError, match="trial in a child process"):
        ic.load_model(folder)


@pytest.mark.parametrize("backend", ["llamacpp", "openvino"])
@pytest.mark.parametrize("kind", ["storyteller", "encoder"])
def test_the_trial_itself_runs_to_its_end(backend, kind):
    """What a child raises is not told, so that a refused option would make every trial hollow."""
    pack.need_backend(backend)
    import infercore_models
    from infercore import trial as child

    formats = {"llamacpp": "gguf-f32", "openvino": "openvino"}
    options = default_registry().get(backend).trial_options
    with ic.load_model(
        infercore_models.path(kind, formats[backend]), backend=backend, check_in_child=False
    ) as model:
        child.use(model, (), options)
