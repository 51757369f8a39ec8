"""What ends a process, class by class, in a worker: the caller lives, and who is to blame ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import infercore as ic
import pack
from infercore.registry import default_registry
from infercore.testing import load_reference_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(os.name != "posix", reason="isolation needs POSIX")

POISON = "pyx"
PLUGIN = """
    import ctypes, json, os, signal, time
    from infercore import API_VERSION, BackendDescriptor, SessionFatalError, hookimpl
    from infercore.testing import Faults
    from infercore.testing.reference_model import load as load_story

    PLAN = os.environ["DEADLY_PLAN"]

    def die(name, text=None):
        '''End this process if the plan says so: {"call": name, "how": signal, "times": n}.'''
        try:
            plan = json.load(open(PLAN))
        except FileNotFoundError:
            return
        if plan["call"] != name or plan.get("text") not in (None, text) or not plan["times"]:
            return
        plan["times"] -= 1
        with open(PLAN + ".new", "w") as file:
            json.dump(plan, file)
        os.replace(PLAN + ".new", PLAN)  # another thread may read it meanwhile
        if plan["how"] == "hang":
            time.sleep(600)
        if plan["how"] == "exit":
            os._exit(3)
        if plan["how"] == "double free":
            libc = ctypes.CDLL(None)
            libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
            pages = libc.malloc(64)
            libc.free(pages), libc.free(pages)
        if plan["how"] == "wild write":
            ctypes.memset(64, 1, 4096)
        if plan["how"] == "fatal":
            raise SessionFatalError("no memory", cause=MemoryError())
        os.kill(os.getpid(), getattr(signal, plan["how"]))
        time.sleep(600)

    class Deadly(Faults):
        def run(self, name, method, *args, **kwargs):
            die(name)
            return super().run(name, method, *args, **kwargs)

    class Tokens:
        def __init__(self, inner):
            self._inner = inner
        def __getattr__(self, name):
            return getattr(self._inner, name)
        def encode(self, text, **fields):
            if "pyx" in text:
                die("encode")
            return self._inner.encode(text, **fields)

    def load(path, config):
        die("load")
        inner = load_story(os.environ["STORY"], config)
        model = Deadly().around(inner)
        model.tokenizer = Tokens(inner.tokenizer)
        return model

    @hookimpl
    def infercore_backend():
        return BackendDescriptor(
            name="deadly", api_version=API_VERSION, loader=load, tries_in_child=False,
            match=lambda path: 100 if path.endswith(".deadly") else 0,
            engine_version=lambda: "1",
        )
"""


@pytest.fixture
def deadly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that opens an isolated pool, and one that plans its engine's death."""
    pack.need_pack()
    import infercore_models

    home = tmp_path / "installed"
    about = home / "deadly-1.0.dist-info"
    about.mkdir(parents=True)
    (home / "deadly.py").write_text(textwrap.dedent(PLUGIN))
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: deadly\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[infercore.backends]\ndeadly = deadly\n")
    plan, model = tmp_path / "plan.json", tmp_path / "model.deadly"
    model.write_text("a story")
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.setenv("DEADLY_PLAN", str(plan))
    monkeypatch.setenv("STORY", str(infercore_models.path(pack.MODEL, "hf")))
    default_registry().refresh()

    def dies(call: str, how: str = "SIGSEGV", times: int = 1) -> None:
        new = plan.with_suffix(".new")
        new.write_text(json.dumps({"call": call, "how": how, "times": times}))
        new.replace(plan)

    def opened(**fields: Any) -> Any:
        given = {"n_ctx": 96, "n_parallel": 3, "step_timeout": 1.0, "max_restarts": 8}
        return ic.open_pool(model, isolate=True, **{**given, **fields})

    opened.dies = dies
    yield opened
    monkeypatch.undo()
    default_registry().refresh()


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """Return what the model tells, undisturbed."""
    with load_reference_model() as model, model.new_session(n_ctx=96) as session:
        return told(session)


def told(session: Any, text: str = "Once upon a time", n: int = 12) -> list[int]:
    session.ensure_prefix(text)
    return [t for c in session.decode(max_tokens=n, temperature=0) for t in c.tokens]


CALLS = ("load", "decode", "decode_one", "logits", "save_sequence", "load_sequence", "seq_remove")


