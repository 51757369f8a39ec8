"""The laws of sessions and pools, on two replicas behind `LocalReplicas`: the same code, no Ray.

python integrations/ray/tests/laws.py [LAW ...]
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from local import LocalReplicas

from infercore import conformance
from infercore.conformance.rig import Rig
from infercore.conformance.rigs import find_rig, isolated
from infercore_ray.engines import Engines, ReplicaPool

if TYPE_CHECKING:
    from collections.abc import Mapping

GROUPS = ("session", "pools")


class _Pool(ReplicaPool):
    """A pool whose replicas end with it."""

    def close(self) -> None:
        super().close()
        self.process._handle.close()


def _open_pool(rig: Rig, given: Mapping[str, Any]) -> Any:
    return _Pool(Engines(LocalReplicas(str(rig.path), 2, backend=rig.backend, **given)))


def main() -> int:
    """Print what came of each law; return how many failed."""
    rig = isolated(find_rig("llamacpp"))
    Rig._open_pool = _open_pool  # type: ignore[method-assign]
    only = sys.argv[1:] or GROUPS
    report = conformance.check_backend(rig, only=only, on_result=_say)
    counts: dict[str, int] = {}
    for result in report.results:
        counts[result.outcome] = counts.get(result.outcome, 0) + 1
    sys.stdout.write(f"{counts}\n")
    return counts.get("fail", 0) + counts.get("FAIL", 0)


def _say(result: Any) -> None:
    reason = f": {result.reason}" if result.reason else ""
    sys.stdout.write(f"{result.id} {result.outcome} {result.elapsed_ms:.0f} ms{reason}\n")


if __name__ == "__main__":
    sys.exit(main())
