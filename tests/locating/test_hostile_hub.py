"""A hub that lies, or that somebody else answers for: typed errors, and nothing is filled."""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import infercore as ic
from hub_server import Hub
from infercore.locating import locate
from infercore.locating.hub import fetch

REPO, Q4 = "someone/story-GGUF", "story-Q4_K_M.gguf"
DATA = b"GGUF four" * 50_000
GRAPH, WEIGHTS = "openvino_model.xml", "openvino_model.bin"
FETCH = """
import signal, sys
import infercore as ic
from infercore.locating import locate
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print(locate(sys.argv[1]))
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.fixture
def repo(hub):
    hub.repos[REPO] = {Q4: DATA}
    return hub.repos[REPO]


def stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def answer(handler, data: bytes, **headers: str) -> None:
    handler.send_response(200)
    for key, value in {"Content-Length": str(len(data)), **headers}.items():
        handler.send_header(key.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(data)


def without_end(handler) -> None:
    """Answer in pieces, of which there is no last one."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    piece = b"[" * (1 << 20)
    until = time.monotonic() + 60
    while time.monotonic() < until and handler.command == "GET":
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))


def packed(handler) -> None:
    answer(handler, gzip.compress(bytes(1 << 28)), Content_Encoding="gzip")


@pytest.mark.parametrize("lie", [without_end, packed])
def test_a_list_of_files_without_end_fills_no_memory(hub, repo, tmp_path, lie) -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    hub.lies[""] = lie
    with pytest.raises(ic.ModelLoadError, match=r"more came than 16,777,216 bytes"):
        locate(f"hf:{REPO}")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10
    assert stored(tmp_path) == 0


@pytest.mark.parametrize("lie", [without_end, packed])
@pytest.mark.parametrize("file", [GRAPH, WEIGHTS])
def test_a_file_without_end_fills_no_disk(hub, tmp_path, file, lie) -> None:
    hub.repos[REPO] = {GRAPH: b"<net/>" * 100, WEIGHTS: b"1" * 5000}
    hub.lies[file] = lie
    with pytest.raises(ic.ModelLoadError, match="more came than"):
        locate(f"hf:{REPO}")
    assert stored(tmp_path) < 20_000


