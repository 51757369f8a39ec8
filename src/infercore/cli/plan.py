"""``infercore plan``: the memory that a model will take, before it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import infercore
from infercore.cli.loading import plain, plan_fields
from infercore.cli.options import SectionCommand, context_options, model_options
from infercore.cli.output import mebibytes, print_json, print_table

if TYPE_CHECKING:
    from infercore import MemoryPlan

_CGROUP = Path("/sys/fs/cgroup")


@click.command(cls=SectionCommand)
@model_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON; sizes in bytes.")
@context_options()
def plan(model: str, as_json: bool, **options: Any) -> None:  # noqa: FBT001  (click passes flags)
    """Tell how much memory MODEL and a context on it will take, without loading it.

    The sum is set against the memory that is free on this machine now. It counts all devices
    together; infercore backends --devices tells what a GPU has.
    """
    fields = plan_fields(model, options)
    found = infercore.plan_memory(model, backend=options["backend"], **fields)
    free = free_bytes()
    if as_json:
        print_json({**plain(found), "total_bytes": found.total_bytes, "free_bytes": free,
                    "fits": found.peak_bytes <= free})  # fmt: skip
        return
    print_table(("what", "MiB"), [*_rows(found), ("free now", mebibytes(free))], right=("MiB",))
    verdict = "fits" if found.peak_bytes <= free else "DOES NOT FIT"
    click.echo(f"{verdict}: n_ctx {found.n_ctx}, peak {mebibytes(found.peak_bytes)} MiB of "
               f"{mebibytes(free)} MiB free")  # fmt: skip


def _rows(found: MemoryPlan) -> list[tuple[str, str]]:
    kinds = sorted(found.kv_bytes_by_kind.items())
    parts = [
        ("weights", found.weights_bytes),
        *[(f"KV cache, {kind}", n_bytes) for kind, n_bytes in kinds],
        *([] if kinds else [("KV cache", found.kv_bytes)]),
        ("compute", found.compute_bytes),
        ("sum", found.total_bytes),
        ("peak, loading included", found.peak_bytes),
    ]
    return [(name, mebibytes(n_bytes)) for name, n_bytes in parts]


def free_bytes() -> int:
    """Return the memory that programs may still take here, a container's limit included."""
    import psutil  # noqa: PLC0415  (help needs none of it)

    free = int(psutil.virtual_memory().available)
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text()) - _reclaimable_bytes()
    except (OSError, ValueError):  # no control groups, or "max": no limit
        return free
    return max(0, min(free, limit - used))


def _reclaimable_bytes() -> int:
    """Pages of files that nobody used of late: the system drops them when memory is wanted."""
    for line in (_CGROUP / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0
