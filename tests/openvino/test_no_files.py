"""Where no file can be opened, the engine finds no processors and divides by their number."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pack

SOURCE = """
import os, resource, sys
import infercore as ic
model = ic.load_model(sys.argv[1], backend="openvino", check_in_child=False)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = []
try:
    while True:
        held.append(os.open(os.devnull, 0))
except OSError:
    pass
try:
    model.new_context(n_ctx=64)
except ic.OutOfMemoryError:
    pass
else:
    sys.exit("it was opened")
for file in held:
    os.close(file)
model.new_context(n_ctx=64).decode([5, 6, 7])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
def test_no_files_left_is_typed() -> None:
    pack.need_backend("openvino")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SOURCE, str(pack.model_path("openvino"))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
