"""The child's entry: all cases, run by `rig.main`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from process import calls, files, rig, silent  # noqa: F401  (they fill the table)

if __name__ == "__main__":
    rig.main(sys.argv[1:])
