"""The engine's own sampler keeps the laws of the portable one."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance.expect import equal, that
from infercore.conformance.law import law
from infercore.conformance.laws import sampling
from infercore.conformance.requirements import REQUIREMENTS
from infercore.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig

PORTABLE_LAWS = (
    sampling.check_temperature_zero,
    sampling.check_seed_repeats,
    sampling.check_seeds_differ,
    sampling.check_top_k,
    sampling.check_clone,
    sampling.check_reset,
    sampling.check_ignore_eos,
    sampling.check_sampling_a_row,
)


class Native:
    """A rig whose samplers are the engine's own unless a law asks for another."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rig, name)

    def sampler(self, **fields: Any) -> Any:
        """Return a sampler of the engine."""
        return self._rig.sampler(**{"implementation": "native", **fields})


@law("SAMP-22", needs="native_sampler", since="1.2")
def check_native_keeps_the_portable_laws(rig: Rig) -> None:
    """Seeds, reset, clone, ends and rows of the engine's own sampler match the portable one's."""
    native: Any = Native(rig)
    for check in PORTABLE_LAWS:
        check(native)
    if REQUIREMENTS["kv_remove"].declared(rig):
        sampling.check_no_sample_of_stale_logits(native)


LENGTHS = (100, 37, 34, 12, 3)
"""Tokens of what was said before that penalties see."""

_PENALTIES: tuple[dict[str, Any], ...] = (
    {"repeat_penalty": 1.4},
    {"repeat_penalty": 1.3, "penalty_last_n": 3},
    {"repeat_penalty": 1.3, "penalty_last_n": -1},
    {"repeat_penalty": 1.3, "penalty_last_n": 0},
    {"frequency_penalty": 1.1},
    {"presence_penalty": 2.3, "frequency_penalty": 0.4, "penalty_last_n": 6},
    {"dry_multiplier": 2.0, "dry_sequence_breakers": ()},
    {"dry_multiplier": 1.5, "dry_base": 1.3, "dry_allowed_length": 1, "dry_sequence_breakers": ()},
    {"dry_multiplier": 2.5, "dry_allowed_length": 3, "dry_sequence_breakers": ("\n",)},
    {"dry_multiplier": 2.0, "dry_penalty_last_n": 8, "dry_sequence_breakers": ()},
    {"dry_multiplier": 2.0, "dry_penalty_last_n": 0, "dry_sequence_breakers": ()},
    {"dry_multiplier": 1.2, "repeat_penalty": 1.2, "dry_sequence_breakers": ()},
    {"dry_multiplier": 3.0},
    {"dry_multiplier": 3.0, "dry_sequence_breakers": ("e", "a")},
    {"dry_multiplier": 3.0, "dry_sequence_breakers": ("the ", "\n")},
    {"dry_multiplier": 2.0, "dry_base": 0.5, "dry_sequence_breakers": ()},
)


@law("SAMP-23", needs="native_sampler", since="1.2")
def check_native_penalties(rig: Rig) -> None:
    """Without chance, penalties and dry choose the portable sampler's tokens, one after another.

    What was said before repeats itself in runs of several lengths, so that each penalty counts.
    """
    context, row = sampling._row(rig)  # noqa: SLF001  (the same row as in other laws)
    a, b, c, d, e = sampling._best(row, 5)  # noqa: SLF001
    other = rig.tokens(9)
    said = [*other, a, b, c, d, *other[:4], a, b, c, e, b, a, *other, a, b, c, a, a, b]
    for fields in _PENALTIES:
        for before in (*(said[:n] for n in LENGTHS), [a, b, c, a, b], [a], []):
            portable = rig.sampler(temperature=0, **fields)
            try:
                native = rig.sampler(temperature=0, implementation="native", **fields)
            except UnsupportedFeatureError:
                break
            for sampler in (portable, native):
                sampler.observe(before)
            for i in range(8):
                # A distribution of two near ones cannot tell which is right: another draw can.
                chosen, found = portable.sample(context), native.sample(context)
                equal(found, chosen, f"token {i} after {before} with {fields}")


