"""Any sequence of calls, with failures at any engine call: the tape is the engine's truth."""

from __future__ import annotations

import os
import pathlib
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small matrices, which threads slow down
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from typing import TYPE_CHECKING, Any

import machine
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

import pack

if TYPE_CHECKING:
    from infercore.testing import Faults

REMOVES = {
    "any": {},
    "suffix": {"kv_remove": "suffix"},
    "rollback": {"kv_remove": "rollback", "max_rollback": 2},
    "none": {"kv_remove": "none"},
}


def examine(opened: Any, n_examples: int, *, faults: bool = True, **fields: Any) -> None:
    class Machine(machine.SessionMachine):
        open_model = staticmethod(opened)
        with_faults = faults

    Machine.fields = {**Machine.fields, **fields}
    scale = float(os.environ.get("INFERCORE_EXAMPLES", "1"))
    checked = settings(
        max_examples=max(1, int(n_examples * scale)),
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=scale == 1,
        print_blob=True,
    )
    try:
        run_state_machine_as_test(Machine, settings=checked)
    finally:
        if Machine.model is not None:
            Machine.model.close()


@pytest.mark.parametrize("removes", sorted(REMOVES))
def test_toy(removes: str) -> None:
    from infercore.testing import load_toy_model

    examine(lambda faults: load_toy_model(faults=faults, **REMOVES[removes]), 40)


@pytest.mark.parametrize("removes", sorted(REMOVES))
def test_reference(removes: str) -> None:
    pack.need_pack()
    from infercore.testing import load_reference_model

    examine(lambda faults: load_reference_model(faults=faults, **REMOVES[removes]), 6)


def test_reference_with_sessions_that_share_a_context() -> None:
    pack.need_pack()
    from infercore.testing import load_reference_model

    def opened(faults: Faults) -> Any:
        return load_reference_model(faults=faults)

    examine(opened, 6, n_seq_max=2, kv_unified=True, n_ctx=144)


def test_engines(backend_name: str, pack_path: Any) -> None:
    import infercore as ic

    def opened(_: Faults) -> Any:
        return ic.load_model(pack_path, backend=backend_name)

    examine(opened, 4, faults=False, **pack.EXACT)
