"""A suite of laws that any backend must keep, run against one backend at a time.

>>> from infercore.conformance import check_backend, find_rig
>>> report = check_backend(find_rig("reference"), only=["DEC-*"])
>>> report.passed
True

A backend supplies one `Rig`; laws are plain functions ``check_<law>(rig)`` (see `laws`). The same
laws run as ``pytest --pyargs infercore.conformance --infercore-backend NAME`` and as
``infercore conformance NAME``.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infercore.conformance.expect import LawError as LawError
    from infercore.conformance.expect import NotApplicable as NotApplicable
    from infercore.conformance.law import SUITE_VERSION as SUITE_VERSION
    from infercore.conformance.law import Law as Law
    from infercore.conformance.registry import laws as laws
    from infercore.conformance.registry import select as select
    from infercore.conformance.render import matrix as matrix
    from infercore.conformance.report import Report as Report
    from infercore.conformance.report import Result as Result
    from infercore.conformance.rig import Golden as Golden
    from infercore.conformance.rig import Observation as Observation
    from infercore.conformance.rig import Rig as Rig
    from infercore.conformance.rigs import find_rig as find_rig
    from infercore.conformance.rigs import rig_names as rig_names
    from infercore.conformance.runner import check_backend as check_backend
    from infercore.conformance.runner import run_law as run_law

# Set before NumPy is loaded: threads of its BLAS fight with those of the engines, and the oracle's
# small products take ten times as long with them on a busy machine.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_HOMES = {
    "expect": "LawError NotApplicable",
    "law": "SUITE_VERSION Law",
    "registry": "laws select",
    "render": "matrix",
    "report": "Report Result",
    "rig": "Golden Observation Rig",
    "rigs": "find_rig rig_names",
    "runner": "check_backend run_law",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
