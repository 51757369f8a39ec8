"""What a pool did since it was opened."""

from __future__ import annotations

import attrs


@attrs.define
class Tally:
    """Counts of tokens, engine calls and what became of sequences.

    ``step_ms`` is a moving average of the time of an engine call, None before the first.
    """

    cached_tokens: int = 0
    restored_tokens: int = 0
    evaluated_tokens: int = 0
    generated_tokens: int = 0
    n_steps: int = 0
    n_batched: int = 0
    n_preempted: int = 0
    n_moved_out: int = 0
    n_restarts: int = 0
    step_ms: float | None = None

    def count_step(self, n_sequences: int, elapsed_ms: float) -> None:
        """Count an engine call."""
        self.n_batched += n_sequences
        old = self.step_ms
        self.step_ms = elapsed_ms if old is None else old + 0.1 * (elapsed_ms - old)
