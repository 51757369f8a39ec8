"""What the results of a run rest on, and what is missing or required of it."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from infercore.conformance import options
from infercore.conformance.registry import laws
from infercore.conformance.requirements import REQUIREMENTS
from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from infercore.conformance.rig import Rig

MAX_SHARE = 0.02
"""The most that a tolerance may be of the spread of logits; quantised weights need that much."""
N_TOKENS = 24
SUITE = "suite"
MOST_SHOWN = 8


@attrs.frozen(kw_only=True)
class Standing:
    """What a run was made with.

    ``tolerance`` is the rig's; ``spread`` is the difference between the largest and the smallest
    logit of a text, ``moved`` the most that another token in it moves one (None for an encoder).
    ``oracle`` is what logits are compared with: "reference", "golden", or None for nothing.
    ``missing`` names what the rig does not bring, ``required`` what it must, ``unmet`` what of
    that is not there. ``refused`` names the options that the backend refuses (`OPTIONS`), of
    ``n_options``. ``n_laws`` counts the laws of the suite.
    """

    tolerance: float
    spread: float | None
    moved: float | None
    oracle: str | None
    missing: tuple[str, ...]
    required: tuple[str, ...]
    unmet: tuple[str, ...]
    n_laws: int
    refused: tuple[str, ...] = ()
    n_options: int = 0

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with it."""
        found = [f"{name} is required and missing" for name in self.unmet]
        if self.spread is not None and self.tolerance > MAX_SHARE * self.spread:
            found.append(
                f"the tolerance {self.tolerance:.3g} is more than {MAX_SHARE:.0%} of the spread of "
                f"the logits ({self.spread:.3g})"
            )
        elif self.moved is not None and self.tolerance >= self.moved:
            found.append(
                f"the tolerance {self.tolerance:.3g} hides that another token was read, which "
                f"moves the logits by {self.moved:.3g}"
            )
        return tuple(found)

    @property
    def told(self) -> str:
        """The tolerance, the oracle and what is missing, in a few words."""
        parts = [f"tolerance {self.tolerance:.3g}"]
        parts.append(f"oracle: {self.oracle}" if self.oracle else "NO ORACLE")
        left = [name for name in self.missing if name != "oracle"]
        if left:
            parts.append(f"without {', '.join(left)}")
        if self.refused:
            many = len(self.refused) > MOST_SHOWN
            counted = f"{len(self.refused)} of {self.n_options} options"
            parts.append(f"refuses {counted if many else ', '.join(self.refused)}")
        return "; ".join(parts)


_BROUGHT: dict[str, Callable[[Rig], bool]] = {
    "oracle": lambda rig: rig.oracle_name() is not None,
    "observe": lambda rig: rig.observe is not None,
    "adapter": lambda rig: rig.adapter is not None,
    "encoder": lambda rig: rig.is_encoder or rig.encoder is not None,
    "constraints": lambda _: importlib.util.find_spec("llguidance") is not None,
}
NAMES = tuple(dict.fromkeys([*_BROUGHT, SUITE, *REQUIREMENTS, *options.OPTIONS]))
"""What can be required: what a rig brings, the whole suite, what laws need, and options."""


def check_names(required: Iterable[str]) -> tuple[str, ...]:
    """Return ``required`` without repetitions. Raises `InvalidInputError` for a name of nothing."""
    names = tuple(dict.fromkeys(required))
    for name in names:
        if name not in NAMES:
            raise checks.refuse("require", name, f"names of: {', '.join(map(repr, NAMES))}")
    return names


def standing_of(rig: Rig, required: Iterable[str] = ()) -> Standing:
    """Return what a run of ``rig`` rests on. Raises what opening a context raises."""
    asked = check_names((*rig.require, *required))
    spread, moved = (None, None) if rig.is_encoder or not rig.shows_all_logits else _measured(rig)
    here = {name: has(rig) for name, has in _BROUGHT.items()}
    refused = () if rig.is_encoder or rig.in_pool else options.refused(rig)
    return Standing(
        tolerance=rig.tolerance,
        spread=spread,
        moved=moved,
        oracle=rig.oracle_name(),
        missing=tuple(name for name in _BROUGHT if not here[name]),
        required=asked,
        unmet=tuple(name for name in asked if not _is_there(name, here, rig)),
        n_laws=len(laws()),
        refused=refused,
        n_options=len(options.OPTIONS),
    )


def _is_there(name: str, here: dict[str, bool], rig: Rig) -> bool:
    if name in here:
        return here[name]
    if name == SUITE:  # what was run decides: see `Report.problems`
        return True
    if name in options.OPTIONS:
        return options.refusal(rig, name) is None
    try:
        return REQUIREMENTS[name].declared(rig)
    finally:
        rig.tidy()


def _measured(rig: Rig) -> tuple[float | None, float]:
    """Return the spread of a text's logits, and how far another token in it moves them."""
    rig.begin("tolerance", 0)
    tokens = rig.tokens(N_TOKENS)
    row = rig.cold(tokens)
    others = [token for token in rig.tokens(4 * N_TOKENS) if token != tokens[-2]]
    moved = 0.0
    for other in others[:2]:
        found = rig.cold([*tokens[:-2], other, tokens[-1]])
        moved = max(moved, _apart(found, row))
    known = row[np.isfinite(row)]
    return float(np.ptp(known)) if len(known) else None, moved  # DEC-7 says what is wrong then


def _apart(a: Any, b: Any) -> float:
    kept = np.isfinite(a) & np.isfinite(b)
    return float(np.abs(a[kept] - b[kept]).max(initial=0.0))
