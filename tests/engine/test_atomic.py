"""Files are written whole or not at all, and as their owner left them."""

from __future__ import annotations

import os
import stat
import threading
from typing import TYPE_CHECKING

import pytest

from engine.interrupts import interrupt
from infercore.engine import atomic
from infercore.engine.atomic import write_whole

if TYPE_CHECKING:
    from pathlib import Path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    plain, path = tmp_path / "plain", tmp_path / "whole"
    plain.touch()
    write_whole(path, b"abc")
    assert path.read_bytes() == b"abc"
    assert mode(path) == mode(plain)


def test_an_older_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    path.write_bytes(b"older")
    path.chmod(0o640)
    write_whole(str(path), b"newer")
    assert (path.read_bytes(), mode(path)) == (b"newer", 0o640)


def test_a_link_leads_to_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    path, link = tmp_path / "folder" / "whole", tmp_path / "link"
    link.symlink_to(path)
    for data in (b"first", b"second"):
        write_whole(link, data)
        assert link.is_symlink()
        assert path.read_bytes() == data
    assert os.listdir(path.parent) == ["whole"]


def test_a_pipe_is_written_to_in_place(tmp_path: Path) -> None:
    path, came = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: came.append(path.read_bytes()))
    reader.start()
    write_whole(path, b"abc")
    reader.join(60)
    assert came == [b"abc"]
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_what_fails_leaves_the_older_file_and_nothing_else(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / ("a name as long as they may be " * 8)
    path.write_bytes(b"older")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"newer")
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]


# A file that was opened when the interruption came is closed by its end: nobody else has it yet.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO")
def test_an_interruption_anywhere_leaves_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    for n in range(1, 200):
        path.write_bytes(b"older")
        if not interrupt(n, lambda: write_whole(path, b"newer"), (atomic.__file__,)):
            return
        assert path.read_bytes() in {b"older", b"newer"}
        assert os.listdir(tmp_path) == ["whole"], n
    pytest.fail("there are more places than were tried")


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "no" / "such" / "folder"
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(path, b"")
    assert caught.value.filename == str(path)
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, b"")