@pytest.mark.parametrize(
    ("call", "how"),
    [
        *((call, "SIGSEGV") for call in CALLS),
        ("decode", "SIGABRT"),
        ("decode_one", "SIGBUS"),
        ("decode", "SIGKILL"),
        ("decode_one", "exit"),
        ("decode_one", "hang"),
        ("decode_one", "fatal"),
        ("load_sequence", "hang"),
    ],
)
def test_a_death_in_any_call_changes_no_text(
    deadly: Any, expected: list[int], call: str, how: str
) -> None:
    with deadly() as pool, pool.open_session() as session:
        assert told(session) == expected
        before, pid = pool.stats().n_restarts, pool.process.pid
        deadly.dies(call, how)
        if call == "load":
            os.kill(pool.process.pid, 9)
        other = "The little dog saw a cat and"
        twice = [(told(session, other), session.restore(session.snapshot())) for _ in range(2)]
        assert twice[0][0] == twice[1][0]
        assert told(session) == expected
        assert pool.stats().n_restarts > before
        assert pool.process.pid != pid


def beside(pool: Any, work: Callable[[], object]) -> list[int]:
    """Return the tokens of a stream that is read while ``work`` is done again and again."""
    found: list[int] = []
    with pool.open_session() as good:
        reader = threading.Thread(target=lambda: found.extend(told(good, n=60)), daemon=True)
        reader.start()
        work()
        reader.join(60.0)
    return found


@pytest.mark.parametrize("kind", ["a session", "the pool's tokenizer"])
def test_who_kills_outside_a_step_ends_alone(deadly: Any, kind: str) -> None:
    with deadly(n_ctx=128) as pool:
        with pool.open_session() as session:
            undisturbed = told(session, n=60)
        deadly.dies("encode", times=100)

        def bad() -> None:
            with pool.open_session() as session:
                call = session.ensure_prefix if kind == "a session" else pool.tokenizer.encode
                with pytest.raises(ic.SessionFatalError, match="SIGSEGV"):
                    call(f"Once {POISON}")

        assert beside(pool, bad) == undisturbed
        assert pool.stats().n_restarts == 2
        assert pool.failure is None


def test_a_load_that_dies_or_hangs_is_a_typed_error(deadly: Any) -> None:
    me = psutil.Process()
    for how, text in (("SIGABRT", "SIGABRT"), ("exit", "status 3"), ("hang", "did not load")):
        deadly.dies("load", how)
        with pytest.raises(ic.ModelLoadError, match=text):
            deadly(load_timeout=5.0 if how == "hang" else 60.0)
    assert not [child for child in me.children() if "isolated" in " ".join(child.cmdline())]


def test_an_engine_that_dies_when_it_is_closed_holds_nobody_up(deadly: Any) -> None:
    with deadly() as pool, pool.open_session() as session:
        told(session)
        deadly.dies("close")
        started = time.monotonic()
    assert time.monotonic() - started < 8.0
    assert pool.closed


# -- the process killers that were found by attack, on the engines themselves -------------------


@pytest.fixture
def one_thread() -> dict[str, int]:
    return {"n_threads": 1, "n_threads_batch": 1}


def test_k1_moved_keys_of_a_quantised_cache(
    pack_path: Path, backend_name: str, one_thread: dict[str, int]
) -> None:
    for kind in ("q8_0", "bf16") if backend_name == "llamacpp" else ("u8",):
        with suppress(ic.UnsupportedFeatureError), ic.open_session(
            pack_path, backend=backend_name, isolate=True, n_ctx=64, type_k=kind,
            overflow="shift", **one_thread,
        ) as session:  # fmt: skip
            session.ensure_prefix("Once upon a time")
            assert list(session.decode(max_tokens=100, ignore_eos=True))


def altered(pack_path: Path, folder: Path, seed: int) -> Path:
    """Return a copy of the model with bytes that are changed, which nobody looks at before."""
    import random
    import shutil

    rng = random.Random(seed)
    if pack_path.is_dir():
        copy = folder / f"altered{seed}"
        shutil.copytree(pack_path, copy)
        file = next(copy.glob("*.bin"))
    else:
        file = copy = folder / f"altered{seed}{pack_path.suffix}"
        shutil.copy(pack_path, copy)
    data = bytearray(file.read_bytes())
    most = len(data) if pack_path.is_dir() else min(len(data), 60_000)
    for _ in range(8):
        data[rng.randrange(24, most)] = rng.randrange(256)
    file.write_bytes(data)
    return copy


def test_k2_k3_k5_files_that_were_altered(
    pack_path: Path, backend_name: str, tmp_path: Path, one_thread: dict[str, int]
) -> None:
    for seed in range(6):
        path = altered(pack_path, tmp_path, seed)
        with suppress(ic.InferCoreError), ic.open_session(
            path, backend=backend_name, isolate=True, check_in_child=False, n_ctx=64,
            max_restarts=1, step_timeout=5.0, **one_thread,
        ) as session:  # fmt: skip
            session.ensure_prefix("Once upon a time")
            list(session.decode(max_tokens=4))


