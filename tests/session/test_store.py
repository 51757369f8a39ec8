"""Sequences moved out: found by their tokens, never another's, and no trouble with a bad disk."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

import infercore as ic
from infercore.session import cache_folder
from infercore.session.cache_folder import Key, file_name, pack
from infercore.session.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ID = "identity"


def payload(tokens: list[int], n_bytes: int = 500) -> bytes:
    """Return bytes that belong to these tokens alone."""
    return random.Random(str(tokens)).randbytes(n_bytes)


def load(store: Store, tokens: list[int], namespace: str = "", identity: str = ID) -> object:
    found = store.find(namespace, identity, tokens)
    return None if found is None else (found.n_tokens, found.n_stored, found.load())


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return Store(n_bytes=2**20)
    return Store(folder=str(tmp_path / "cache"), folder_bytes=2**20)


def test_what_was_stored_comes_back(store: Store) -> None:
    tokens = [1, 2, 3, 70_000]
    assert store.put("", ID, tokens, payload(tokens))
    assert load(store, tokens) == (4, 4, payload(tokens))
    assert load(store, [*tokens, 9]) == (4, 4, payload(tokens))
    assert load(store, [1, 2, 9]) == (2, 4, payload(tokens))
    assert load(store, [9]) is None


def test_namespaces_and_identities_never_share(store: Store) -> None:
    store.put("a", ID, [1, 2, 3], b"secret")
    assert load(store, [1, 2, 3], "b") is None
    assert load(store, [1, 2, 3], "") is None
    assert load(store, [1, 2, 3], "a", "other identity") is None
    assert load(store, [1, 2, 3], "a") == (3, 3, b"secret")


def test_the_longest_beginning_is_found(store: Store) -> None:
    store.put("", ID, [1, 2, 3, 4, 5, 6], b"long")
    store.put("", ID, [1, 2, 7], b"other")
    assert load(store, [1, 2, 7, 8]) == (3, 3, b"other")
    assert load(store, [1, 2, 3, 4]) == (4, 6, b"long")


def test_a_longer_one_takes_the_place_of_its_beginnings(store: Store) -> None:
    store.put("", ID, [1, 2], b"short")
    store.put("", ID, [1, 2, 3, 4], b"long")
    assert load(store, [1, 2]) == (2, 4, b"long")
    assert store.put("", ID, [1, 2, 3], b"covered")
    assert load(store, [1, 2, 3]) == (3, 4, b"long")


@pytest.mark.parametrize("place", ["memory", "folder"])
def test_without_cutting_only_whole_entries_are_found(place: str, tmp_path: Path) -> None:
    store = (
        Store(n_bytes=2**20, can_cut=False)
        if place == "memory"
        else Store(folder=str(tmp_path / "c"), can_cut=False)
    )
    store.put("", ID, [1, 2], b"short")
    store.put("", ID, [1, 2, 3, 4], b"long")
    assert load(store, [1, 2, 3, 9]) == (2, 2, b"short")
    assert load(store, [1, 2, 3, 4, 5]) == (4, 4, b"long")


def test_flush_forgets_one_namespace_or_all(store: Store) -> None:
    store.put("a", ID, [1], b"of a")
    store.put("b", ID, [1], b"of b")
    store.flush("a")
    assert load(store, [1], "a") is None
    assert load(store, [1], "b") == (1, 1, b"of b")
    store.flush()
    assert load(store, [1], "b") is None


def test_memory_is_bounded_and_the_least_recently_used_go_to_the_folder(tmp_path: Path) -> None:
    store = Store(n_bytes=3500, folder=str(tmp_path / "c"))
    texts = [[i] * 4 for i in range(4)]
    for tokens in texts[:3]:
        store.put("", ID, tokens, payload(tokens, 1000))
    load(store, texts[0])
    store.put("", ID, texts[3], payload(texts[3], 1000))
    assert store.n_bytes <= 3500
    stored = [path.name for path in (tmp_path / "c").iterdir()]
    assert stored == [file_name(Key.of("", ID), texts[1])]
    assert all(load(store, tokens) == (4, 4, payload(tokens, 1000)) for tokens in texts)


def test_without_a_folder_the_least_recently_used_are_gone() -> None:
    store = Store(n_bytes=2500)
    for i in range(3):
        assert store.put("", ID, [i], bytes(1000))
    assert load(store, [0]) is None
    assert load(store, [2]) is not None
    assert not store.put("", ID, [9], bytes(5000))


def test_the_folder_is_bounded_and_the_least_recently_used_go(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    store = Store(folder=str(folder), folder_bytes=3500)
    for i in range(3):
        store.put("", ID, [i], bytes(1000))
        time.sleep(0.02)
    load(store, [0])
    store.put("", ID, [7], bytes(1000))
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 3500
    assert load(store, [1]) is None
    assert load(store, [0]) is not None
    assert not store.put("", ID, [8], bytes(5000))


def test_another_program_finds_what_was_closed_here(tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    first = Store(n_bytes=2**20, folder=folder)
    first.put("ns", ID, [5, 6], b"state")
    first.close()
    assert first.n_bytes == 0
    assert load(Store(folder=folder), [5, 6, 7], "ns") == (2, 2, b"state")


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_folder_and_files_are_their_owners_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = Store(folder=str(tmp_path / "deep" / "c"))
        store.put("", ID, [1], b"x")
    finally:
        os.umask(old)
    folder = tmp_path / "deep" / "c"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]
    (tmp_path / "open").mkdir(mode=0o755)
    Store(folder=str(tmp_path / "open"))
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o700


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_an_open_folder_with_other_files_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "letter.txt").write_text("dear")
    with pytest.raises(ic.InvalidInputError) as caught:
        Store(folder=str(folder))
    assert caught.value.field == "cache_dir"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_the_namespace_cannot_be_read_from_the_file(tmp_path: Path) -> None:
    Store(folder=str(tmp_path / "c")).put("sk-secret", ID, [1], b"x")
    (file,) = (tmp_path / "c").iterdir()
    assert b"sk-secret" not in file.read_bytes() + file.name.encode()


TOKENS = list(range(40))
WHOLE = b"".join(pack(Key.of("", ID), TOKENS, payload(TOKENS)))
REGIONS = {
    "magic": 0, "version": 7, "count": 8, "size": 12, "namespace": 20, "identity": 52,
    "first id": 84, "last id": 84 + 4 * 39, "first digest": 84 + 160, "payload": 84 + 176,
    "middle": 84 + 176 + 250, "last digest": len(WHOLE) - 16, "end": len(WHOLE) - 1,
}  # fmt: skip


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("known", [True, False], ids=["known before", "new"])
def test_a_change_anywhere_is_a_cold_start_with_one_warning(
    region: str,
    known: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "c"
    store = Store(folder=str(folder))
    store.put("", ID, TOKENS, payload(TOKENS))
    (file,) = folder.iterdir()
    assert file.read_bytes() == WHOLE
    if known:
        assert load(store, TOKENS) == (40, 40, payload(TOKENS))
    else:
        store = Store(folder=str(folder))
    damaged = bytearray(WHOLE)
    damaged[REGIONS[region]] ^= 0x41
    file.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        got = load(store, TOKENS)
        assert got is None or got == (40, 40, None)
        assert load(store, TOKENS) is None
    assert len(caplog.records) == 1
    assert not file.exists()
    assert store.put("", ID, TOKENS, payload(TOKENS))
    assert load(store, TOKENS) == (40, 40, payload(TOKENS))


@pytest.mark.parametrize("n_bytes", [0, 1, 83, 84, 100, 260, len(WHOLE) - 1, len(WHOLE) + 1])
def test_a_file_of_another_length_is_a_cold_start(n_bytes: int, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    Store(folder=str(folder)).put("", ID, TOKENS, payload(TOKENS))
    (file,) = folder.iterdir()
    file.write_bytes((WHOLE + b"more")[:n_bytes])
    assert load(Store(folder=str(folder)), TOKENS) is None


def test_a_whole_file_under_anothers_name_is_never_anothers_text(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    store = Store(folder=str(folder))
    store.put("", ID, [1, 2, 3], b"mine")
    store.put("other", ID, [1, 2, 3], b"theirs")
    assert load(store, [1, 2, 3]) == (3, 3, b"mine")  # both are known now
    mine = folder / file_name(Key.of("", ID), [1, 2, 3])
    shutil.copy(folder / file_name(Key.of("other", ID), [1, 2, 3]), mine)
    assert load(store, [1, 2, 3]) in [None, (3, 3, None)]
    shutil.copy(folder / file_name(Key.of("other", ID), [1, 2, 3]), mine)
    assert load(Store(folder=str(folder)), [1, 2, 3]) is None


@pytest.mark.skipif(os.name != "posix", reason="links need rights on Windows")
def test_a_link_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    store = Store(folder=str(folder))
    (tmp_path / "elsewhere").write_bytes(WHOLE)
    (folder / file_name(Key.of("", ID), TOKENS)).symlink_to(tmp_path / "elsewhere")
    assert load(store, TOKENS) is None
    assert (tmp_path / "elsewhere").exists()


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir(mode=0o700)
    (folder / "notes.txt").write_text("x" * 5000)
    store = Store(folder=str(folder), folder_bytes=2000)
    store.put("", ID, [1], bytes(1000))
    store.put("", ID, [2], bytes(1000))
    store.flush()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_disk_that_takes_nothing_is_one_warning(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(folder=str(tmp_path / "c"))

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cache_folder.os, "replace", fail)
    monkeypatch.setattr(cache_folder, "_RETRY_S", -1.0)
    for i in range(3):
        assert not store.put("", ID, [i], b"x")
        assert load(store, [i]) is None
    assert len(caplog.records) == 1
    assert list((tmp_path / "c").iterdir()) == []


def test_after_a_failure_the_disk_is_left_in_peace_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(folder=str(tmp_path / "c"))
    calls = itertools.count()

    def fail(*_: object) -> None:
        next(calls)
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(cache_folder.os, "replace", fail)
        assert not any(store.put("", ID, [i], b"x") for i in range(5))
    assert next(calls) == 1


def mounted(folder: Path, options: str) -> bool:
    mount = shutil.which("mount")
    if mount is None or sys.platform != "linux":
        return False
    command = [mount, "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KiB, where mounting is allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mounted(folder, "size=64k,mode=0700"):
        pytest.skip("mounting a file system is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=False)  # noqa: S607


def test_a_full_disk_loses_nothing_that_is_there(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(folder=str(disk))
    assert store.put("", ID, [1], bytes(30_000))
    assert not store.put("", ID, [2], bytes(60_000))
    assert not store.put("", ID, [3], bytes(60_000))
    assert load(store, [1]) == (1, 1, bytes(30_000))
    assert len(caplog.records) == 1
    assert len(list(disk.iterdir())) == 1


def test_a_read_only_disk_is_read(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    Store(folder=str(disk)).put("", ID, [1], b"there")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)  # noqa: S607
    store = Store(folder=str(disk))
    assert load(store, [1]) == (1, 1, b"there")
    assert not store.put("", ID, [2], b"x")
    store.flush()
    assert len(caplog.records) == 1


def test_a_path_that_is_no_folder_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("x")
    store = Store(folder=str(tmp_path / "file" / "c"))
    assert not store.put("", ID, [1], b"x")
    assert load(store, [1]) is None
    store.flush()
    assert len(caplog.records) == 1


HAMMER = """
import random, sys
from infercore.session.store import Store

