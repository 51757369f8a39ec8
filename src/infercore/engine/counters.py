"""Times and counts of a context."""

from __future__ import annotations

import time

from infercore.values.info import PerfCounters

BESIDE = ("tokenize", "sample", "grammar")  # what sessions do beside evaluating


class Counters:
    """What was evaluated in which time; ``timed`` says whether anybody wants to know."""

    __slots__ = (
        "_load_ms", "beside_s", "decode_s", "decode_tokens", "prefill_s", "prefill_tokens",
        "reused_tokens", "timed",
    )  # fmt: skip

    def __init__(self, *, timed: bool, load_ms: float) -> None:
        self.timed = timed
        self._load_ms = load_ms
        self.reset()

    def reset(self) -> None:
        """Set all to zero."""
        self.decode_s = self.prefill_s = 0.0
        self.beside_s = dict.fromkeys(BESIDE, 0.0)
        self.decode_tokens = self.prefill_tokens = self.reused_tokens = 0

    def count(self, started: float, n_tokens: int, *, single: bool = False) -> None:
        """Count a call that began at ``started`` (`time.perf_counter`)."""
        if not self.timed:
            return
        elapsed = time.perf_counter() - started
        if single:
            self.decode_s += elapsed
            self.decode_tokens += n_tokens
        else:
            self.prefill_s += elapsed
            self.prefill_tokens += n_tokens

    def report(self) -> PerfCounters:
        """Return what was counted."""
        return PerfCounters(
            load_ms=self._load_ms,
            prefill_ms=self.prefill_s * 1e3,
            decode_ms=self.decode_s * 1e3,
            tokenize_ms=self.beside_s["tokenize"] * 1e3,
            sample_ms=self.beside_s["sample"] * 1e3,
            grammar_ms=self.beside_s["grammar"] * 1e3,
            prefill_tokens=self.prefill_tokens,
            decode_tokens=self.decode_tokens,
            reused_tokens=self.reused_tokens,
        )
