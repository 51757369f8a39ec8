"""Make all results: the models that are missing, each part's JSON, then tables and plots.

    python benchmarks/run_all.py --models DIR

A part whose file is in the folder of results is not run again, unless --again: so what was
interrupted goes on where it was. On a machine with two cores all of it takes about a quarter of an
hour, if nothing else runs there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SHAPES = {"0.5b": "0.5b-ir", "0.35b-hybrid": "", "1b": "1b-ir"}
STORY = "storyteller"
PARTS: dict[str, str] = {
    "throughput-gguf": "throughput.py {0.5b} --rounds 9 --tokens 48",
    "throughput-ir": "throughput.py {0.5b-ir} --rounds 7 --tokens 32 --prefill-rounds 5",
    "warm-prefix-gguf": "warm_prefix.py {0.5b} --prefix 128 512 2048 --rounds 3",
    "warm-prefix-ir": "warm_prefix.py {0.5b-ir} --prefix 128 512 2048 --rounds 4",
    "warm-prefix-ir-spread": "warm_prefix.py {0.5b-ir} --prefix 2048 --rounds 4 --spread",
    "agent-loop-hybrid": "agent_loop.py {0.35b-hybrid} --variant edited",
    "agent-loop": "agent_loop.py {0.5b}",
    "state": "state.py {0.5b} {0.5b-ir}",
    "memory": "memory.py {0.5b} {0.5b-ir}",
    "parallel": "parallel.py {0.5b} {0.5b-ir}",
    "layer": "decode_overhead.py {storyteller} --threads 1",
    "import-time": "import_time.py",
    "as-it-comes-warm": "warm_prefix.py {0.5b-ir} --prefix 2048 --rounds 4",
    "as-it-comes-lengths": "lengths.py {0.5b-ir}",
    "as-it-comes-1b": "throughput.py {1b-ir} --rounds 3 --tokens 8 --prefill 128",
    "as-it-comes-fork": "state.py {0.5b-ir} --rounds 3",
    "throughput-1b": (
        "throughput.py {1b} {1b-ir} --rounds 5 --tokens 32 --prefill 256 --prefill-rounds 2"
    ),
    "warm-prefix-gguf-8k": "warm_prefix.py {0.5b} --prefix 8192 --rounds 1",
    "warm-prefix-ir-8k": "warm_prefix.py {0.5b-ir} --prefix 8192 --rounds 1",
}
QUICK = {
    "--rounds 9": "--rounds 2",
    "--rounds 5": "--rounds 2",
    "--rounds 4": "--rounds 1",
    "--rounds 3": "--rounds 1",
    "--tokens 48": "--tokens 16",
    "128 512 2048": "128 512",
    "--prefix 2048": "--prefix 512",
    "{0.35b-hybrid}": "{0.35b-hybrid} --turns 4",
    "agent_loop.py {0.5b}": "agent_loop.py {0.5b} --turns 4",
    "--prefix 8192": "--prefix 1024",
}


def make_models(folder: Path) -> dict[str, str]:
    """Write the models that ``folder`` lacks, and return all by name."""
    import infercore_models  # noqa: PLC0415  (the tiny one)

    found = {STORY: str(infercore_models.path(STORY, "gguf-f32"))}
    for shape, ir in SHAPES.items():
        file = folder / f"{shape}-q8_0.gguf"
        if not file.is_file() or (ir and not (folder / ir / "config.json").is_file()):
            run([str(HERE / "make_model.py"), str(folder), "--shape", shape])
        found[shape] = str(file)
        if ir:
            found[ir] = str(folder / ir)
    return found


def run(arguments: list[str]) -> bool:
    done = subprocess.run([sys.executable, *arguments], check=False)  # noqa: S603
    return done.returncode == 0


def run_part(part: str, models: dict[str, str], options: argparse.Namespace) -> bool:
    """Run a part and tell whether it went well; its file is there only then."""
    target = options.results / f"{part}.json"
    if target.is_file() and not options.again:
        print(f"-- {part}: {target.name} is there")
        return True
    line = PARTS[part]
    if options.quick:
        for usual, shorter in QUICK.items():
            line = line.replace(usual, shorter)
    words = line.split()
    given = [models.get(word.strip("{}"), word) if "{" in word else word for word in words[1:]]
    threads = [] if part in {"layer", "import-time"} else ["--threads", str(options.threads)]
    print(f"-- {part}: {line}", flush=True)
    begun = time.monotonic()
    fine = run([str(HERE / words[0]), *given, *threads, "--json", str(target)])
    print(f"-- {part}: {'done' if fine else 'FAILED'} in {time.monotonic() - begun:.0f} s")
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True, help="where models are or will be")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--only", action="append", choices=sorted(PARTS))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--again", action="store_true", help="run what is there already too")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, shorter prompts")
    parser.add_argument("--plots", type=Path, help="passed on to report.py")
    parser.add_argument("--page", type=Path, action="append", help="passed on to report.py")
    options = parser.parse_args()
    models = make_models(options.models)
    parts = [part for part in PARTS if part in (options.only or PARTS)]
    failed = [part for part in parts if not run_part(part, models, options)]
    pages = [word for page in options.page or () for word in ("--page", str(page))]
    plots = ["--plots", str(options.plots)] if options.plots else []
    run([str(HERE / "report.py"), "--results", str(options.results), *plots, *pages])
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