def test_another_host_gets_no_token(hub, repo, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with Hub(repos={REPO: dict(repo)}) as other:

        def elsewhere(handler) -> None:
            handler.send_response(302)
            handler.send_header("Location", other.url + handler.path)
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        hub.lies[Q4] = elsewhere
        assert Path(locate(f"hf:{REPO}")).read_bytes() == DATA
        assert hub.tokens
        assert set(hub.tokens) == {"Bearer hf_secret"}
        assert other.requests
        assert set(other.tokens) == {None}


@pytest.mark.parametrize(
    "to", ["file:///etc/passwd", "gopher://x/", "http://[::1", "", "/{self}", "http://127.0.0.1:1/"]
)
@pytest.mark.parametrize("file", ["", Q4])
def test_a_way_to_nowhere_is_typed(hub, repo, tmp_path, to, file, monkeypatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the library's, between its tries

    def elsewhere(handler) -> None:
        handler.send_response(302)
        handler.send_header("Location", to.replace("/{self}", handler.path))
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    hub.lies[file] = elsewhere
    with pytest.raises(ic.ModelLoadError):
        locate(f"hf:{REPO}")
    assert stored(tmp_path) == 0


@pytest.mark.parametrize("length", ["-5", "many", "5", str(10**30)])
def test_a_wrong_length_is_typed(hub, repo, tmp_path, length, monkeypatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)

    def lie(handler) -> None:
        answer(handler, DATA, Content_Length=length)
        handler.close_connection = True

    hub.lies[Q4] = lie
    with pytest.raises(ic.ModelLoadError):
        locate(f"hf:{REPO}")
    assert stored(tmp_path) <= len(DATA)


def test_a_checksum_of_the_wrong_file_is_not_taken_from_a_header(hub, tmp_path) -> None:
    """What the list of files says holds, whatever comes with the file."""
    hub.repos[REPO] = {GRAPH: b"<net/>", WEIGHTS: b"1"}
    hub.lies[GRAPH] = lambda handler: answer(
        handler, b"<evil/>"[:6], ETag='"../../../evil"', X_Repo_Commit="../../../evil"
    )
    with pytest.raises(ic.ModelLoadError, match="checksum"):
        locate(f"hf:{REPO}")
    assert not list(tmp_path.rglob("*evil*"))


def test_names_that_differ_by_case_alone_are_not_guessed(hub) -> None:
    hub.repos[REPO] = {"Story-Q4_0.gguf": b"a", "story-q4_0.GGUF": b"b"}
    with pytest.raises(ic.ModelLoadError, match="large and small letters"):
        locate(f"hf:{REPO}:Story-Q4_0.gguf")


@pytest.mark.parametrize(
    ("place", "kind"),
    [(place, kind) for place in ("blob", "snapshot", "lock") for kind in ("pipe", "folder", "link")
     if (place, kind) != ("lock", "pipe")],  # who may make that one may hold the lock as well
)  # fmt: skip
def test_what_somebody_put_in_the_cache_is_no_trap(hub, repo, tmp_path, place, kind) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    sha, folder = hashlib.sha256(DATA).hexdigest(), "models--someone--story-GGUF"
    cache = tmp_path / "cache"
    path = {
        "blob": cache / folder / "blobs" / sha,
        "snapshot": cache / folder / "snapshots" / hub.commit(REPO) / Q4,
        "lock": cache / ".locks" / folder / f"{sha}.lock",
    }[place]
    path.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(mine)
    try:
        found = Path(locate(f"hf:{REPO}:Q4_K_M"))
    except ic.ModelLoadError:
        pass
    else:
        assert place != "blob" or found.read_bytes() == DATA
    assert mine.read_bytes() == b"mine"


def fetching(*, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", FETCH, f"hf:{REPO}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


@pytest.fixture
def env(hub, tmp_path):
    return {
        **os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }  # fmt: skip


def test_ctrl_c_leaves_what_came_and_the_next_pull_goes_on(hub, repo, env, tmp_path) -> None:
    hub.stalls[Q4] = 200_000
    child = fetching(env=env)
    until = time.monotonic() + 60
    while not hub.bodies(Q4) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=60)[0].strip() == "interrupted"
    assert Path(locate(f"hf:{REPO}")).read_bytes() == DATA
    assert not list(tmp_path.rglob("*.incomplete"))


def test_pulls_of_two_processes_share_one_download(hub, repo, env) -> None:
    children = [fetching(env=env) for _ in range(2)]
    paths = {child.communicate(timeout=60)[0].strip() for child in children}
    assert len(paths) == 1
    assert Path(paths.pop()).read_bytes() == DATA
    assert len(hub.bodies(Q4)) == 1


@pytest.mark.parametrize("links", [True, False])
def test_who_comes_second_leaves_what_the_first_opens(
    hub, repo, tmp_path, monkeypatch, links
) -> None:
    import huggingface_hub

    if not links:
        monkeypatch.setattr(os, "symlink", refuse_links(PermissionError(errno.EPERM, "no")))
    real, removed = huggingface_hub.utils.WeakFileLock, []

    @contextlib.contextmanager
    def after_the_first(path):
        monkeypatch.setattr(huggingface_hub.utils, "WeakFileLock", real)
        locate(f"hf:{REPO}")
        monkeypatch.setattr(os, "unlink", removed.append)
        monkeypatch.setattr(os, "replace", lambda *paths: removed.append(paths))
        with real(path):
            yield

    monkeypatch.setattr(huggingface_hub.utils, "WeakFileLock", after_the_first)
    assert Path(locate(f"hf:{REPO}")).read_bytes() == DATA
    assert removed == []
    assert len(hub.bodies(Q4)) == 1


def refuse_links(error: Exception):
    def refuse(*_) -> None:
        raise error

    return refuse


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EINVAL, "a required privilege is not held by the client"),  # Windows, 1314
        OSError(errno.ENOTSUP, "no"), OSError(errno.ENOSYS, "no"),
        PermissionError(errno.EPERM, "no"), NotImplementedError(),
    ],
    ids=repr,
)  # fmt: skip
def test_without_links_the_file_itself_is_in_the_snapshot(
    hub, repo, tmp_path, monkeypatch, error
) -> None:
    monkeypatch.setattr(os, "symlink", refuse_links(error))
    path = Path(locate(f"hf:{REPO}"))
    assert path.read_bytes() == DATA
    assert not path.is_symlink()
    assert stored(tmp_path / "cache" / "models--someone--story-GGUF" / "blobs") == 0
    assert locate(f"hf:{REPO}") == str(path)
    assert len(hub.bodies(Q4)) == 1