folder, seed, n_rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
pick = random.Random(seed)
store = Store(folder=folder, folder_bytes=3_000_000)
print("ready", flush=True)
taken = 0
for _ in range(n_rounds):
    tokens = [pick.randrange(12)] * 3
    whole = random.Random(str(tokens)).randbytes(400_000)
    if pick.random() < 0.5:
        store.put("", "id", tokens, whole)
    else:
        found = store.find("", "id", tokens)
        data = None if found is None else found.load()
        assert data is None or data == whole, "another's bytes"
        taken += data is not None
print("taken", taken, flush=True)
"""


def hammer(folder: Path, seed: int, n_rounds: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HAMMER, str(folder), str(seed), str(n_rounds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX's")
def test_processes_share_a_folder_and_one_that_is_killed_leaves_nothing_taken(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "c"
    stays = [hammer(folder, seed, 300) for seed in (1, 2)]
    for seed in range(6):
        victim = hammer(folder, 10 + seed, 10**9)
        assert victim.stdout is not None
        assert victim.stdout.readline() == "ready\n"
        time.sleep(random.Random(seed).uniform(0.0, 0.1))
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        victim.stdout.close()
    for process in stays:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert int(out.split()[-1]) > 0
    store = Store(folder=str(folder))
    files = [path for path in folder.iterdir() if path.suffix == ".seq"]
    assert sum(path.stat().st_size for path in files) <= 3_000_000
    for i in range(12):
        got = load(store, [i] * 3, identity="id")
        assert got is None or got == (3, 3, random.Random(str([i] * 3)).randbytes(400_000))


def test_what_a_killed_writer_left_is_swept_later(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    store = Store(folder=str(folder))
    left = folder / f".{'0' * 64}.{'a' * 12}"
    left.write_bytes(WHOLE[:300])
    store.put("", ID, [1], b"x")
    assert left.exists()  # its writer may be at work
    old = time.time() - 3600
    os.utime(left, (old, old))
    store.put("", ID, [2], b"x")
    assert not left.exists()
