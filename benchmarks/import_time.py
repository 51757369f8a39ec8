"""How long imports take, each in a process of its own, in turns."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pairs

from infercore.measuring.stats import in_turns

MODULES = {
    "infercore": "infercore",
    "infercore, and llama.cpp": "infercore_llamacpp.model",
    "infercore, and OpenVINO": "infercore_openvino.model",
    "llama_cpp": "llama_cpp",
    "openvino": "openvino",
    "openvino_genai": "openvino_genai",
}
"""What is imported; infercore imports an engine with the first model that is loaded with it."""
PROBE = """
import time
begun = time.perf_counter()
import {module}
print((time.perf_counter() - begun) * 1e3)
"""


def milliseconds(module: str) -> float:
    """Return the milliseconds that ``import module`` takes in a fresh interpreter."""
    command = [sys.executable, "-c", PROBE.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    options = pairs.parser(__doc__, rounds=9, engine=False).parse_args()
    runs = {
        name: lambda module=module: milliseconds(module)
        for name, module in MODULES.items()
        if importlib.util.find_spec(module.partition(".")[0]) is not None
    }
    in_turns(runs, 1)
    rows = pairs.rows_of(in_turns(runs, options.rounds), model="", figure="import time", unit="ms")
    pairs.finish("import_time", rows, options)


if __name__ == "__main__":
    main()
