"""What is free within the limits of a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

ROOM, RESERVE = 300 * 2**20, 48 * 2**20
SCRIPT = """
import resource, sys
from pathlib import Path
from infercore import free_bytes
kind, page = getattr(resource, sys.argv[1]), int(sys.argv[2])
taken = int(Path("/proc/self/statm").read_text().split()[page]) * resource.getpagesize()
before = free_bytes()
resource.setrlimit(kind, (taken + int(sys.argv[3]), resource.RLIM_INFINITY))
print(before, free_bytes(), free_bytes(address_space=False))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="where the kernel keeps the limits")
@pytest.mark.parametrize(("limit", "page"), [("RLIMIT_AS", 0), ("RLIMIT_DATA", 5)])
def test_limits_of_the_process_count(limit: str, page: int) -> None:
    command = [sys.executable, "-c", SCRIPT, limit, str(page), str(ROOM)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, limited, of_the_system = map(int, done.stdout.split())
    if before < 2 * ROOM:
        pytest.skip(f"{before} bytes are free here, so the limit is not the least")
    assert ROOM - 2 * RESERVE < limited <= ROOM - RESERVE
    assert of_the_system > limited