def test_k4_a_file_that_is_cut_while_it_is_mapped(
    pack_path: Path, backend_name: str, tmp_path: Path, one_thread: dict[str, int]
) -> None:
    if backend_name != "llamacpp":
        pytest.skip("an IR is read whole: a kill while it is loaded is tried with altered files")
    import shutil

    path = tmp_path / pack_path.name
    shutil.copy(pack_path, path)
    with ic.open_session(
        path, isolate=True, n_ctx=64, max_restarts=1, load_timeout=30.0, **one_thread
    ) as session:
        session.ensure_prefix("Once")
        os.truncate(path, 4096)

        def goes_on() -> None:
            for _ in range(3):
                session.ensure_prefix("Once upon a time there was")
                list(session.decode(max_tokens=20))
                os.kill(session.context.process.pid, 9)  # where the pages were read before

        with pytest.raises(ic.SessionFatalError):
            goes_on()


def test_k6_a_long_text_without_memory(
    pack_path: Path, backend_name: str, one_thread: dict[str, int]
) -> None:
    resource = pytest.importorskip("resource")
    if not hasattr(resource, "prlimit"):
        pytest.skip("limits of another process are Linux's")
    with ic.open_pool(
        pack_path, backend=backend_name, isolate=True, n_ctx=64, max_restarts=9, **one_thread
    ) as pool:
        pid = pool.process.pid
        limit = psutil.Process(pid).memory_info().vms + 60 * 2**20
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
        with suppress(ic.OutOfMemoryError, ic.SessionFatalError):
            assert len(pool.tokenizer.encode("ab " * 1_000_000)) > 1_000_000
        if pool.process.pid == pid:
            os.kill(pid, 9)  # the next one has no limit
        with pool.open_session() as session:
            assert told(session, n=3)


@pytest.mark.parametrize(
    ("how", "ended_by"), [("double free", "SIGABRT"), ("wild write", "SIGSEGV")]
)
def test_k8_a_kernel_that_writes_where_it_must_not(
    deadly: Any, expected: list[int], how: str, ended_by: str
) -> None:
    with deadly() as pool, pool.open_session() as good:
        assert told(good) == expected
        deadly.dies("decode", how, times=2)
        with pool.open_session() as bad, pytest.raises(ic.SessionFatalError, match=ended_by):
            told(bad, "The little dog saw a cat")
        assert told(good) == expected
        assert pool.stats().n_restarts == 2


def test_nobody_goes_on_with_other_weights(
    deadly: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    story = shutil.copytree(os.environ["STORY"], tmp_path / "story")
    monkeypatch.setenv("STORY", str(story))
    weights = next(story.glob("*.safetensors"))
    with deadly(max_restarts=1) as pool, pool.open_session() as session:
        expected = told(session)
        weights.touch()  # which changes nothing
        os.kill(pool.process.pid, signal.SIGKILL)
        assert told(session) == expected
    with deadly(max_restarts=1) as pool, pool.open_session() as session:
        told(session)
        stream = session.decode(max_tokens=12, temperature=0)
        next(stream)
        data = bytearray(weights.read_bytes())
        data[-4:] = b"\0\0\0\0"
        weights.write_bytes(data)
        os.kill(pool.process.pid, signal.SIGKILL)
        with pytest.raises(ic.SessionFatalError, match="have changed since this pool was opened"):
            list(stream)
        with pytest.raises(ic.SessionFatalError, match="have changed"):
            pool.open_session()
        assert pool.failure is not None
    assert "was ended by SIGKILL" in caplog.text
    with deadly() as pool, pool.open_session() as session:
        assert told(session)


FORKS = """
import os, sys, infercore as ic
pool = ic.open_pool(sys.argv[1], backend=sys.argv[2], isolate=True, n_ctx=64, n_threads=1)
session = pool.open_session()
session.ensure_prefix("Once")
first = [c.text for c in session.decode(max_tokens=3, temperature=0)]
pid = os.fork()
if pid == 0:
    try:
        session.ensure_prefix("Once")
    except ic.InvalidStateError:
        sys.exit(7)
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
session.ensure_prefix("Once")
assert first == [c.text for c in session.decode(max_tokens=3, temperature=0)]
print("well")
"""


def test_k7_a_program_that_forks(pack_path: Path, backend_name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(pack_path), backend_name],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "well"), done.stderr
