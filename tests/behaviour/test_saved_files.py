"""Saved sessions are read as files that others wrote: nothing of them is taken on trust."""

from __future__ import annotations

import copy
import json
import os
import stat
import time
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from infercore.engine import blob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PROMPT = "Once upon a time there was a baker named Mira"
ODD = (None, -1, 1.5, True, 2**40, 10**400, "x", [], [1], [None], {}, {"a": 1}, [["x", True, 1]])


@pytest.fixture
def saved(new_session: Any, tmp_path: Path) -> Path:
    session = new_session()
    session.ensure_prefix(PROMPT)
    session.prefill_suffix(", who lived")
    session.save(tmp_path / "session.snap")
    return tmp_path / "session.snap"


def with_note(data: bytes, change: Callable[[Any], Any]) -> bytes:
    """Return a saved session with another note, and right checksums."""
    header, payload, logits = blob.unpack(data)
    note = copy.deepcopy(header["note"])
    change(note)
    kept = {k: v for k, v in header.items() if k not in {"payload_bytes", "logits_bytes"}}
    return blob.pack({**kept, "note": note}, payload, logits)


def places(note: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a note."""
    items = note.items() if isinstance(note, dict) else ()
    for key, value in items:
        yield (*path, key)
        if key != "segments":
            yield from places(value, (*path, key))


def put(path: tuple[Any, ...], value: object) -> Callable[[Any], None]:
    def change(note: Any) -> None:
        for key in path[:-1]:
            note = note[key]
        if value is KeyError:
            del note[path[-1]]
        else:
            note[path[-1]] = value

    return change


def use(session: Any) -> None:
    session.explain_context()
    session.ensure_prefix(PROMPT)
    session.prefill_suffix(" and more")
    list(session.decode(max_tokens=2, temperature=0))


def test_a_note_is_taken_whole_or_refused(new_session: Any, saved: Path) -> None:
    data = saved.read_bytes()
    session = new_session()
    n_refused = 0
    for path in places(blob.read_header(data)["note"]):
        for value in (*ODD, KeyError):
            saved.write_bytes(with_note(data, put(path, value)))
            try:
                session.load(saved)
            except (ic.SnapshotError, ic.ManifestMismatchError):
                n_refused += 1
                continue
            use(session)
    assert n_refused > 100
    for odd in (with_note(data, lambda note: note.update(more=1)), data + b"x", data[:-1]):
        saved.write_bytes(odd)
        with pytest.raises(ic.SnapshotError):
            session.load(saved)
    saved.write_bytes(data)
    session.load(saved)
    use(session)


def test_a_snapshot_is_its_owners_alone(new_session: Any, tmp_path: Path) -> None:
    session = new_session()
    session.ensure_prefix(PROMPT)
    before = os.umask(0o000)
    try:
        session.save(tmp_path / "new.snap")
        (tmp_path / "old.snap").touch(0o640)
        session.save(tmp_path / "old.snap")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new.snap", "old.snap")]
    assert modes == [0o600, 0o640]


def test_a_path_that_cannot_be_written_is_refused(new_session: Any, tmp_path: Path) -> None:
    session = new_session()
    session.ensure_prefix(PROMPT)
    (tmp_path / "file").touch()
    for odd in (tmp_path, tmp_path / "none" / "x.snap", tmp_path / "file" / "x.snap"):
        with pytest.raises(ic.InvalidInputError) as caught:
            session.save(odd)
        assert (caught.value.field, caught.value.value) == ("path", str(odd))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    session.save(tmp_path / "right.snap")


@pytest.mark.parametrize("kind", ["pipe", "zeros", "random", "sparse", "folder", "header"])
def test_what_never_ends_is_refused_at_once(session: Any, saved: Path, kind: str) -> None:
    path = saved.with_name("odd.snap")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in {"zeros", "random"}:
        path.symlink_to("/dev/zero" if kind == "zeros" else "/dev/urandom")
    else:
        start = saved.read_bytes() if kind == "sparse" else b"infcstat" + b"\xff" * 8
        path.write_bytes(start)
        os.truncate(path, 40 * 2**30)
    started = time.perf_counter()
    with pytest.raises(ic.SnapshotError):
        session.load(path)
    assert time.perf_counter() - started < 10


def test_a_header_with_odd_sizes_is_refused(session: Any, saved: Path) -> None:
    data = saved.read_bytes()
    header, payload, logits = blob.unpack(data)
    for name in ("payload_bytes", "logits_bytes"):
        for value in (-1, True, 1.5, 2**62, 2**70, None):
            text = json.dumps({**header, name: value}).encode()
            start = b"infcstat" + len(text).to_bytes(8, "little") + text
            body = start + blob._checksum(start) + bytes(payload) + bytes(logits)
            saved.write_bytes(body + blob._checksum(body))
            with pytest.raises(ic.SnapshotError):
                session.load(saved)
