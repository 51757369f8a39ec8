"""Files of others are read up to a bound, whatever their size says."""

from __future__ import annotations

import os
import tracemalloc

import pytest

import infercore as ic


def test_a_file_is_read_up_to_its_bound(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert ic.read_regular(path, 100) == b"x" * 100
    for most_bytes in (99, 1, 0):
        with pytest.raises(OSError, match=f"larger than {most_bytes} bytes"):
            ic.read_regular(path, most_bytes)


def test_a_giant_is_refused_without_being_read(tmp_path):
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 1 << 40)
    tracemalloc.start()
    try:
        with pytest.raises(OSError, match="larger than 1,000 bytes"):
            ic.read_regular(path, 1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_small_file_takes_no_room_for_its_bound(tmp_path):
    path = tmp_path / "small"
    path.write_bytes(b"x")
    tracemalloc.start()
    try:
        assert ic.read_regular(path, 1 << 34) == b"x"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("odd", [None, -1, 1.5, "x", True])
def test_an_odd_bound_is_refused(tmp_path, odd):
    with pytest.raises(ic.InvalidInputError, match="most_bytes"):
        ic.read_regular(tmp_path, odd)
