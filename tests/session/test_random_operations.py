"""Random operations, as many as asked for: no mismatch, and memory that stays flat.

``INFERCORE_OPERATIONS`` sets how many are done on each backend (10,000 before a release); run
with ``-s`` to see the counts and the resident memory at intervals.
"""

from __future__ import annotations

import os
import pathlib
import random
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from typing import Any

import machine
import psutil
import pytest

import pack

N_OPERATIONS = int(os.environ.get("INFERCORE_OPERATIONS", "60"))
N_REPORTS = 10
MOST_GROWTH = 64 * 2**20  # bytes, from the second report on


def random_failure(rng: random.Random) -> machine.Failure | None:
    if rng.random() < 0.7:
        return None
    work = rng.choice(["nothing", "half", "all"])
    error = rng.choice(sorted(machine.ERRORS))
    return rng.choice(machine.CALLS), error, rng.randint(1, 3), work


def operate(one: machine.SessionMachine, rng: random.Random, failure: Any) -> None:
    """Do one operation that is possible now."""
    text = "".join(rng.choices(machine.PIECES, k=rng.randint(0, 9)))
    head = rng.choice(["", "Once ", "Once upon the ", "Once upon the time é"])
    can_save = one.session.context.capabilities.sequence_state
    ways = [lambda: one.ensure_prefix(head=head, tail=text, failure=failure), one.go_on_as_cold,
            one.out_of_order]  # fmt: skip
    if one.state != "EMPTY":
        boundary = rng.choice(["joint", "split"])
        ways.append(lambda: one.replace_suffix(text=text, boundary=boundary, failure=failure))
    if one.state == "DECODED" and one.session.parts.n_generated:
        ways.append(lambda: one.append_suffix(text=text, failure=failure))
    if one.base():
        how = rng.choice(["whole", "close", "drop", "cancel"])
        n, at = rng.randint(1, 8), rng.randint(0, 4)
        ways += [lambda: one.decode(n=n, stop_at=at, how=how, failure=failure)] * 2
    if can_save:
        ways.append(lambda: one.take_snapshot(failure=failure))
    if one.snapshot is not None:
        to_file = rng.random() < 0.2
        ways.append(lambda: one.restore(failure=failure, through_file=to_file))
    if rng.random() < 0.1:
        ways.append(lambda: one.fork(failure=failure))
    if one.twins:
        ways.append(one.use_and_close_twin)
    rng.choice(ways)()


def soak(opened: Any, name: str, *, faults: bool, **fields: Any) -> None:
    class Machine(machine.SessionMachine):
        open_model = staticmethod(opened)
        with_faults = faults

    Machine.fields = {**Machine.fields, **fields}
    rng, one, memory = random.Random(20260), Machine(), []
    one.begin()
    for i in range(1, N_OPERATIONS + 1):
        operate(one, rng, random_failure(rng) if faults else None)
        one.books_are_true()
        if i % max(1, N_OPERATIONS // N_REPORTS) == 0:
            memory.append(psutil.Process().memory_info().rss)
            print(  # noqa: T201  (what a soak is for)
                f"{name}: {i} operations, 0 mismatches, RSS {memory[-1] / 2**20:.1f} MiB"
            )
    one.teardown()
    Machine.model.close()
    assert memory[-1] - memory[min(1, len(memory) - 1)] < MOST_GROWTH


# An interruption that is injected while a dropped iterator ends cannot reach anybody.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_toy() -> None:
    from infercore.testing import load_toy_model

    soak(lambda faults: load_toy_model(faults=faults), "toy", faults=True)


@pytest.mark.parametrize("removes", ["any", "none"])
def test_reference(removes: str) -> None:
    pack.need_pack()
    from infercore.testing import load_reference_model

    soak(
        lambda faults: load_reference_model(faults=faults, kv_remove=removes),
        f"reference, removes {removes}",
        faults=True,
    )


@pytest.mark.timeout(3600)
def test_engines(backend_name: str, pack_path: Any) -> None:
    import infercore as ic

    soak(
        lambda _: ic.load_model(pack_path, backend=backend_name),
        backend_name,
        faults=False,
        **pack.EXACT,
    )
