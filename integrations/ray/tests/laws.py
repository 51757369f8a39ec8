"""The laws of sessions and pools, on two replicas behind `LocalReplicas`: the same code, no Ray.

python integrations/ray/tests/laws.py [LAW ...]
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from local import LocalReplicas

from infercore import conformance
from infercore.conformance.registry import select
from infercore.conformance.rig import Rig
from infercore.conformance.rigs import find_rig, isolated
from infercore_ray.engines import Engines, ReplicaPool

if TYPE_CHECKING:
    from collections.abc import Mapping

GROUPS = ("session", "pools")
LONE = {"POOL-16"}
"""Laws of one engine: the bound on load sends one of four sessions at once to the other replica."""


class _Pool(ReplicaPool):
    """A pool whose replicas end with it."""

    def close(self) -> None:
        super().close()
        self.process._handle.close()


def _opens(n_replicas: int) -> Any:
    def open_pool(rig: Rig, given: Mapping[str, Any]) -> Any:
        replicas = LocalReplicas(str(rig.path), n_replicas, backend=rig.backend, **given)
        return _Pool(Engines(replicas))

    return open_pool


def main() -> int:
    """Print what came of each law; return how many failed."""
    wanted = {law.id for law in select(sys.argv[1:] or GROUPS)}
    counts: dict[str, int] = {}
    for ids, n_replicas in ((wanted - LONE, 2), (wanted & LONE, 1)):
        if not ids:
            continue
        Rig._open_pool = _opens(n_replicas)  # type: ignore[method-assign]
        rig = isolated(find_rig("llamacpp"))
        report = conformance.check_backend(rig, only=sorted(ids), on_result=_say)
        for result in report.results:
            counts[result.outcome] = counts.get(result.outcome, 0) + 1
    sys.stdout.write(f"{counts}\n")
    return counts.get("fail", 0) + counts.get("FAIL", 0)


def _say(result: Any) -> None:
    reason = f": {result.reason}" if result.reason else ""
    sys.stdout.write(f"{result.id} {result.outcome} {result.elapsed_ms:.0f} ms{reason}\n")


if __name__ == "__main__":
    sys.exit(main())