def older_http_get(
    url, temp_file, *, proxies=None, resume_size=0, headers=None, displayed_filename=None
) -> None:
    """Do as `huggingface_hub` 0.34 to 1.4: any answer is appended, and another one writes by name.

    The latter is `hf_transfer`, where it is enabled, and nothing is resumed or sent by a proxy.
    """
    import huggingface_hub

    span = {"Range": f"bytes={resume_size}-"} if resume_size else {}
    with contextlib.ExitStack() as stack:
        asked = urllib.request.Request(url, headers={**headers, **span})  # noqa: S310
        body = stack.enter_context(urllib.request.urlopen(asked))  # noqa: S310
        by_name = getattr(huggingface_hub.constants, "HF_HUB_ENABLE_HF_TRANSFER", False)
        if by_name and proxies is None and not resume_size and displayed_filename is not None:
            temp_file = stack.enter_context(open(temp_file.name, "wb"))
        while chunk := body.read(1 << 16):
            temp_file.write(chunk)


@pytest.fixture
def older_library(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.file_download, "http_get", older_http_get)
    return huggingface_hub


def test_a_server_that_ignores_ranges_is_asked_from_the_start(
    hub, repo, tmp_path, older_library
) -> None:
    partial = part_of(tmp_path)
    partial.write_bytes(DATA[:100_000])
    hub.lies[Q4] = lambda handler: answer(handler, DATA)
    assert Path(locate(f"hf:{REPO}")).read_bytes() == DATA
    assert hub.bodies(Q4) == ["bytes=100000-", None]
    assert not partial.exists()


def test_what_goes_on_after_a_part_is_asked_for_twice_and_no_more(
    hub, repo, tmp_path, older_library
) -> None:
    part_of(tmp_path).write_bytes(DATA[:100_000])
    hub.lies[Q4] = without_end
    with pytest.raises(ic.ModelLoadError, match="more came than"):
        locate(f"hf:{REPO}")
    assert hub.bodies(Q4) == ["bytes=100000-", None]
    assert stored(tmp_path) <= len(DATA)


def part_of(folder: Path) -> Path:
    """Return where the first part of the file lies, after a download that broke off."""
    blobs = folder / "cache" / "models--someone--story-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    return blobs / f"{hashlib.sha256(DATA).hexdigest()}.incomplete"


def test_a_faster_download_is_bounded_too(hub, repo, tmp_path, older_library, monkeypatch) -> None:
    monkeypatch.setattr(older_library.constants, "HF_HUB_ENABLE_HF_TRANSFER", True, raising=False)
    assert Path(locate(f"hf:{REPO}")).read_bytes() == DATA
    before = stored(tmp_path)
    hub.repos[REPO] = {Q4: b"GGUF newer"}
    hub.lies[Q4] = lambda handler: answer(handler, b"x" * 8_000_000)
    with pytest.raises(ic.ModelLoadError, match="more came than"):
        fetch(REPO, kinds=["gguf"], update=True)
    assert stored(tmp_path) <= before + 100


@pytest.mark.skipif(sys.platform != "linux", reason="a limit that the kernel keeps")
def test_a_disk_that_is_full_is_typed_and_leaves_no_model(hub, repo, env, tmp_path) -> None:
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "import infercore as ic\nfrom infercore.locating import locate\n"
        f"try: locate('hf:{REPO}')\nexcept ic.ModelLoadError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert "there is no room" in done.stdout, done.stderr
    assert stored(tmp_path / "cache") <= 20_000


@pytest.mark.parametrize("place", ["blobs", ".."])
def test_what_the_library_must_fetch_is_compared_too(hub, repo, monkeypatch, place) -> None:
    """A file too large for a plain request; what is damaged goes, a file elsewhere stays."""
    import huggingface_hub

    folder = Path(huggingface_hub.constants.HF_HUB_CACHE) / "models--someone--story-GGUF"
    real, path = folder / place / "bytes", folder / "snapshots" / Q4
    for each in (real, path):
        each.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(real)
    monkeypatch.setattr(huggingface_hub.constants, "MAX_HTTP_DOWNLOAD_SIZE", 10)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(path))
    real.write_bytes(DATA)
    assert locate(f"hf:{REPO}") == str(path)
    real.write_bytes(DATA[::-1])
    with pytest.raises(ic.ModelLoadError, match="checksum"):
        fetch(REPO, kinds=["gguf"], update=True)
    assert not path.is_symlink()
    assert real.exists() is (place == "..")
