"""Do what README.md says in a fresh clone, as somebody who has just found it: print what worked.

    python tools/try_readme.py [--work FOLDER]

The clone is of the last commit. The first command is run with its installation (about a minute and
400 MB); then every other line and the program, in order, with a stand-in for the hub that has the
pack's storyteller as ``ORG/REPO``. The command that runs the tests is left out: ``.ci/run`` runs
it. Ends with 1 where something did not work. Needs git; ``tests/docs/test_readme.py`` does the
same in the environment of the tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "models" / "src")]

from docs import newcomer  # noqa: E402  (it stands beside the tests)
from hub_server import Hub  # noqa: E402


def main() -> None:
    """Clone, follow, print."""
    parser = argparse.ArgumentParser(description="do what README says in a fresh clone")
    parser.add_argument("--work", type=Path, help="an empty folder to work in, which is kept")
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(given.work or folder).resolve()
        clone = work / "infercore"
        git = shutil.which("git") or "git"
        subprocess.run([git, "clone", "-q", str(ROOT), str(clone)], check=True)
        hidden = ("INFERCORE_", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "HF_")
        kept = {name: os.environ[name] for name in os.environ if not name.startswith(hidden)}
        places = {"INFERCORE_CONFIG_DIR": str(work / "config"), "HF_HOME": str(work / "hub")}
        with Hub() as hub:
            hub.repos["ORG/REPO"] = newcomer.storyteller("openvino")
            environment = {**kept, **places, "HF_ENDPOINT": hub.url}
            steps = newcomer.follow(clone, environment, install=True)
    for step in steps:
        state = "FAILED" if not step.worked else "absent" if step.kind == newcomer.SKIPPED else "ok"
        print(f"{state:<6} {step.line}")
        if not step.worked:
            print(step.said)
    missed = newcomer.left_out(steps)
    print("\n".join(f"NOT RUN {line}" for line in missed))
    print(f"{sum(step.worked for step in steps)} of {len(steps)}, {time.monotonic() - began:.0f} s")
    sys.exit(bool(missed) or not all(step.worked for step in steps))


if __name__ == "__main__":
    main()
