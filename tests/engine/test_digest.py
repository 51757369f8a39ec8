from __future__ import annotations

import errno
import hashlib
import json
import os

import pytest

import infercore as ic
from infercore.engine import digest


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("INFERCORE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digest, "_memory", {})
    return tmp_path / "cache" / "infercore" / "digests.json"


def written(path, data):
    path.write_bytes(data)
    return str(path)


def test_one_file_has_its_own_digest(tmp_path):
    file = written(tmp_path / "a", b"abc")
    assert digest.of_files([file]) == hashlib.sha256(b"abc").hexdigest()


def test_several_files_count_with_their_names_in_any_order(tmp_path):
    a, b = written(tmp_path / "a", b"1"), written(tmp_path / "b", b"2")
    assert digest.of_files([a, b]) == digest.of_files([b, a])
    c, d = written(tmp_path / "c", b"1"), written(tmp_path / "d", b"2")
    assert digest.of_files([c, d]) != digest.of_files([a, b])


def test_a_changed_file_has_another_digest(tmp_path):
    file = written(tmp_path / "a", b"abc")
    before = digest.of_files([file])
    written(tmp_path / "a", b"abcd")
    assert digest.of_files([file]) != before


def test_a_large_file_is_hashed_once(tmp_path, monkeypatch, own_cache):
    monkeypatch.setattr(digest, "_REMEMBER_FROM_BYTES", 2)
    file = written(tmp_path / "a", b"abc")
    first = digest.of_files([file])
    assert first in json.loads(own_cache.read_text()).values()
    monkeypatch.setattr(digest, "_memory", {})
    monkeypatch.setattr(digest, "_hash", lambda _: pytest.fail("hashed again"))
    assert digest.of_files([file]) == first


@pytest.mark.parametrize("content", ["", "[1]", "{", "null"])
def test_a_broken_cache_is_only_computed_again(tmp_path, monkeypatch, own_cache, content):
    monkeypatch.setattr(digest, "_REMEMBER_FROM_BYTES", 2)
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text(content)
    file = written(tmp_path / "a", b"abc")
    assert digest.of_files([file]) == hashlib.sha256(b"abc").hexdigest()


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "_REMEMBER_FROM_BYTES", 2)
    (tmp_path / "cache").write_text("a file where the folder should be")
    file = written(tmp_path / "a", b"abc")
    assert digest.of_files([file]) == hashlib.sha256(b"abc").hexdigest()


@pytest.mark.parametrize("where", ["elsewhere", "none", ""])
def test_the_cache_can_be_moved_and_left_out(tmp_path, monkeypatch, own_cache, where):
    folder = str(tmp_path / where) if where == "elsewhere" else where
    monkeypatch.setenv("INFERCORE_CACHE_DIR", folder)
    monkeypatch.setattr(digest, "_REMEMBER_FROM_BYTES", 2)
    file = written(tmp_path / "a", b"abc")
    assert digest.of_files([file]) == hashlib.sha256(b"abc").hexdigest()
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("digests.json")}
    usual = str(own_cache.relative_to(tmp_path))
    assert found == {"elsewhere": {"elsewhere/digests.json"}, "none": set(), "": {usual}}[where]


def test_without_a_home_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.delenv("INFERCORE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(digest, "_REMEMBER_FROM_BYTES", 2)
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path / "a", b"abc")
    assert digest.of_files([file]) == hashlib.sha256(b"abc").hexdigest()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_no_file_left_is_lack_of_memory(tmp_path, monkeypatch):
    path = tmp_path / "m"
    path.write_bytes(b"x")

    def full(_path):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(digest, "open_regular", full)
    with pytest.raises(ic.OutOfMemoryError, match="no more to give"):
        digest.of_files([str(path)])