_CUTS: tuple[dict[str, Any], ...] = (
    {"top_k": 7, "top_p": 0.7, "temperature": 2.0},
    {"top_p": 0.3, "min_keep": 3, "temperature": 1.5},
    {"min_p": 0.6, "min_keep": 4, "temperature": 2.0},
    {"typical_p": 0.3, "min_keep": 3},
    {"typical_p": 0.9, "temperature": 3.0, "top_k": 12},
    {"top_n_sigma": 2.0, "temperature": 2.0, "top_k": 8},
    {"temperature": 1.5, "dynatemp_range": 1.0, "dynatemp_exponent": 2.0, "top_k": 10},
    {"temperature": 0.5, "dynatemp_range": 2.0, "top_k": 10},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02, "temperature": 3.0, "top_k": 12},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02, "min_keep": 9, "top_k": 10, "temperature": 2.0},
    {"xtc_probability": 0.4, "xtc_threshold": 0.02, "temperature": 3.0, "top_k": 12},
    {"mirostat": 1, "mirostat_tau": 1.0, "mirostat_eta": 0.3, "temperature": 2.0},
    {"mirostat": 1, "mirostat_tau": 4.0, "temperature": 3.0},
    {"mirostat": 2, "mirostat_tau": 1.0, "mirostat_eta": 0.3, "temperature": 2.0},
    {"mirostat": 2, "mirostat_tau": 4.0, "temperature": 3.0},
)
N_DRAWS = 120


@law("SAMP-24", needs="native_sampler", since="1.2")
def check_native_cuts(rig: Rig) -> None:
    """Filters in combination, and mirostat over several tokens, draw as often as the portable's."""
    context, _ = sampling._row(rig)  # noqa: SLF001
    for fields in _CUTS:
        asked = {**sampling.PLAIN, **fields}
        try:
            rig.sampler(**asked, implementation="native")
        except UnsupportedFeatureError:
            continue
        seen: list[Counter[Any]] = []
        for kind in ("portable", "native"):
            counts: Counter[Any] = Counter()
            for seed in range(N_DRAWS):
                sampler = rig.sampler(**asked, implementation=kind, seed=seed)
                n = 4 if "mirostat" in fields else 1
                tokens = [int(sampler.sample(context)) for _ in range(n)]
                counts.update((i, token) for i, token in enumerate(tokens))
            seen.append(counts)
        for drawn in seen[0].keys() | seen[1].keys():
            one, two = (counts[drawn] for counts in seen)
            allowed = 5 * np.sqrt(one + two) + 2
            that(abs(one - two) <= allowed, f"{fields}: {drawn} {two} times, portable {one}")


_STATES: tuple[dict[str, Any], ...] = (
    {"mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.4, "temperature": 3.0},
    {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.4, "temperature": 3.0},
    {"repeat_penalty": 1.5, "frequency_penalty": 0.3, "temperature": 3.0},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": ()},
)


@law("SAMP-25", needs="native_sampler", since="1.2")
def check_native_state_is_cloned_and_reset(rig: Rig) -> None:
    """What the engine's own sampler remembers passes to its clone and is cleared by a reset."""
    context, row = sampling._row(rig)  # noqa: SLF001
    said = sampling._best(row, 3)  # noqa: SLF001
    for fields in _STATES:
        sampler = rig.sampler(
            **{**sampling.PLAIN, **fields}, implementation="native", seed=rig.random.randrange(999)
        )
        sampler.observe(said)
        first = [sampler.sample(context) for _ in range(6)]
        twin = rig.opened(sampler.clone())
        after = [twin.sample(context) for _ in range(8)]
        equal([sampler.sample(context) for _ in range(8)], after, f"beside its clone, {fields}")
        sampler.reset()
        sampler.observe(said)
        equal([sampler.sample(context) for _ in range(6)], first, f"after a reset, {fields}")
        more = [twin.sample(context) for _ in range(4)]
        fresh = rig.opened(twin.clone())
        that(len(more) == 4 and fresh.seed == sampler.seed, "the seed of a clone")  # noqa: PLR2004
