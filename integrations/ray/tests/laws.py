"""The laws of sessions and pools, on two replicas.

python integrations/ray/tests/laws.py [--ray] [LAW ...]

Without ``--ray`` the replicas are behind `LocalReplicas`: the same code, no Ray. With it they are
an application on a Ray of two nodes, and the pool is that of `infercore_ray.connect`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from typing import TYPE_CHECKING, Any

from local import LocalReplicas
from ray import serve

import infercore_ray
from conftest import a_cluster
from infercore import conformance
from infercore.conformance.registry import select
from infercore.conformance.rig import Rig
from infercore.conformance.rigs import find_rig, isolated
from infercore_ray.engines import Engines, ReplicaPool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

GROUPS = ("session", "pools")
LONE = {"POOL-16"}
"""Laws of one engine: the bound on load sends one of four sessions at once to the other replica."""
UNHEARD = {"POOL-3", "POOL-15", "POOL-18", "POOL-24"}
"""Laws that count an engine's steps, of which a replica in another process tells nobody."""
AS_ASKED = {"n_step_tokens": None}
"""Replicas have the defaults of `infercore serve`, the laws those of a pool."""


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


def _opens_on_ray(n_replicas: int) -> Any:
    numbers = itertools.count()

    def open_pool(rig: Rig, given: Mapping[str, Any]) -> Any:
        name = f"laws-{n_replicas}-{next(numbers)}"
        own = {"backend": rig.backend, "ray_actor_options": {"num_cpus": 0.01}}
        app = infercore_ray.build_app(
            {name: str(rig.path)}, num_replicas=n_replicas, **own, **{**AS_ASKED, **given}
        )
        serve.run(app, name=name, route_prefix=f"/{name}")
        pool: Any = infercore_ray.connect(name)
        close = pool.close

        def close_all() -> None:
            close()
            serve.delete(name, _blocking=False)

        pool.close = close_all
        return pool

    return open_pool


def main() -> int:
    """Print what came of each law; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ray", action="store_true", help="on a Ray of two nodes")
    parser.add_argument("laws", nargs="*", default=GROUPS)
    options = parser.parse_args()
    wanted = {law.id for law in select(options.laws)}
    if not options.ray:
        return check(wanted, _opens)
    with a_cluster():
        serve.start(http_options={"location": "NoServer"})
        try:
            return check(wanted - UNHEARD, _opens_on_ray)
        finally:
            serve.shutdown()


def check(wanted: set[str], opens: Callable[[int], Any]) -> int:
    """Print what came of each law; return how many failed."""
    counts: dict[str, int] = {}
    for ids, n_replicas in ((wanted - LONE, 2), (wanted & LONE, 1)):
        if not ids:
            continue
        Rig._open_pool = opens(n_replicas)  # type: ignore[method-assign]
        rig = isolated(find_rig("llamacpp"))
        report = conformance.check_backend(rig, only=sorted(ids), on_result=_say)
        for result in report.results:
            counts[result.outcome] = counts.get(result.outcome, 0) + 1
    sys.stdout.write(f"{counts}\n")
    return counts.get("fail", 0) + counts.get("FAIL", 0)


def _say(result: Any) -> None:
    reason = f": {result.reason}" if result.reason else ""
    sys.stdout.write(f"{result.id} {result.outcome} {result.elapsed_ms:.0f} ms{reason}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    os._exit(main())  # threads that wait for replicas that are gone
